"""What is known of a wheel after reading it once. Kept in the cache, by the wheel's sha256."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sm121.abi.elf import Elf, Exports, Import
from sm121.abi.fatbin import Code, Container

# Part of the cache key. Raise it when a reader below changes what it finds.
VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Binary:
    """An ELF file. path: relative to site-packages. damage: why it could not be read, if so.

    strings: version strings found in it (see policy `strings`).
    """

    path: str
    elf: Elf | None
    containers: tuple[Container, ...] = ()
    damage: str = ""
    strings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A wheel, or what an environment holds of one distribution.

    filename: the wheel's, or 'NAME VERSION' for an environment. tags: of the file name.
    requires_python: of METADATA.
    files: path in site-packages → sha256 (urlsafe base64, as RECORD has it) or ''.
    texts: small files that the set checks read. damage: why the archive is no sound wheel.
    """

    filename: str
    sha256: str
    distribution: str
    version: str
    tags: tuple[str, ...] = ()
    files: dict[str, str]
    texts: dict[str, str]
    binaries: tuple[Binary, ...] = ()
    damage: str = ""


def to_bytes(wheel: Wheel) -> bytes:
    """JSON; sets as sorted, newline-joined text, which is what is fastest to read back."""
    return json.dumps(
        {
            "version": VERSION, "filename": wheel.filename, "sha256": wheel.sha256,
            "distribution": wheel.distribution, "release": wheel.version,
            "tags": wheel.tags, "files": wheel.files, "texts": wheel.texts,
            "damage": wheel.damage, "binaries": [_binary_out(b) for b in wheel.binaries],
        }
    ).encode()  # fmt: skip


def from_bytes(data: bytes) -> Wheel:
    """Raises ValueError, KeyError or TypeError for anything that `to_bytes` did not write."""
    raw = json.loads(data)
    if raw["version"] != VERSION:
        raise ValueError("written by another version")
    return Wheel(
        filename=raw["filename"], sha256=raw["sha256"], distribution=raw["distribution"],
        version=raw["release"], tags=tuple(raw["tags"]), files=raw["files"], texts=raw["texts"],
        damage=raw["damage"], binaries=tuple(_binary_in(b) for b in raw["binaries"]),
    )  # fmt: skip


_PLAIN_FIELDS = ("machine", "bits", "kind", "size", "dynamic", "interpreter", "soname",
                 "rpath", "runpath", "build_id")  # fmt: skip


def _binary_out(binary: Binary) -> dict[str, Any]:
    out: dict[str, Any] = {"path": binary.path}
    if binary.damage:
        out["damage"] = binary.damage
    if binary.strings:
        out["strings"] = binary.strings
    if binary.containers:
        out["containers"] = [
            [[[c.kind, c.arch, c.suffix] for c in k.codes], k.bytes, k.compressed]
            for k in binary.containers
        ]
    if elf := binary.elf:
        out["elf"] = {name: getattr(elf, name) for name in _PLAIN_FIELDS} | {
            "needed": elf.needed, "needs_versions": elf.needs_versions,
            "defines_versions": elf.defines_versions, "fatbin": elf.fatbin,
            "imports": [[i.name, i.version, i.library, i.weak] for i in elf.imports],
            "versioned": elf.exports.versioned,
            "exports": ["\n".join(sorted(s)) for s in
                        (elf.exports.plain, elf.exports.base, elf.exports.exact)],
        }  # fmt: skip
    return out


def _binary_in(raw: dict[str, Any]) -> Binary:
    elf = None
    if e := raw.get("elf"):
        plain, base, exact = (frozenset(t.split("\n")) if t else frozenset() for t in e["exports"])
        elf = Elf(
            **{name: e[name] for name in _PLAIN_FIELDS},
            needed=tuple(e["needed"]),
            needs_versions=tuple((n, tuple(v)) for n, v in e["needs_versions"]),
            defines_versions=tuple(e["defines_versions"]),
            fatbin=tuple(e["fatbin"]) if e["fatbin"] else None,
            imports=tuple(
                Import(name=n, version=v, library=lib, weak=w) for n, v, lib, w in e["imports"]
            ),
            # Usually both are the same set: then hold it once.
            exports=Exports(
                versioned=e["versioned"], plain=plain, base=plain if plain == base else base,
                exact=exact,
            ),
        )  # fmt: skip
    return Binary(
        path=raw["path"], elf=elf, damage=raw.get("damage", ""),
        strings=tuple(raw.get("strings", ())),
        containers=tuple(
            Container(
                codes=tuple(Code(kind=k, arch=a, suffix=s) for k, a, s in codes), bytes=size,
                compressed=compressed,
            )
            for codes, size, compressed in raw.get("containers", ())
        ),
    )  # fmt: skip
