"""Tables inside an ELF file: strings, GNU hash, relocations, symbol versions.

All of them are attacker-controlled; each loop is bounded by the bytes it walks over.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from sm121.abi.source import Malformed

_MAX_VERSIONS = 1 << 15  # an index is 15 bits wide


class Strings:
    """A string table. `at` decodes the NUL-terminated string at an offset.

    Overlapping strings are legal, so a small file could make a large sum of names: the sum
    is limited to a few times the table (linkers merge tails, which saves a few per cent).
    """

    __slots__ = ("_budget", "_data", "_seen")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._seen: dict[int, str] = {}
        self._budget = 4 * len(data) + 65536

    def at(self, offset: int) -> str:
        known = self._seen.get(offset)
        if known is not None:
            return known
        end = self._data.find(b"\0", offset) if offset < len(self._data) else -1
        if end < 0:
            raise Malformed(f"a name at offset {offset} is outside the string table")
        self._budget -= end - offset
        if self._budget < 0:
            raise Malformed("the names overlap each other many times over")
        text = self._data[offset:end].decode("utf-8", "backslashreplace")
        self._seen[offset] = text
        return text


def gnu_hash_count(read_u32s: Callable[[int, int], tuple[int, ...]], address: int) -> int:
    """Number of symbols that a DT_GNU_HASH table covers, counted from index 0.

    Header: nbuckets, symoffset, bloom_size, bloom_shift; then the bloom filter (64-bit
    words), the buckets, and one chain word per symbol whose lowest bit ends a chain.
    """
    nbuckets, symoffset, bloom, _ = read_u32s(address, 4)
    buckets_at = address + 16 + 8 * bloom
    last = max(read_u32s(buckets_at, nbuckets), default=0) if nbuckets else 0
    if last < symoffset:
        return symoffset
    chain_at = buckets_at + 4 * nbuckets
    step = 16
    while True:
        try:
            words = read_u32s(chain_at + 4 * (last - symoffset), step)
        except Malformed:
            if step == 1:
                raise
            step = 1
            continue
        for word in words:
            last += 1
            if word & 1:
                return last


def relocated(rela: bytes) -> set[int]:
    """Symbol indexes that Elf64_Rela entries (24 bytes) refer to; 0 is 'none'.

    r_info is the second u64, the symbol its upper half: every sixth u32 from the third on.
    """
    used = set(memoryview(rela).cast("I")[3::6].tolist())
    used.discard(0)
    return used


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """by_index: version index → (library it is asked of or '', name). needed: strong only."""

    by_index: dict[int, tuple[str, str]]
    needed: tuple[tuple[str, tuple[str, ...]], ...]
    defined: tuple[str, ...]


def read_versions(
    verneed: bytes, needs: int, verdef: bytes, defs: int, strings: Strings, *, versioned: bool
) -> Versions:
    """Elf64_Verneed/Vernaux and Elf64_Verdef/Verdaux chains. Raises Malformed if one loops."""
    by_index: dict[int, tuple[str, str]] = {}
    needed: list[tuple[str, tuple[str, ...]]] = []
    defined: list[str] = []
    total = 0
    at = 0
    for _ in range(needs):
        _, count, file, aux, following = _unpack("<HHIII", verneed, at)
        library, names = strings.at(file), []
        aux_at = at + aux
        for _ in range(count):
            total += 1
            if total > _MAX_VERSIONS:
                raise Malformed("more symbol versions than an index can name")
            _, flags, other, name_at, next_aux = _unpack("<IHHII", verneed, aux_at)
            text = strings.at(name_at)
            by_index[other & 0x7FFF] = (library, text)
            if not flags & 2:  # VER_FLG_WEAK: absence is only a warning
                names.append(text)
            if next_aux == 0:
                break
            aux_at += next_aux
        needed.append((library, tuple(names)))
        if following == 0:
            break
        at += following
    at = 0
    for _ in range(defs):
        total += 1
        if total > _MAX_VERSIONS:
            raise Malformed("more symbol versions than an index can name")
        _, flags, index, _, _, aux, following = _unpack("<HHHHIII", verdef, at)
        name = strings.at(_unpack("<II", verdef, at + aux)[0])
        if not flags & 1:  # VER_FLG_BASE names the file itself
            defined.append(name)
            by_index[index & 0x7FFF] = ("", name)
        if following == 0:
            break
        at += following
    return Versions(
        by_index=by_index if versioned else {}, needed=tuple(needed), defined=tuple(defined)
    )


def _unpack(layout: str, data: bytes, at: int) -> tuple[int, ...]:
    try:
        return struct.unpack_from(layout, data, at)
    except struct.error as error:
        raise Malformed("a symbol version table is cut off") from error
