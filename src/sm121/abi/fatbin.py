"""GPU code inside an ELF file: the fatbin containers of `.nv_fatbin`.

The format is not published; offsets are from fatbinary_section.h of the CUDA toolkit (the
container header) and measured on files that nvcc and ptxas 13.0 make, plain and compressed
(tests/integration/abi/test_fatbin_calibration.py makes them anew):

container  u32 magic 0xBA55ED50, u16 version, u16 header size (16), u64 size of the entries
entry      u16 kind (1 PTX, 2 cubin) @0, u32 header size @4, u64 payload size @8,
           u32 arch @28 (121 for sm_121), u64 flags @40 (0x100000 = 'a', 0x200000 = 'f';
           0x2000 LZ4, 0x8000 zstd compressed)

Entry headers are never compressed, so nothing is unpacked. cuobjdump prints sm_120f as
sm_120 and a cubin's own e_flags do not tell plain, `a` and `f` apart; the entry's flags do.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sm121.abi.source import Malformed, Source

MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_FLAG_A, _FLAG_F, _FLAG_LZ4, _FLAG_ZSTD = 0x100000, 0x200000, 0x2000, 0x8000
_KINDS: dict[int, Literal["ptx", "sass"]] = {1: "ptx", 2: "sass"}
# One sequential read instead of one per header: entries of small kernels lie close together.
_WINDOW = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Code:
    """One piece of GPU code. arch: e.g. 121; suffix: '', 'a' or 'f'."""

    kind: Literal["ptx", "sass"]
    arch: int
    suffix: str

    def __str__(self) -> str:
        return f"{'sm' if self.kind == 'sass' else 'compute'}_{self.arch}{self.suffix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """All versions of one translation unit's GPU code. compressed: any entry is.

    bytes: size of the entries as stored.
    """

    codes: tuple[Code, ...]
    bytes: int
    compressed: bool


class _Window:
    """Reads through a cache of the last range."""

    def __init__(self, source: Source) -> None:
        self._source, self._at, self._data = source, 0, b""

    def read(self, offset: int, length: int) -> bytes:
        start = offset - self._at
        if start < 0 or start + length > len(self._data):
            size = min(_WINDOW, self._source.size - offset)
            self._at, self._data = offset, self._source.read(offset, max(size, length))
            start = 0
        return self._data[start : start + length]


def read_containers(source: Source, offset: int, size: int) -> Iterator[Container]:
    """The containers of a section at `offset` of `size` bytes.

    Zero padding between containers is skipped. Raises Malformed for anything else.
    """
    window = _Window(source)
    end = offset + size
    at = offset
    while at + _CONTAINER.size <= end:
        magic, _, header, length = _CONTAINER.unpack(window.read(at, _CONTAINER.size))
        if magic != MAGIC:
            if magic == 0:  # linkers align containers with zeros
                at = _skip_zeros(window, at, end)
                continue
            raise Malformed(f"no fatbin container at offset {at:#x} (found {magic:#x})")
        if header < _CONTAINER.size or at + header + length > end:
            raise Malformed(f"the fatbin container at offset {at:#x} is larger than its section")
        yield _container(window, at + header, length)
        at += header + length


def _skip_zeros(window: _Window, at: int, end: int) -> int:
    while at < end:
        block = window.read(at, min(4096, end - at))
        stripped = block.lstrip(b"\0")
        if stripped:
            at += len(block) - len(stripped)
            return at - at % 4
        at += len(block)
    return end


def _container(window: _Window, at: int, length: int) -> Container:
    end = at + length
    codes: set[Code] = set()
    compressed = False
    while at + 16 <= end:
        kind, _, header, payload = struct.unpack("<HHIQ", window.read(at, 16))
        if header < 48 or at + header + payload > end:
            raise Malformed(f"a fatbin entry at offset {at:#x} is larger than its container")
        fields = window.read(at, 48)
        (arch,) = struct.unpack_from("<I", fields, 28)
        (flags,) = struct.unpack_from("<Q", fields, 40)
        if name := _KINDS.get(kind):
            suffix = "a" if flags & _FLAG_A else "f" if flags & _FLAG_F else ""
            codes.add(Code(kind=name, arch=arch, suffix=suffix))
        compressed = compressed or bool(flags & (_FLAG_LZ4 | _FLAG_ZSTD))
        at += header + payload
    return Container(codes=tuple(sorted(codes)), bytes=length, compressed=compressed)
