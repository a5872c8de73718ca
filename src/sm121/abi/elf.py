"""What the dynamic loader sees of an ELF file, and nothing else.

Sources: System V gABI chapters 4 and 5 (file header, program headers, dynamic section), the
GNU hash table as glibc's dl-lookup.c walks it, symbol versioning as in the LSB 5.0 Core
document ("Symbol Versioning"). Section headers are used only to find `.nv_fatbin` and the
build id; the loader ignores them, so the rest here does too.

Own code and not pyelftools or LIEF: see docs/verify-abi.md for the measurement.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from sm121.abi.elf_tables import Strings, Versions, gnu_hash_count, read_versions, relocated
from sm121.abi.source import Malformed, Source

MAGIC = b"\x7fELF"
# e_machine values (gABI registry) that occur in wheels for our targets, and device code.
MACHINES = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm", 243: "riscv", 21: "ppc64",
            22: "s390x", 258: "loongarch", 190: "cuda", 224: "amdgpu", 247: "bpf"}  # fmt: skip
ET_REL, ET_EXEC, ET_DYN, ET_CORE = 1, 2, 3, 4
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP, _PT_NOTE = 1, 2, 3, 4
_DT_NEEDED, _DT_PLTRELSZ, _DT_HASH, _DT_STRTAB, _DT_SYMTAB = 1, 2, 4, 5, 6
_DT_RELA, _DT_RELASZ, _DT_STRSZ, _DT_SONAME, _DT_RPATH = 7, 8, 10, 14, 15
_DT_PLTREL, _DT_JMPREL, _DT_RUNPATH, _DT_GNU_HASH = 20, 23, 29, 0x6FFFFEF5
_DT_VERSYM, _DT_VERDEF, _DT_VERDEFNUM = 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
_DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF
_STB_LOCAL, _STB_WEAK = 0, 2
_STT_TLS, _STT_GNU_IFUNC = 6, 10
_SHN_UNDEF, _SHN_ABS = 0, 0xFFF1
_SYM = struct.Struct("<IBBHQQ")
_MAX_DYNAMIC = 1 << 16  # entries; libtorch_cuda has 60
_MAX_NOTES = 1 << 20  # bytes of one note segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """An undefined symbol that some relocation refers to.

    version, library: as in the verneed entry; empty when unversioned.
    """

    name: str
    version: str
    library: str
    weak: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Exports:
    """What a lookup can find (glibc check_match, dl-lookup.c).

    versioned: the file has DT_VERSYM. plain: names that an unversioned reference binds to.
    base: names with no version of their own, which satisfy any version. exact: 'name@VERSION'.
    """

    versioned: bool = False
    plain: frozenset[str] = frozenset()
    base: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Elf:
    """One ELF file. kind: 'rel', 'exec', 'dyn' or 'core'. rpath, runpath: None when absent.

    needs_versions: library -> strong version names it must define; defines_versions: verdef
    names. fatbin: (offset, size) of `.nv_fatbin`. relocatable_fatbin: same of `__nv_relfatbin`.
    dynamic: has PT_DYNAMIC, so that the loader can load it.
    """

    machine: str
    bits: int
    kind: str
    size: int
    dynamic: bool = False
    interpreter: str = ""
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: str | None = None
    runpath: str | None = None
    imports: tuple[Import, ...] = ()
    exports: Exports = field(default_factory=Exports)
    needs_versions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    defines_versions: tuple[str, ...] = ()
    build_id: str = ""
    fatbin: tuple[int, int] | None = None


def read_elf(source: Source) -> Elf:
    """Parse. Raises Malformed for anything that the loader would refuse or that is cut off."""
    ident = source.read(0, 16)
    if ident[:4] != MAGIC:
        raise Malformed("no ELF magic")
    bits, order = {1: 32, 2: 64}.get(ident[4], 0), {1: "<", 2: ">"}.get(ident[5], "")
    if not bits or not order:
        raise Malformed("ELF header with an unknown class or byte order")
    kind, machine = struct.unpack(order + "HH", source.read(16, 4))
    name = MACHINES.get(machine, f"machine {machine}")
    kind_name = {1: "rel", 2: "exec", 3: "dyn", 4: "core"}.get(kind, f"type {kind}")
    if bits != 64 or order != "<" or name in ("cuda", "amdgpu", "bpf"):
        # No target of ours; enough is known to say so.
        return Elf(machine=name, bits=bits, kind=kind_name, size=source.size)
    return _Reader(source, name, kind_name).read()


class _Reader:
    """State while one 64-bit little-endian file is read."""

    def __init__(self, source: Source, machine: str, kind: str) -> None:
        self.source, self.machine, self.kind = source, machine, kind
        header = struct.unpack("<QQQIHHHHHH", source.read(24, 40))
        _, self.phoff, self.shoff, _, _, self.phentsize, self.phnum = header[:7]
        self.shentsize, self.shnum, self.shstrndx = header[7:]
        self.loads: list[tuple[int, int, int]] = []  # vaddr, offset, size in file
        self.build_id = ""
        self.interpreter = ""

    def read(self) -> Elf:
        dynamic = self._program_headers()
        fatbin = self._fatbin_section()
        if dynamic is None:
            return Elf(
                machine=self.machine, bits=64, kind=self.kind, size=self.source.size,
                interpreter=self.interpreter, build_id=self.build_id, fatbin=fatbin,
            )  # fmt: skip
        tags, needed = self._dynamic(*dynamic)
        strings = Strings(self._at(tags.get(_DT_STRTAB, 0), tags.get(_DT_STRSZ, 0)))
        versions = self._versions(tags, strings)
        symbols, used = self._symbols(tags)
        imports, exports = _split(symbols, used, strings, versions)

        def text(tag: int) -> str | None:
            return strings.at(tags[tag]) if tag in tags else None

        return Elf(
            machine=self.machine, bits=64, kind=self.kind, size=self.source.size, dynamic=True,
            interpreter=self.interpreter, soname=text(_DT_SONAME) or "",
            needed=tuple(strings.at(offset) for offset in needed),
            rpath=text(_DT_RPATH), runpath=text(_DT_RUNPATH), imports=imports, exports=exports,
            needs_versions=versions.needed, defines_versions=versions.defined,
            build_id=self.build_id, fatbin=fatbin,
        )  # fmt: skip

    def _at(self, address: int, length: int) -> bytes:
        """Bytes at a virtual address, through PT_LOAD, as the loader maps them."""
        return self.source.read(self._offset(address, length), length)

    def _offset(self, address: int, length: int) -> int:
        for vaddr, offset, size in self.loads:
            if vaddr <= address and address + length <= vaddr + size:
                return offset + address - vaddr
        raise Malformed(f"address {address:#x}+{length:#x} is in no loaded segment")

    def _program_headers(self) -> tuple[int, int] | None:
        if self.phnum == 0:
            return None
        if self.phentsize != 56:
            raise Malformed(f"program headers of {self.phentsize} bytes")
        table = self.source.read(self.phoff, 56 * self.phnum)
        dynamic = None
        for kind, _, offset, vaddr, _, filesz, _, _ in struct.iter_unpack("<IIQQQQQQ", table):
            if kind == _PT_LOAD:
                if offset + filesz > self.source.size:
                    raise Malformed(
                        f"a segment ends at byte {offset + filesz} of a file of "
                        f"{self.source.size} bytes: the file is cut off"
                    )
                self.loads.append((vaddr, offset, filesz))
            elif kind == _PT_DYNAMIC:
                dynamic = (offset, filesz)
            elif kind == _PT_INTERP:
                raw = self.source.read(offset, min(filesz, 4096))
                self.interpreter = raw.split(b"\0")[0].decode("utf-8", "replace")
            elif kind == _PT_NOTE and filesz <= _MAX_NOTES:
                self.build_id = self.build_id or build_id(self.source.read(offset, filesz))
        return dynamic

    def _dynamic(self, offset: int, size: int) -> tuple[dict[int, int], list[int]]:
        table = self.source.read(offset, min(size - size % 16, 16 * _MAX_DYNAMIC))
        tags: dict[int, int] = {}
        needed: list[int] = []
        for tag, value in struct.iter_unpack("<QQ", table):
            if tag == 0:
                break
            if tag == _DT_NEEDED:
                needed.append(value)
            else:
                tags[tag] = value
        return tags, needed

    def _versions(self, tags: dict[int, int], strings: Strings) -> Versions:
        def tail(tag: int) -> bytes:
            """From a table's address to the end of its segment: its length is not recorded."""
            address = tags[tag]
            for vaddr, offset, size in self.loads:
                if vaddr <= address < vaddr + size:
                    start = address - vaddr
                    return self.source.read(offset + start, min(size - start, 1 << 20))
            raise Malformed("a version table is in no loaded segment")

        return read_versions(
            tail(_DT_VERNEED) if _DT_VERNEED in tags else b"", tags.get(_DT_VERNEEDNUM, 0),
            tail(_DT_VERDEF) if _DT_VERDEF in tags else b"", tags.get(_DT_VERDEFNUM, 0), strings,
            versioned=_DT_VERSYM in tags,
        )  # fmt: skip

    def _symbols(self, tags: dict[int, int]) -> tuple[_SymbolTable, frozenset[int]]:
        used: set[int] = set()
        for table, size in ((_DT_RELA, _DT_RELASZ), (_DT_JMPREL, _DT_PLTRELSZ)):
            if table in tags and tags.get(size):
                used |= relocated(self._at(tags[table], tags[size] - tags[size] % 24))
        hashed = 0
        if _DT_GNU_HASH in tags:
            hashed = gnu_hash_count(self._u32s, tags[_DT_GNU_HASH])
        elif _DT_HASH in tags:
            # System V hash: nbucket, nchain; nchain equals the number of symbols.
            hashed = self._u32s(tags[_DT_HASH], 2)[1]
        # Undefined symbols need not be hashed; those that count have a relocation.
        count = max(hashed, max(used, default=0) + 1)
        if _DT_SYMTAB not in tags:
            return _SymbolTable(b"", b"", 0), frozenset()
        raw = self._at(tags[_DT_SYMTAB], 24 * count)
        versym = self._at(tags[_DT_VERSYM], 2 * count) if _DT_VERSYM in tags else b""
        return _SymbolTable(raw, versym, hashed), frozenset(used)

    def _u32s(self, address: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self._at(address, 4 * count))

    def _fatbin_section(self) -> tuple[int, int] | None:
        if self.shnum == 0 or self.shoff == 0:
            return None
        if self.shentsize != 64:
            raise Malformed(f"section headers of {self.shentsize} bytes")
        table = self.source.read(self.shoff, 64 * self.shnum)
        sections = list(struct.iter_unpack("<IIQQQQIIQQ", table))
        if self.shstrndx >= len(sections):
            return None
        names = sections[self.shstrndx]
        strings = self.source.read(names[4], min(names[5], 1 << 20))
        for section in sections:
            if strings[section[0] : section[0] + 11] == b".nv_fatbin\0":
                if section[1] == 8:  # SHT_NOBITS: a separate debug file
                    return None
                self.source.read(section[4] + section[5], 0)
                return section[4], section[5]
        return None


