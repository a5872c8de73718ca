"""Which extension modules a set has, and under which name each is imported."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.abi.context import Context
from sm121.abi.facts import Binary
from sm121.abi.symbols import INIT, is_extension_binary

_SUFFIX = re.compile(r"\.(?:abi3|cpython-[\w-]+)?\.?so$")
# In which order they are tried (CPython's Python/dynload_shlib.c, _PyImport_DynLoadFiletab).
_ORDER = (".cpython-", ".abi3.so", ".so")


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """An extension module. file: path in site-packages. name: dotted, as it is imported. inits:
    for which names its init functions are, where none is for the file's own (PEP 489, PyInit_NAME):
    then its package loads it by file. behind: the file that Python takes for that name before it."""

    name: str
    file: str
    inits: tuple[str, ...] = ()
    behind: str = ""

    @property
    def label(self) -> str:
        """What its row is called: its name, which is not enough for one that Python does not take."""
        return f"{self.name} ({self.file})" if self.behind else self.name

    def parents(self) -> Iterator[tuple[str, str]]:
        """Its packages and their folders, outer ones first."""
        names, folders = self.name.split(".")[:-1], self.file.split("/")[:-1]
        outside = len(folders) - len(names)
        for count in range(1, len(names) + 1):
            yield ".".join(names[:count]), "/".join(folders[: outside + count])


def extension_modules(context: Context, roots: Sequence[str] = ()) -> list[Extension]:
    """The judged extension modules that are the target's Python's, by name. roots: folders in
    site-packages that are on the path too, in their order."""
    found = {
        binary.path: _extension(binary, roots)  # two wheels may own one path
        for wheel in context.subjects
        for binary in wheel.binaries
        if is_extension_binary(binary) and context.for_interpreter(binary)
    }
    taken: dict[str, str] = {}
    out: list[Extension] = []
    for one in sorted(found.values(), key=lambda one: (one.name, _place(one.file, roots))):
        first = taken.setdefault(one.name, one.file)
        out.append(one if first == one.file else dataclasses.replace(one, behind=first))
    return out


def import_roots(site: Path) -> list[str]:
    """Folders in a site-packages that its .pth files put on the path (module site), e.g. where
    nvidia-cutlass-dsl keeps its package cutlass."""
    lines = [
        line.strip() for file in sorted(site.glob("*.pth"))
        for line in file.read_text("utf-8", errors="replace").splitlines()
    ]  # fmt: skip
    named = [line.rstrip("/") for line in lines if line and not line.startswith(("#", "import ", "import\t"))]  # fmt: skip
    return [line for line in named if not line.startswith(("/", ".")) and (site / line).is_dir()]


def _root(path: str, roots: Sequence[str]) -> str:
    """The innermost that it lies in: a package below it has its name from there. '' for none."""
    return max((root for root in roots if path.startswith(f"{root}/")), key=len, default="")


def _place(path: str, roots: Sequence[str]) -> tuple[int, int, str]:
    """Sorts files of one module name as Python looks for them: along its path, then by suffix."""
    name = path.rpartition("/")[2]
    return (
        ["", *roots].index(_root(path, roots)),
        next((rank for rank, suffix in enumerate(_ORDER) if suffix in name), len(_ORDER)), path,
    )  # fmt: skip


def _extension(binary: Binary, roots: Sequence[str]) -> Extension:
    path = binary.path
    root = _root(path, roots)
    name = _SUFFIX.sub("", path.removeprefix(f"{root}/" if root else "")).replace("/", ".")
    assert binary.elf is not None
    inits = sorted(n.removeprefix(INIT) for n in binary.elf.exports.plain if n.startswith(INIT))
    own = name.rpartition(".")[2] in inits
    return Extension(name=name, file=path, inits=() if own else tuple(inits))
