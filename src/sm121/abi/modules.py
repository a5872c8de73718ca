"""Which extension modules a set has, and under which name each is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.abi.context import Context
from sm121.abi.facts import Binary
from sm121.abi.symbols import INIT, is_extension_binary

_SUFFIX = re.compile(r"\.(?:abi3|cpython-[\w-]+)?\.?so$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """An extension module. file: path in site-packages. name: dotted, as it is imported. inits:
    for which names its init functions are, where none is for the file's own (PEP 489, PyInit_NAME):
    then its package loads it by file."""

    name: str
    file: str
    inits: tuple[str, ...] = ()

    def parents(self) -> Iterator[tuple[str, str]]:
        """Its packages and their folders, outer ones first."""
        names, folders = self.name.split(".")[:-1], self.file.split("/")[:-1]
        outside = len(folders) - len(names)
        for count in range(1, len(names) + 1):
            yield ".".join(names[:count]), "/".join(folders[: outside + count])


def extension_modules(context: Context, roots: Sequence[str] = ()) -> list[Extension]:
    """The judged extension modules that the target's Python would load, by name. roots: folders in
    site-packages that are on the path too."""
    found = [
        _extension(binary, roots)
        for wheel in context.subjects
        for binary in wheel.binaries
        if is_extension_binary(binary) and context.for_interpreter(binary)
    ]
    return sorted(found, key=lambda one: one.name)


def import_roots(site: Path) -> list[str]:
    """Folders in a site-packages that its .pth files put on the path (module site), e.g. where
    nvidia-cutlass-dsl keeps its package cutlass."""
    lines = [
        line.strip() for file in sorted(site.glob("*.pth"))
        for line in file.read_text("utf-8", errors="replace").splitlines()
    ]  # fmt: skip
    named = [line.rstrip("/") for line in lines if line and not line.startswith(("#", "import ", "import\t"))]  # fmt: skip
    return [line for line in named if not line.startswith(("/", ".")) and (site / line).is_dir()]


def _extension(binary: Binary, roots: Sequence[str]) -> Extension:
    path = binary.path
    # The innermost: a package below it has its name from there.
    inside = [f"{root}/" for root in roots if path.startswith(f"{root}/")]
    name = _SUFFIX.sub("", path.removeprefix(max(inside, key=len, default=""))).replace("/", ".")
    assert binary.elf is not None
    inits = sorted(n.removeprefix(INIT) for n in binary.elf.exports.plain if n.startswith(INIT))
    own = name.rpartition(".")[2] in inits
    return Extension(name=name, file=path, inits=() if own else tuple(inits))