def build_id(notes: bytes) -> str:
    """NT_GNU_BUILD_ID of a note segment, hex; empty if there is none."""
    at = 0
    while at + 12 <= len(notes):
        namesz, descsz, kind = struct.unpack_from("<III", notes, at)
        name_at = at + 12
        desc_at = name_at + (namesz + 3 & ~3)
        if kind == 3 and notes[name_at : name_at + 4] == b"GNU\0" and descsz <= 64:
            return notes[desc_at : desc_at + descsz].hex()
        at = desc_at + (descsz + 3 & ~3)
    return ""


@dataclass(frozen=True, slots=True)
class _SymbolTable:
    raw: bytes
    versym: bytes
    hashed: int


def _split(
    table: _SymbolTable, used: frozenset[int], strings: Strings, versions: Versions
) -> tuple[tuple[Import, ...], Exports]:
    """Sort a symbol table into what is asked for and what is offered."""
    imports: list[Import] = []
    plain: set[str] = set()
    base: set[str] = set()
    exact: set[str] = set()
    defaults: dict[str, int] = {}
    versym = memoryview(table.versym).cast("H") if table.versym else None
    at = strings.at
    for index, (name, info, _, section, value, _) in enumerate(_SYM.iter_unpack(table.raw)):
        if info >> 4 == _STB_LOCAL or index == 0:
            continue
        ndx = versym[index] if versym is not None else 1
        if section == _SHN_UNDEF:
            if index in used:
                library, version = versions.by_index.get(ndx & 0x7FFF, ("", ""))
                imports.append(
                    Import(
                        name=at(name), version=version, library=library,
                        weak=info >> 4 == _STB_WEAK,
                    )
                )  # fmt: skip
            continue
        if index >= table.hashed:
            continue
        kind = info & 15
        if (kind > _STT_TLS and kind != _STT_GNU_IFUNC) or kind in (3, 4):
            continue
        if value == 0 and section != _SHN_ABS and kind != _STT_TLS:
            continue
        text, number, hidden = at(name), ndx & 0x7FFF, bool(ndx & 0x8000)
        own = versions.by_index.get(number, ("", ""))[1]
        if own:
            exact.add(f"{text}@{own}")
        elif not hidden:
            base.add(text)
        if number < 3:
            plain.add(text)
        elif not hidden:
            defaults[text] = defaults.get(text, 0) + 1
    plain.update(name for name, count in defaults.items() if count == 1)
    return tuple(imports), Exports(
        versioned=versym is not None, plain=frozenset(plain), base=frozenset(base),
        exact=frozenset(exact),
    )  # fmt: skip
