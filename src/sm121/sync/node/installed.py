"""What is installed in a release's environment, file by file, against its wheels.

The truth is in the wheels, whose own digests are in RELEASE: paths and digests of their RECORDs,
and where a file differs from that, the member itself (some RECORDs are wrong).
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sm121.repair.record import Entry, encode_digest, installed_path, parse_record
from sm121.sync.node.store import sha256

# Made by `uv venv` and by installers, in no RECORD of a wheel.
_OWN = ("_virtualenv.py", "_virtualenv.pth")
# What Python would import or run; data that programs leave beside it decides nothing.
_CODE = (".py", ".pth", ".so")
_GENERATED = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_build.json", "uv_cache.json")  # fmt: skip


@dataclass(slots=True)
class Wanted:
    """What the wheels bring: path relative to site-packages → entry, and who brings it."""

    entries: dict[str, Entry] = field(default_factory=dict)
    owner: dict[str, tuple[Path, str]] = field(default_factory=dict)  # path → wheel, member
    folders: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # distribution → dist-info, version


def distribution(text: str) -> str:
    """Normalized name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", text).lower()


def read_wheels(wheels: Iterable[Path]) -> Wanted:
    """RECORDs of all wheels of a release."""
    wanted = Wanted()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (record,) = (
                n for n in archive.namelist()
                if n.endswith(".dist-info/RECORD") and n.count("/") == 1
            )  # fmt: skip
            lines = parse_record(archive.read(record).decode())
        folder = record.partition("/")[0]
        name, _, version = folder.removesuffix(".dist-info").partition("-")
        wanted.folders[distribution(name)] = (folder, version)
        for member, entry in lines.items():
            if member == record:
                continue
            path, rewritten = installed_path(member, distribution(name))
            wanted.entries[path] = Entry(digest="", size=None) if rewritten else entry
            wanted.owner[path] = (wheel, member)
    return wanted


def deviations(
    environment: Path, wheels: Iterable[Path]
) -> tuple[list[dict[str, object]], int, str]:
    """(deviations, number of files, digest over all of them).

    A deviation: distribution, kind, found, files (path → how). The digest covers every file that
    a wheel or an installer recorded, so it is equal on two nodes exactly if those are.
    """
    sites = sorted(environment.glob("lib/python3.*/site-packages"))
    if len(sites) != 1:
        return [_deviation("", "no environment", f"{environment} has no site-packages")], 0, ""
    site, wanted = sites[0], read_wheels(wheels)
    there: dict[str, list[str]] = {}
    for folder in site.glob("*.dist-info"):
        there.setdefault(distribution(folder.name.partition("-")[0]), []).append(folder.name)
    recorded = _recorded(site, there)
    everything = {**recorded, **wanted.entries}
    # Scripts: an installer writes the interpreter's path into them, and records the result.
    everything |= {
        p: recorded[p] for p, e in wanted.entries.items() if not e.digest and p in recorded
    }
    differ, found = _differing(environment, site, everything)
    for path in [p for p, how in differ.items() if how != "missing" and p in wanted.owner]:
        if _member_digest(*wanted.owner[path]) == found.get(path):
            del differ[path]
    by: dict[str, dict[str, str]] = {}
    for path, how in differ.items():
        by.setdefault(_owner(path, wanted, recorded, there), {})[path] = how
    result = []
    for name, (info, version) in sorted(wanted.folders.items()):
        present, files = there.get(name, []), by.pop(name, {})
        if not present:
            result.append(_deviation(name, "no dist-info", f"{info} is not there", files))
        elif present != [info]:
            result.append(
                _deviation(
                    name, "version", f"found {', '.join(sorted(present))}, wanted {version}", files
                )
            )
        elif files:
            result.append(_deviation(name, "files", f"{len(files)} file(s) differ", files))
    for name in sorted(set(there) - set(wanted.folders)):
        result.append(_deviation(name, "extra", f"{', '.join(there[name])} is not of the release", by.pop(name, {})))  # fmt: skip
    strays = _strays(site, set(everything))
    rest = {path: how for files in by.values() for path, how in files.items()}
    if rest or strays:
        result.append(_deviation("", "stray", "of no wheel", {**rest, **dict.fromkeys(strays, "added")}))  # fmt: skip
    lines = "".join(f"{found.get(p, '')}  {p}\n" for p in sorted(everything))
    return result, len(everything), hashlib.sha256(lines.encode()).hexdigest()


def _deviation(
    name: str, kind: str, found: str, files: Mapping[str, str] | None = None
) -> dict[str, object]:
    return {"distribution": name, "kind": kind, "found": found, "files": dict(files or {})}


def _recorded(site: Path, there: Mapping[str, list[str]]) -> dict[str, Entry]:
    """What the installed RECORDs say, with a digest: also of the scripts that an installer made."""
    recorded: dict[str, Entry] = {}
    for folder in [f for folders in there.values() for f in folders]:
        try:
            lines = parse_record((site / folder / "RECORD").read_text(errors="replace"))
        except OSError:
            continue
        recorded |= {
            path: entry for path, entry in lines.items()
            if entry.digest and path.rpartition("/")[2] not in _GENERATED
        }  # fmt: skip
    return recorded


def _inside(environment: Path, site: Path, path: str) -> Path | None:
    full = Path(os.path.normpath(site / path))
    return full if full.is_relative_to(environment) else None


def _differing(
    environment: Path, site: Path, wanted: Mapping[str, Entry]
) -> tuple[dict[str, str], dict[str, str]]:
    """path → how it differs, and path → digest as RECORD writes it."""
    differ: dict[str, str] = {}
    places: dict[str, Path] = {}
    for path, entry in wanted.items():
        file = _inside(environment, site, path)
        if file is None or not file.is_file():
            differ[path] = "missing"
            continue
        size = file.stat().st_size
        if entry.size is not None and size != entry.size:
            differ[path] = "cut short" if size < entry.size else "larger"
        places[path] = file
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(sha256, places.values())
        found = {
            path: encode_digest(bytes.fromhex(digest))
            for path, digest in zip(places, digests, strict=True)
        }
    for path, digest in found.items():
        if wanted[path].digest and digest != wanted[path].digest:
            differ.setdefault(path, "other content")
    return differ, found


def _member_digest(wheel: Path, member: str) -> str:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return encode_digest(digest.digest())


def _owner(
    path: str, wanted: Wanted, recorded: Mapping[str, Entry], there: Mapping[str, list[str]]
) -> str:
    """Distribution that a path belongs to, '' if none is known."""
    if path in wanted.owner:
        return distribution(wanted.owner[path][0].name.partition("-")[0])
    head = path.partition("/")[0]
    return next((name for name, folders in there.items() if head in folders), "")


def _strays(site: Path, known: set[str]) -> list[str]:
    """Code in site-packages that no RECORD has."""
    found = []
    for folder, _, names in os.walk(site):
        inside = os.path.relpath(folder, site)
        for name in names:
            path = name if inside == "." else f"{inside}/{name}"
            if name.endswith(_CODE) and path not in known and path not in _OWN:
                found.append(path)
    return sorted(found)
