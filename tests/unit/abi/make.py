"""Small real files for the tests, made here: ELF libraries, fatbins, wheels. No compiler."""

from __future__ import annotations

import base64
import hashlib
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.abi.context import Context, Expected
from sm121.abi.facts import Binary, Wheel
from sm121.abi.gpu import Arch
from sm121.abi.policy.load import load_policy
from sm121.abi.policy.model import Policy
from sm121.abi.scan import filename_parts, scan_elf
from sm121.abi.source import BytesSource
from sm121.lock.pylock import Target

MACHINE = {"aarch64": 183, "x86_64": 62}
TARGET = Target.make("linux-aarch64", python="3.12", glibc="2.39")


@dataclass(frozen=True, kw_only=True)
class Sym:
    """A symbol. defined: exported. version: 'NAME' (default) or '@NAME' (hidden);
    library: for an import with a version. relocated: some relocation refers to it."""

    name: str
    defined: bool = False
    version: str = ""
    library: str = ""
    weak: bool = False
    relocated: bool = True


class _Strings:
    def __init__(self) -> None:
        self.data = bytearray(b"\0")
        self._at: dict[str, int] = {}

    def add(self, text: str) -> int:
        if text not in self._at:
            self._at[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self._at[text]


def elf(
    symbols: Sequence[Sym] = (),
    *,
    machine: str = "aarch64",
    soname: str = "",
    needed: Sequence[str] = (),
    rpath: str | None = None,
    runpath: str | None = None,
    needs: Mapping[str, Sequence[str]] | None = None,
    fatbin: bytes = b"",
    build_id: bytes = b"",
    gnu_hash: bool = True,
) -> bytes:
    """A shared library that read_elf takes for real: one PT_LOAD at address 0.

    needs: library → versions asked of it (besides those that imports name). Defined symbols
    come last, as DT_GNU_HASH wants it.
    """
    strings = _Strings()
    imports = [s for s in symbols if not s.defined]
    exports = [s for s in symbols if s.defined]
    ordered = [*imports, *exports]
    wanted: dict[str, list[str]] = {k: list(v) for k, v in (needs or {}).items()}
    for one in imports:
        if one.version and one.version not in wanted.setdefault(one.library, []):
            wanted[one.library].append(one.version)
    defined = list(dict.fromkeys(s.version.lstrip("@") for s in exports if s.version))
    index = {("", name): 2 + n for n, name in enumerate(defined)}
    for library, versions in wanted.items():
        for version in versions:
            index[library, version] = 2 + len(index)
    versioned = bool(index)

    symtab = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    versym = struct.pack("<H", 0)
    for one in ordered:
        info = (2 if one.weak else 1) << 4 | 2
        section, value = (5, 0x1000) if one.defined else (0, 0)
        symtab += struct.pack("<IBBHQQ", strings.add(one.name), info, 0, section, value, 8)
        number = index.get(("" if one.defined else one.library, one.version.lstrip("@")), 1)
        versym += struct.pack("<H", number | (0x8000 if one.version.startswith("@") else 0))
    rela = b"".join(
        struct.pack("<QQq", 0x2000, (n << 32) | 1025, 0)
        for n, one in enumerate(ordered, 1) if one.relocated and not one.defined
    )  # fmt: skip
    if gnu_hash:
        first = 1 + len(imports)
        count = len(exports)
        hashes = struct.pack("<IIIIQ", 1, first, 1, 6, 2**64 - 1)
        hashes += struct.pack("<I", first if count else 0)
        hashes += b"".join(struct.pack("<I", n == count - 1) for n in range(count))
    else:
        hashes = struct.pack("<II", 1, len(ordered) + 1) + struct.pack("<I", 0) * (len(ordered) + 2)

    verneed = b""
    for place, (library, versions) in enumerate(wanted.items()):
        aux = b"".join(
            struct.pack("<IHHII", 0, 0, index[library, v], strings.add(v),
                        16 if n < len(versions) - 1 else 0)
            for n, v in enumerate(versions)
        )  # fmt: skip
        following = 16 + len(aux) if place < len(wanted) - 1 else 0
        verneed += (
            struct.pack("<HHIII", 1, len(versions), strings.add(library), 16, following) + aux
        )
    verdef = b""
    for place, name in enumerate(defined):
        following = 28 if place < len(defined) - 1 else 0
        verdef += struct.pack("<HHHHIII", 1, 0, index["", name], 1, 0, 20, following)
        verdef += struct.pack("<II", strings.add(name), 0)

    tags = [(1, strings.add(name)) for name in needed]
    for tag, text in ((14, soname or None), (15, rpath), (29, runpath)):
        if text is not None:
            tags.append((tag, strings.add(text)))
    note = struct.pack("<III", 4, len(build_id), 3) + b"GNU\0" + build_id if build_id else b""
    headers = 64 + 56 * 3
    blocks: dict[str, tuple[int, bytes]] = {}
    at = headers
    for name, data in (
        ("sym", symtab), ("str", bytes(strings.data)), ("hash", hashes), ("rela", rela),
        ("versym", versym), ("verneed", verneed), ("verdef", verdef), ("note", note),
        ("fatbin", fatbin),
    ):  # fmt: skip
        at += -at % 16
        blocks[name] = (at, data)
        at += len(data)
    tags += [(5, blocks["str"][0]), (10, len(strings.data)), (6, blocks["sym"][0]), (11, 24)]
    tags.append((0x6FFFFEF5 if gnu_hash else 4, blocks["hash"][0]))
    if rela:
        tags += [(7, blocks["rela"][0]), (8, len(rela)), (9, 24)]
    if versioned:
        tags.append((0x6FFFFFF0, blocks["versym"][0]))
    if verneed:
        tags += [(0x6FFFFFFE, blocks["verneed"][0]), (0x6FFFFFFF, len(wanted))]
    if verdef:
        tags += [(0x6FFFFFFC, blocks["verdef"][0]), (0x6FFFFFFD, len(defined))]
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in [*tags, (0, 0)])
    at += -at % 16
    dynamic_at = at
    at += len(dynamic)
    section_names = b"\0.nv_fatbin\0.shstrtab\0"
    names_at = at
    at += len(section_names)
    at += -at % 8
    section_table = struct.pack("<IIQQQQIIQQ", *[0] * 10)
    section_table += struct.pack(
        "<IIQQQQIIQQ", 1 if fatbin else 0, 1, 2, 0, blocks["fatbin"][0], len(fatbin), 0, 0, 8, 0
    )
    section_table += struct.pack(
        "<IIQQQQIIQQ", 12, 3, 0, 0, names_at, len(section_names), 0, 0, 1, 0
    )
    sections_at, total = at, at + len(section_table)

    out = bytearray(total)
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    out[:64] = ident + struct.pack(
        "<HHIQQQIHHHHHH", 3, MACHINE[machine], 1, 0, 64, sections_at, 0, 64, 56, 3, 64, 3, 2
    )
    for place, (kind, start, size) in enumerate(
        ((1, 0, total), (2, dynamic_at, len(dynamic)), (4, blocks["note"][0], len(note)))
    ):
        struct.pack_into(
            "<IIQQQQQQ", out, 64 + 56 * place, kind, 5, start, start, start, size, size, 8
        )
    for start, data in (*blocks.values(), (dynamic_at, dynamic), (names_at, section_names),
                        (sections_at, section_table)):  # fmt: skip
        out[start : start + len(data)] = data
    return bytes(out)


