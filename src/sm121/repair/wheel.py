"""Read a wheel's metadata; rewrite a wheel so that nothing changes but what is named.

Formats: wheels and RECORD, https://packaging.python.org/specifications/binary-distribution-format/
and .../recording-installed-packages/.
"""

from __future__ import annotations

import copy
import csv
import hashlib
import io
import shutil
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from sm121.errors import WheelFault
from sm121.repair.record import Entry, encode_digest, installed_path, parse_record


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """What a wheel says about itself.

    metadata, tags: text of METADATA and WHEEL. record: by member name, without RECORD itself;
    it may be wrong (PyNvVideoCodec 2.0.4 was changed after it was written).
    """

    path: Path
    filename: str
    distribution: str
    version: str
    dist_info: str
    metadata: str
    tags: str
    record: Mapping[str, Entry]

    def requirements(self) -> list[Requirement]:
        """Requires-Dist of METADATA."""
        headers = HeaderParser().parsestr(self.metadata).get_all("Requires-Dist", [])
        return [Requirement(line) for line in headers]

    def installed(self) -> dict[str, Entry]:
        """Where its files end up, relative to site-packages: path → entry.

        Scripts of `*.data/scripts` are without a digest: an installer writes the
        interpreter's path into them.
        """
        placed: dict[str, Entry] = {}
        for name, entry in self.record.items():
            path, rewritten = installed_path(name, self.distribution)
            placed[path] = Entry(digest="", size=None) if rewritten else entry
        return placed


def member_entries(wheel: Wheel, paths: Iterable[str]) -> dict[str, Entry]:
    """What the wheel really holds for these installed paths, whatever its RECORD says."""
    wanted = set(paths)
    found = {}
    with zipfile.ZipFile(wheel.path) as archive:
        for name in wheel.record:
            path, rewritten = installed_path(name, wheel.distribution)
            if path in wanted and not rewritten:
                with archive.open(name) as member:
                    digest = hashlib.file_digest(member, "sha256").digest()  # type: ignore[arg-type]
                size = archive.getinfo(name).file_size
                found[path] = Entry(digest=encode_digest(digest), size=size)
    return found


def render_record(lines: Mapping[str, Entry], own: str) -> str:
    """RECORD's text. own: its own path, which is listed without a digest."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, entry in lines.items():
        writer.writerow((name, entry.digest, "" if entry.size is None else entry.size))
    writer.writerow((own, "", ""))
    return text.getvalue()


def record_digest(data: bytes) -> str:
    """As RECORD writes it: 'sha256=' and url-safe base64 without padding."""
    return encode_digest(hashlib.sha256(data).digest())


def read_wheel(path: Path) -> Wheel:
    """Read RECORD and METADATA. Raises WheelFault if it is no whole wheel."""
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            records = [
                n
                for n in archive.namelist()
                if n.endswith(".dist-info/RECORD") and n.count("/") == 1
            ]
            dist_info = records[0].removesuffix("/RECORD")
            record = parse_record(archive.read(records[0]).decode())
            metadata = archive.read(f"{dist_info}/METADATA").decode()
            tags = archive.read(f"{dist_info}/WHEEL").decode()
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise WheelFault(
            f"{path.name} is not a whole wheel.",
            cause=str(error),
            remedy="`nox -s build` notices an altered wheel and fetches only that one again.",
        ) from error
    record.pop(f"{dist_info}/RECORD", None)
    return Wheel(
        path=path, filename=path.name, distribution=canonicalize_name(name), version=str(version),
        dist_info=dist_info, metadata=metadata, tags=tags, record=record,
    )  # fmt: skip


def rewrite_wheel(
    source: Path,
    output: Path,
    *,
    edits: Mapping[str, bytes],
    removed: Iterable[str] = (),
) -> None:
    """Write a wheel with some members replaced, added or left out, and RECORD in agreement.

    All other members are copied as they are stored, compressed bytes and all. New content
    is stored uncompressed, with METADATA's time, so that the result is the same anywhere.
    """
    gone = set(removed)
    wheel = read_wheel(source)
    record_name = f"{wheel.dist_info}/RECORD"
    lines = {name: entry for name, entry in wheel.record.items() if name not in gone}
    for name, data in edits.items():
        lines[name] = Entry(digest=record_digest(data), size=len(data))
    record = render_record(lines, record_name)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(output, "w") as new:
        moment = old.getinfo(f"{wheel.dist_info}/METADATA").date_time
        for info in old.infolist():
            if info.filename not in edits and info.filename not in {*gone, record_name}:
                copy_member(old, info, new, copy.copy(info))
        for name, data in [*edits.items(), (record_name, record.encode())]:
            fresh = zipfile.ZipInfo(name, moment)
            fresh.external_attr = 0o100644 << 16
            fresh.create_system = 3
            new.writestr(fresh, data)


def copy_member(
    old: zipfile.ZipFile, info: zipfile.ZipInfo, new: zipfile.ZipFile, fresh: zipfile.ZipInfo
) -> None:
    """Copy one member without unpacking it (APPNOTE.TXT 4.3.7: local header, then data).

    fresh: the copy's header, a copy of `info` that may have another name, time or mode.
    """
    source, target = old.fp, new.fp
    assert source is not None
    assert target is not None
    source.seek(info.header_offset)
    name_size, extra_size = struct.unpack("<HH", source.read(30)[26:30])
    source.seek(info.header_offset + 30 + name_size + extra_size)
    fresh.header_offset = target.tell()
    fresh.flag_bits &= ~0x08  # sizes are in the header, not in a descriptor after the data
    target.write(fresh.FileHeader())
    _copy_bytes(source, target, info.compress_size)
    new.filelist.append(fresh)
    new.NameToInfo[fresh.filename] = fresh
    new.start_dir = target.tell()


def _copy_bytes(source: IO[bytes], target: IO[bytes], count: int) -> None:
    shutil.copyfileobj(_Window(source, count), target, 1 << 20)


class _Window:
    """The next `count` bytes of a file, as a readable."""

    def __init__(self, source: IO[bytes], count: int) -> None:
        self._source, self._left = source, count

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(data)
        return data
