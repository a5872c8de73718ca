"""What a cubin says about its kernels: registers, shared memory, stack, target.

A cubin is a 64-bit ELF file for machine 190. The attributes are not published; these were
measured on what ptxas 13.0 makes, against its own `-v` (tests/unit/jit/test_cubin.py has such
files): `.nv.info` holds entries u8 format, u8 attribute, u16 size, of format 4 with u32
payloads [symbol index, value]: 0x2f registers, 0x11 bytes of stack frame; `.nv.info.<kernel>` has the block's
threads as three u32 (0x10 required, 0x05 at most). `.nv.shared.<kernel>` has the size of static
shared memory and no content; from sm_90 on that counts the 1,024 bytes of a block that the
system keeps, which are no part of what a block may have. The SM is
in bits 8 to 15 of e_flags (cubins of ABI 8 on), else in the low byte; it does not tell sm_121
from sm_121a: PTX and command lines do.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from sm121.abi.source import BytesSource, Malformed

_MACHINE = 190
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_REGISTERS, _FRAME, _REQUIRED, _AT_MOST = 0x2F, 0x11, 0x10, 0x05
_SYSTEM = 1024
_SHT_SYMTAB, _STT_FUNC, _SIZED = 2, 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """One kernel. threads: of a block, 0 if the cubin does not say; shared: static bytes per
    block; stack: bytes of local memory per thread."""

    name: str
    registers: int
    threads: int
    shared: int
    stack: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cubin:
    """sm: e.g. 121 (or 120 for sm_120f)."""

    sm: int
    kernels: tuple[Code, ...]


def read_cubin(data: bytes) -> Cubin:
    """Parse. Raises Malformed if it is no cubin or cut off."""
    source = BytesSource(data)
    if source.read(0, 5) != b"\x7fELF\x02" or source.read(18, 2) != _MACHINE.to_bytes(2, "little"):
        raise Malformed("no cubin (64-bit ELF for machine 190)")
    abi = source.read(8, 1)[0]
    (shoff,) = struct.unpack("<Q", source.read(40, 8))
    flags, _, _, _, shentsize, shnum, names_at = struct.unpack("<IHHHHHH", source.read(48, 16))
    sections = [
        _SECTION.unpack(source.read(shoff + i * shentsize, _SECTION.size)) for i in range(shnum)
    ]

    def text(table: int, offset: int) -> str:
        start, size = sections[table][4], sections[table][5]
        data = source.read(start + offset, size - offset)
        return data[: data.index(b"\0")].decode(errors="replace")

    symbols: list[tuple[str, int]] = []
    shared: dict[str, int] = {}
    threads: dict[str, int] = {}
    info = b""
    for section in sections:
        name = text(names_at, section[0])
        if section[1] == _SHT_SYMTAB:
            table = source.read(section[4], section[5])
            for entry in _SYMBOL.iter_unpack(table):
                symbols.append((text(section[6], entry[0]), entry[1] & 15))
        elif name == ".nv.info":
            info = source.read(section[4], section[5])
        elif name.startswith(".nv.info."):
            own = source.read(section[4], section[5])
            threads[name.removeprefix(".nv.info.")] = _threads(own)
        elif name.startswith(".nv.shared."):
            shared[name.removeprefix(".nv.shared.")] = section[5]
    values = _attributes(info, symbols)
    sm = (flags >> 8) & 0xFF if abi >= 8 else flags & 0xFF
    kept = _SYSTEM if sm >= 90 else 0
    kernels = tuple(
        Code(
            name=name,
            registers=facts[_REGISTERS],
            threads=threads.get(name, 0),
            shared=max(shared.get(name, 0) - kept, 0),
            stack=facts.get(_FRAME, 0),
        )
        for name, facts in sorted(values.items())
        if _REGISTERS in facts
    )
    return Cubin(sm=sm, kernels=kernels)


def _entries(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of the entries that have one."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:  # else the value is in the size field
            yield attribute, info[at : at + size]
            at += size


def _attributes(info: bytes, symbols: list[tuple[str, int]]) -> dict[str, dict[int, int]]:
    """Value by attribute by function."""
    found: dict[str, dict[int, int]] = {}
    for attribute, payload in _entries(info):
        if len(payload) == 8:
            index, value = struct.unpack("<II", payload)
            if index < len(symbols) and symbols[index][1] == _STT_FUNC:
                found.setdefault(symbols[index][0], {})[attribute] = value
    return found


def _threads(info: bytes) -> int:
    sizes = {a: struct.unpack("<III", p) for a, p in _entries(info) if len(p) == 12}
    x, y, z = sizes.get(_REQUIRED) or sizes.get(_AT_MOST) or (0, 0, 0)
    return int(x * y * z)
