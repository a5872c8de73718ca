"""What is installed in an environment, read from its files: it may be too damaged to ask.

Format: https://packaging.python.org/specifications/recording-installed-packages/
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sm121.errors import UsageFault
from sm121.files import sha256_file
from sm121.repair.record import Entry, encode_digest, parse_record
from sm121.rules.build import build_from_version, version_file
from sm121.rules.engine import Member

_HASHERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A virtual environment. python: its X.Y; site: its site-packages."""

    root: Path
    site: Path
    python: str

    @property
    def interpreter(self) -> Path:
        return self.root / "bin" / "python"

    def inside(self, path: str) -> Path | None:
        """The file of a RECORD path; None if it lies outside the environment."""
        full = Path(os.path.normpath(self.site / path))
        return full if full.is_relative_to(self.root) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """One dist-info folder. fault: what is wrong with the folder itself, or ''."""

    distribution: str
    version: str
    folder: Path
    record: Mapping[str, Entry]
    fault: str = ""


def open_environment(root: Path) -> Environment:
    """Raises UsageFault if the folder is not a virtual environment."""
    root = Path(os.path.abspath(root))  # noqa: PTH100 - links stay: uv names paths as given
    sites = sorted(root.glob("lib/python3.*/site-packages"))
    if not (root / "pyvenv.cfg").is_file() or len(sites) != 1:
        raise UsageFault(
            f"{root} is not a virtual environment.",
            cause="pyvenv.cfg and one lib/python3.*/site-packages are what makes one",
            remedy="Give the folder that install.py made; a container's system Python can't be "
            "repaired.",
        )
    return Environment(root=root, site=sites[0], python=sites[0].parent.name[len("python") :])


def read_installed(environment: Environment) -> list[Installed]:
    """Every dist-info folder, by name."""
    return [_read(folder) for folder in sorted(environment.site.glob("*.dist-info"))]


def _read(folder: Path) -> Installed:
    name, _, version = folder.name.removesuffix(".dist-info").partition("-")
    faults = []
    record: Mapping[str, Entry] = {}
    try:
        head = HeaderParser().parsestr((folder / "METADATA").read_text(errors="replace"))
        name, version = head.get("Name", name), head.get("Version", version)
    except OSError:
        faults.append("METADATA is missing")
    try:
        record = parse_record((folder / "RECORD").read_text(errors="replace"))
    except OSError:
        faults.append("RECORD is missing")
    try:
        version = str(Version(version))
    except InvalidVersion:
        faults.append(f"version {version!r} is none")
        version = "0"
    return Installed(
        distribution=canonicalize_name(name), version=version, folder=folder, record=record,
        fault=", ".join(faults),
    )  # fmt: skip


def family_members(environment: Environment, installed: Sequence[Installed]) -> list[Member]:
    """The installed set for the rules (sm121.rules). Files are not given: who compares them does
    so by content."""
    members = []
    for one in installed:
        try:
            text = (environment.site / version_file(one.distribution)).read_text(errors="replace")
        except OSError:
            text = ""
        members.append(
            Member(
                distribution=one.distribution, version=one.version,
                build=build_from_version(text), place=one.folder.name,
            )
        )  # fmt: skip
    return members


def differing(environment: Environment, wanted: Mapping[str, Entry]) -> dict[str, str]:
    """Paths that are not as wanted: path → 'missing', 'cut short', 'larger', or 'other content'.

    An entry without a digest has to be there, no more.
    """
    found: dict[str, str] = {}
    to_hash: list[tuple[str, Path, str]] = []
    for path, entry in wanted.items():
        file = environment.inside(path)
        try:
            size = file.stat().st_size if file else -1
        except OSError:
            size = -1
        if size < 0 or file is None:
            found[path] = "missing"
        elif entry.size is not None and size != entry.size:
            found[path] = "cut short" if size < entry.size else "larger"
        elif entry.digest:
            to_hash.append((path, file, entry.digest))
    with ThreadPoolExecutor(_HASHERS) as pool:
        digests = pool.map(lambda item: _digest(item[1]), to_hash)
        for (path, _, digest), actual in zip(to_hash, digests, strict=True):
            if actual != digest:
                found[path] = "other content"
    return found


def _digest(file: Path) -> str:
    try:
        return encode_digest(bytes.fromhex(sha256_file(file)))
    except OSError:
        return ""


def unclaimed(environment: Environment, folders: Iterable[str], claimed: set[str]) -> Iterator[str]:
    """Files that lie in these folders of site-packages and belong to nobody; no bytecode."""
    for folder in sorted(set(folders)):
        try:
            names = sorted(p.name for p in (environment.site / folder).iterdir() if p.is_file())
        except OSError:
            continue
        for name in names:
            path = f"{folder}/{name}"
            if path not in claimed and not name.endswith(".pyc"):
                yield path
