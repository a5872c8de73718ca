"""From wheels and environments to facts. Slow once, then remembered by content.

Cache: `<cache>/abi/<facts version>/<sha256>`, zlib level 1. A damaged entry is made anew.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from itertools import product
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sm121.abi import facts
from sm121.abi.archive import Archive, Member
from sm121.abi.elf import MAGIC, read_elf
from sm121.abi.facts import Binary, Wheel
from sm121.abi.fatbin import Container, read_containers
from sm121.abi.source import FileSource, Malformed, Source
from sm121.files import HashMemory, write_atomic

# Two wheels at once: inflating releases the interpreter lock, parsing does not, and more
# than two would hold more symbol tables in memory.
_THREADS = 2
# Version strings are in .rodata, before the code: libnccl 2.30.4 has its at 2.6 MB.
_STRINGS_WITHIN = 32 << 20
# What ncclGetVersion's log line is made from: 'NCCL version 2.30.4+cuda13.0'.
NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+\+cuda\d+\.\d+)")
_STRINGS = {"libnccl.so": NCCL_VERSION}
_TEXT_MAX = 8192


class FactsCache:
    """Facts by sha256 of the wheel."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "abi" / f"facts-{facts.VERSION}"

    def find(self, sha256: str) -> Wheel | None:
        try:
            return facts.from_bytes(zlib.decompress((self.folder / sha256).read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            return None

    def store(self, wheel: Wheel) -> None:
        write_atomic(self.folder / wheel.sha256, zlib.compress(facts.to_bytes(wheel), 1))


def scan_wheels(
    paths: Sequence[Path],
    *,
    cache: FactsCache,
    memory: HashMemory,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Wheel]:
    """Facts of each wheel, in the order given. progress: called with bytes done and total."""
    sizes = {path: path.stat().st_size for path in paths}
    done = 0

    def one(path: Path) -> Wheel:
        sha256 = memory.sha256(path)
        wheel = cache.find(sha256)
        if wheel is None or wheel.filename != path.name:
            wheel = scan_wheel(path, sha256, spool=_spool(cache))
            cache.store(wheel)
        return wheel

    results: dict[Path, Wheel] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        # Largest first, so that the last worker does not end alone with cuBLAS.
        jobs = {p: pool.submit(one, p) for p in sorted(sizes, key=lambda p: -sizes[p])}
        try:
            for path, job in jobs.items():
                results[path] = job.result()
                done += sizes[path]
                progress(done, sum(sizes.values()))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [results[path] for path in paths]


def _spool(cache: FactsCache) -> Path:
    cache.folder.mkdir(parents=True, exist_ok=True)
    return cache.folder


def scan_wheel(path: Path, sha256: str, *, spool: Path) -> Wheel:
    """Read one wheel. What is wrong with it becomes `damage`, never an exception."""
    name, version, tags = filename_parts(path.name)
    try:
        archive = Archive(path)
    except Malformed as error:
        return Wheel(
            filename=path.name, sha256=sha256, distribution=name, version=version, tags=tags,
            files={}, texts={}, damage=str(error),
        )  # fmt: skip
    try:
        return _scan_archive(archive, sha256, (name, version, tags), spool)
    finally:
        archive.close()


def _scan_archive(
    archive: Archive, sha256: str, named: tuple[str, str, tuple[str, ...]], spool: Path
) -> Wheel:
    files: dict[str, str] = {}
    texts: dict[str, str] = {}
    binaries: list[Binary] = []
    damage = ""
    for member in archive.members:
        path = installed_path(member.name)
        files[path] = ""
        try:
            if member.size >= 52 and archive.head(member) == MAGIC:
                binaries.append(_scan_member(archive, member, path, spool))
            elif _wanted_text(path, member.size):
                texts[text_key(path)] = archive.text(member)
        except Malformed as error:
            damage = damage or str(error)
    files.update(record_hashes(texts.pop("RECORD", ""), set(files)))
    if metadata := texts.pop("METADATA", ""):
        headers = HeaderParser().parsestr(metadata.split("\n\n")[0])
        texts["Requires-Python"] = str(headers.get("Requires-Python") or "")
        texts["Name"] = str(headers.get("Name") or "")
        texts["Version"] = str(headers.get("Version") or "")
        texts["Requires-Dist"] = "\n".join(headers.get_all("Requires-Dist") or [])
    return Wheel(
        filename=archive.path.name, sha256=sha256, distribution=named[0], version=named[1],
        tags=named[2], files=files, texts=texts, binaries=tuple(binaries), damage=damage,
    )  # fmt: skip


def _scan_member(archive: Archive, member: Member, path: str, spool: Path) -> Binary:
    try:
        with archive.open(member, spool) as source:
            return scan_elf(source, path)
    except Malformed as error:
        return Binary(path=path, elf=None, damage=str(error))


def scan_elf(source: Source, path: str) -> Binary:
    """Facts of one ELF file. What is wrong with it becomes `damage`."""
    try:
        elf = read_elf(source)
    except Malformed as error:
        return Binary(path=path, elf=None, damage=str(error))
    containers: tuple[Container, ...] = ()
    damage = ""
    try:
        if elf.fatbin:
            containers = tuple(read_containers(source, *elf.fatbin))
    except Malformed as error:
        damage = str(error)
    strings: set[str] = set()
    for prefix, pattern in _STRINGS.items():
        if path.rpartition("/")[2].startswith(prefix):
            strings |= _find(source, pattern)
    return Binary(
        path=path, elf=elf, containers=containers, damage=damage, strings=tuple(sorted(strings))
    )


def _find(source: Source, pattern: re.Pattern[bytes]) -> set[str]:
    found: set[str] = set()
    end = min(source.size, _STRINGS_WITHIN)
    for at in range(0, end, 1 << 20):
        block = source.read(at, min((1 << 20) + 64, source.size - at))
        found |= {match[1].decode("ascii") for match in pattern.finditer(block)}
    return found


def installed_path(member: str) -> str:
    """Where an installer puts a member, relative to site-packages (PEP 427, `.data`)."""
    match = re.match(r"[^/]+\.data/(purelib|platlib)/(.+)", member)
    return match[2] if match else member


def filename_parts(filename: str) -> tuple[str, str, tuple[str, ...]]:
    """(distribution, version, tags) of a wheel's file name; tags are empty if it is none."""
    try:
        name, version, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return canonicalize_name(filename.split("-")[0]), "", ()
    return name, str(version), tuple(sorted(str(tag) for tag in tags))


def _wanted_text(path: str, size: int) -> bool:
    folder, _, name = path.rpartition("/")
    if folder.endswith(".dist-info") and "/" not in folder:
        return name in ("METADATA", "RECORD", "WHEEL")
    return name == "version.py" and "/" not in folder and size <= _TEXT_MAX


def text_key(path: str) -> str:
    """dist-info files by bare name, others by path."""
    folder, _, name = path.rpartition("/")
    return name if folder.endswith(".dist-info") else path


def record_hashes(record: str, known: set[str]) -> dict[str, str]:
    """path → 'sha256=…' of a RECORD file (PEP 376), for files that are really there.

    Lines are split from the right: hash and size hold no comma, a path may.
    """
    hashes: dict[str, str] = {}
    for line in record.splitlines():
        path, _, _size = line.rpartition(",")
        path, _, digest = path.rpartition(",")
        path = installed_path(path.strip('"'))
        if digest and path in known:
            hashes[path] = digest
    return hashes


def scan_environment(
    site: Path, *, cache: FactsCache, memory: HashMemory, read_hashes: Callable[[str], bool]
) -> list[Wheel]:
    """Facts of an installed environment, one `Wheel` per dist-info.

    Files are found by walking the folder, not by RECORD: what a half-removed package left
    behind is loaded all the same. Those that no RECORD names belong to distribution ''.
    read_hashes: says for which paths the real content's hash is needed.
    """
    owners: dict[str, str] = {}
    info: dict[str, tuple[str, str, dict[str, str]]] = {}
    for folder in sorted(site.glob("*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        record = folder / "RECORD"
        text = record.read_text("utf-8", "replace") if record.is_file() else ""
        paths = [line.rsplit(",", 2)[0].strip('"') for line in text.splitlines()]
        key = canonicalize_name(name)
        info[key] = (version, text, {})
        for path in paths:
            owners[path] = key
    binaries: dict[str, list[Binary]] = {}
    texts: dict[str, dict[str, str]] = {}
    files: dict[str, dict[str, str]] = {}
    for root, folders, names in os.walk(site):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(names):
            file = Path(root) / name
            path = file.relative_to(site).as_posix()
            owner = owners.get(path, "")
            if not file.is_file():
                continue
            actual = _b64(memory.sha256(file)) if read_hashes(path) else ""
            files.setdefault(owner, {})[path] = actual
            if _wanted_text(path, 0 if name != "version.py" else file.stat().st_size):
                texts.setdefault(owner, {})[text_key(path)] = file.read_text("utf-8", "replace")
            with file.open("rb") as opened:
                if opened.read(4) != MAGIC:
                    continue
                binaries.setdefault(owner, []).append(
                    _cached_elf(file, path, opened.fileno(), cache, memory)
                )
    return [
        Wheel(
            filename=f"{name} {info[name][0]}" if name else "(files of no package)",
            sha256="", distribution=name, version=info[name][0] if name else "",
            files=files.get(name, {}), texts=texts.get(name, {}) | (
                {"RECORD": info[name][1]} if name else {}
            ),
            binaries=tuple(binaries.get(name, ())),
        )
        for name in sorted({*files, *info})
    ]  # fmt: skip


def _cached_elf(file: Path, path: str, fd: int, cache: FactsCache, memory: HashMemory) -> Binary:
    sha256 = memory.sha256(file)
    known = cache.find(sha256)
    if known is not None and known.binaries and known.binaries[0].path == path:
        return known.binaries[0]
    binary = scan_elf(FileSource(fd), path)
    cache.store(
        Wheel(
            filename=path, sha256=sha256, distribution="", version="", files={}, texts={},
            binaries=(binary,),
        )
    )  # fmt: skip
    return binary


def _b64(sha256: str) -> str:
    """Hex digest as RECORD writes it (PEP 376: urlsafe base64 without padding)."""
    import base64

    raw = base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=")
    return f"sha256={raw.decode('ascii')}"


def expand_tags(tags: Sequence[str]) -> list[tuple[str, str, str]]:
    """('py2.py3', 'none', 'any') style tags as single (interpreter, abi, platform) triples."""
    out: list[tuple[str, str, str]] = []
    for tag in tags:
        parts = [part.split(".") for part in tag.split("-")]
        if len(parts) == 3:
            out += [(a, b, c) for a, b, c in product(*parts)]
    return out