def fatbin(*containers: Sequence[str]) -> bytes:
    """Containers from names: fatbin(['sm_120f', 'compute_80'], ['sm_75'])."""
    out = b""
    for codes in containers:
        entries = b""
        for code in codes:
            kind, _, text = code.partition("_")
            suffix = text[-1] if text[-1] in "af" else ""
            flags = {"": 0, "a": 0x100000, "f": 0x200000}[suffix] | 0x11
            entry = struct.pack("<HHIQ", 1 if kind == "compute" else 2, 0x101, 64, 16)
            entry += struct.pack("<QI", 0, 0) + struct.pack("<I", int(text.rstrip("af")))
            entry += struct.pack("<QQQQ", 0, flags, 0, 0)
            entries += entry.ljust(64, b"\0")[:64] + b"\xab" * 16
        out += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    return out


def binary(path: str, data: bytes) -> Binary:
    return scan_elf(BytesSource(data), path)


def wheel(
    filename: str,
    files: Mapping[str, bytes] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    hashes: Mapping[str, str] | None = None,
) -> Wheel:
    """Facts of a wheel without making the archive."""
    name, version, tags = filename_parts(filename)
    content = dict(files or {})
    return Wheel(
        filename=filename, sha256=hashlib.sha256(filename.encode()).hexdigest(), distribution=name,
        version=version, tags=tags,
        files={path: (hashes or {}).get(path, b64(data)) for path, data in content.items()},
        texts=dict(texts or {}),
        binaries=tuple(binary(p, d) for p, d in content.items() if d[:4] == b"\x7fELF"),
    )  # fmt: skip


def b64(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def write_wheel(
    folder: Path, filename: str, files: Mapping[str, bytes], *, metadata: str = ""
) -> Path:
    """A real wheel with METADATA, WHEEL and RECORD."""
    name, version = filename.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    content = dict(files)
    content[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}\n"
    ).encode()
    content[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\n"
    record = "".join(f"{p},{b64(d)},{len(d)}\n" for p, d in content.items())
    content[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    path = folder / filename
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, data in content.items():
            archive.writestr(inside, data)
    return path


def context(
    *subjects: Wheel,
    others: Sequence[Wheel] = (),
    expected: Expected | None = None,
    policy: Policy | None = None,
    installed: bool = False,
    target: Target = TARGET,
) -> Context:
    return Context(
        subjects=subjects, others=tuple(others), target=target, arch=Arch.parse("12.1a"),
        policy=policy or load_policy(), expected=expected or Expected(), installed=installed,
    )  # fmt: skip
