"""Two wheels of one build, file by file: what differs, and of a binary in which sections."""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

# ELF-64, little-endian: the file header's e_shoff, e_shentsize, e_shnum, e_shstrndx; a section
# header's sh_name, sh_type, sh_offset, sh_size (gABI, chapter 4).
_HEADER = struct.Struct("<40xQ10xHHH")
_SECTION = struct.Struct("<II16xQQ")
_NOBITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One file that is not the same in both. why: 'only in …', the sections that differ, or ''."""

    file: str
    why: str


def compare_wheels(first: Path, second: Path) -> tuple[int, list[Difference]]:
    """How many files both have with the same bytes, and the rest. RECORD lists the hashes of the
    others, so it differs whenever one does."""
    same, out = 0, []
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        names = {*one.namelist()}, {*other.namelist()}
        for name in sorted(names[0] | names[1]):
            if name not in names[1] or name not in names[0]:
                where = first if name in names[0] else second
                out.append(Difference(file=name, why=f"only in {where.parent}"))
                continue
            a, b = one.read(name), other.read(name)
            if a == b:
                same += 1
                continue
            record = "it lists the others' hashes" if name.endswith(".dist-info/RECORD") else ""
            out.append(Difference(file=name, why=record or _sections(a, b)))
    return same, out


def _sections(a: bytes, b: bytes) -> str:
    if not (a.startswith(b"\x7fELF\x02\x01") and b.startswith(b"\x7fELF\x02\x01")):
        return ""
    one, other = sections(a), sections(b)
    named = sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))
    parts = []
    for name in named:
        texts = [_text(found.get(name, b"")) for found in (one, other)]
        parts.append(f"{name}: {texts[0]!r} and {texts[1]!r}" if all(texts) else name)
    return "; ".join(parts) or "only headers"


def sections(data: bytes) -> dict[str, bytes]:
    """Content of each section of an ELF file by name; offsets of what follows do not count."""
    offset, size, count, names = _HEADER.unpack_from(data)
    found = [_SECTION.unpack_from(data, offset + size * index) for index in range(count)]
    strings = found[names][2]
    out = {}
    for name, kind, start, length in found:
        end = data.index(b"\0", strings + name)
        title = data[strings + name : end].decode(errors="replace")
        out[title] = b"" if kind == _NOBITS else data[start : start + length]
    return out


def _text(data: bytes) -> str:
    """A section that holds one line of text, else ''."""
    text = data.strip(b"\0")
    return text.decode() if text.isascii() and text.decode("ascii").isprintable() else ""
