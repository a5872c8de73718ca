"""Wheels as zip archives, read as if an enemy had made them.

The central directory is read by the standard library; member data is inflated by isal
(1.8 times as fast as zlib on torch's and cuBLAS's wheels, docs/verify-abi.md). Refused:
names that leave the archive, names given twice, encryption, methods other than stored and
deflate (PEP 427 allows nothing else that installers agree on), sizes that lie.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from isal import isal_zlib

from sm121.abi.source import FileSource, Malformed, Source, check_range

_CHUNK = 1 << 20
_HEADER = struct.Struct("<4sHHHHHIIIHH")  # local file header, APPNOTE.TXT 4.3.7
_SNIFF = 512  # compressed bytes that surely give the first four of the content
# The largest library known is cuBLASLt with 0.63 GB; a wheel of all of CUDA would be 8 GB.
MAX_MEMBER = 4 << 30
MAX_DIRECTORY = 64 << 20
MAX_TEXT = 32 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One file of a wheel. Sizes in bytes; method: 0 stored, 8 deflate."""

    name: str
    size: int
    compressed: int
    crc: int
    method: int
    header_at: int


class Archive:
    """An open wheel."""

    def __init__(self, path: Path) -> None:
        """Raises Malformed for a file that is no sound zip archive, OSError if unreadable."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self._size = os.fstat(self._fd).st_size
            self.members = tuple(self._read_directory())
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def _read_directory(self) -> Iterator[Member]:
        self._check_directory_size()
        try:
            with os.fdopen(os.dup(self._fd), "rb") as file, zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        except OSError:
            raise
        except Exception as error:  # zipfile lets struct, Unicode and value errors through
            raise Malformed(f"not a sound zip archive: {error}") from error
        seen: set[str] = set()
        for info in infos:
            if info.filename.endswith("/"):  # ZipInfo.is_dir fails on an empty name
                _check_name(info.filename.rstrip("/") or "/")
                continue
            _check_name(info.filename)
            if info.filename in seen:
                raise Malformed(f"two members are named {info.filename!r}")
            seen.add(info.filename)
            if info.flag_bits & 0x1:
                raise Malformed(f"{info.filename} is encrypted")
            if info.compress_type not in (0, 8):
                raise Malformed(f"{info.filename} has compression method {info.compress_type}")
            if info.file_size > MAX_MEMBER:
                raise Malformed(f"{info.filename} claims {info.file_size} bytes")
            # Deflate cannot do better than 1032:1 (zlib, "Maximum Compression Factor").
            if info.file_size > 1032 * info.compress_size + 64:
                raise Malformed(f"{info.filename} claims more bytes than its data can hold")
            check_range(self._size, info.header_offset, 30 + info.compress_size, info.filename)
            yield Member(
                name=info.filename, size=info.file_size, compressed=info.compress_size,
                crc=info.CRC, method=info.compress_type, header_at=info.header_offset,
            )  # fmt: skip

    def _check_directory_size(self) -> None:
        """zipfile reads the whole directory into memory: look at its size before that."""
        start = max(0, self._size - 65557)
        tail = os.pread(self._fd, self._size - start, start)
        at = tail.rfind(b"PK\5\6")
        if at < 0 or at + 22 > len(tail):
            raise Malformed("not a zip archive, or its end is cut off")
        (size,) = struct.unpack_from("<I", tail, at + 12)
        if (large := tail.rfind(b"PK\6\6")) >= 0 and large + 56 <= len(tail):
            (size64,) = struct.unpack_from("<Q", tail, large + 40)
            size = size64 if size == 0xFFFFFFFF else max(size, size64)
        if size > MAX_DIRECTORY:
            raise Malformed(f"the archive's directory claims {size} bytes")

    def _data_at(self, member: Member) -> int:
        """Offset of a member's data. Raises Malformed if its local header disagrees."""
        header = os.pread(self._fd, 30, member.header_at)
        if len(header) < 30 or header[:4] != b"PK\3\4":
            raise Malformed(f"{member.name} has no local header")
        fields = _HEADER.unpack(header)
        name = os.pread(self._fd, fields[9], member.header_at + 30)
        encoding = "utf-8" if fields[2] & 0x800 else "cp437"
        if name.decode(encoding, "replace") != member.name:
            raise Malformed(f"{member.name} has another name in its local header")
        at = member.header_at + 30 + fields[9] + fields[10]
        check_range(self._size, at, member.compressed, member.name)
        return int(at)

    def head(self, member: Member) -> bytes:
        """The first four bytes of a member's content (fewer if it is shorter)."""
        at = self._data_at(member)
        raw = os.pread(self._fd, min(member.compressed, _SNIFF), at)
        if member.method == 0:
            return raw[:4]
        try:
            return zlib.decompressobj(-15).decompress(raw, 4)
        except zlib.error as error:
            raise Malformed(f"{member.name} is damaged: {error}") from error

    def chunks(self, member: Member) -> Iterator[bytes]:
        """A member's content, checked against its size and CRC-32. Raises Malformed."""
        at, left, size, crc = self._data_at(member), member.compressed, 0, 0
        engine = isal_zlib.decompressobj(-15) if member.method == 8 else None
        while left:
            raw = os.pread(self._fd, min(left, _CHUNK), at)
            if not raw:
                raise Malformed(f"{member.name} is cut off")
            at, left = at + len(raw), left - len(raw)
            for data in _inflate(engine, raw, member.name) if engine else (raw,):
                size += len(data)
                if size > member.size:
                    raise Malformed(f"{member.name} is larger than it says")
                crc = isal_zlib.crc32(data, crc)
                yield data
        if size != member.size or crc != member.crc:
            raise Malformed(f"{member.name} is damaged: its size or CRC-32 is not the recorded one")

    def text(self, member: Member) -> str:
        """A small member as text. Raises Malformed above 32 MiB."""
        if member.size > MAX_TEXT:
            raise Malformed(f"{member.name} is too large for what it is: {member.size} bytes")
        return b"".join(self.chunks(member)).decode("utf-8", "replace")

    @contextmanager
    def open(self, member: Member, spool: Path) -> Iterator[Source]:
        """Random access to a member.

        It is inflated into an unnamed file in `spool`: libraries of 600 MB would not fit
        into the memory limit, and only a few per cent of them are looked at.
        """
        with tempfile.TemporaryFile(dir=spool, buffering=0) as file:
            for data in self.chunks(member):
                file.write(data)
            yield FileSource(file.fileno())


def _inflate(engine: object, raw: bytes, name: str) -> Iterator[bytes]:
    """At most 4 MiB at a time: a small input may inflate a thousandfold."""
    try:
        while True:
            data = engine.decompress(raw, 4 * _CHUNK)  # type: ignore[attr-defined]
            if data:
                yield data
            raw = engine.unconsumed_tail  # type: ignore[attr-defined]
            if engine.eof or (not raw and len(data) < 4 * _CHUNK):  # type: ignore[attr-defined]
                return
    except isal_zlib.error as error:  # type: ignore[misc]  # its stub says object
        raise Malformed(f"{name} is damaged: {error}") from error


def _check_name(name: str) -> None:
    """Refuse names that an installer could write outside site-packages."""
    path = PurePosixPath(name)
    if (
        not name
        or path.is_absolute()
        or ".." in path.parts
        or "\\" in name
        or any(ord(c) < 32 for c in name)
        or (len(name) > 1 and name[1] == ":")
    ):
        raise Malformed(f"a member would land outside: {name[:200]!r}")
