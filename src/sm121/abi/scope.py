"""Who is loaded with whom: glibc's search order over the files of a set of wheels.

Sources: ld.so(8) "Shared object dependencies"; glibc elf/dl-load.c `_dl_map_object` (an object
already loaded under that name or SONAME wins before any search; DT_RPATH of the object and
of those that loaded it, unless it has DT_RUNPATH; then DT_RUNPATH; then the system).
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sm121.abi.facts import Binary, Wheel


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A file of the set. Compared by identity."""

    binary: Binary
    wheel: Wheel

    @property
    def path(self) -> str:
        return self.binary.path


@dataclass(frozen=True, kw_only=True, slots=True)
class Closure:
    """What loading a root brings in, in the loader's breadth-first order, the root first.

    system: libraries that are the system's. missing: (who needs it, name).
    """

    objects: tuple[Loaded, ...]
    system: tuple[str, ...]
    missing: tuple[tuple[Loaded, str], ...]


class Scene:
    """All loadable files of a set, as they lie in one site-packages."""

    def __init__(self, wheels: Iterable[Wheel], *, machine: str, system: Iterable[str]) -> None:
        """system: names of libraries that the operating system or the driver provides.

        Where two wheels own one path the last one wins, as it does on disk.
        """
        self.files: dict[str, Loaded] = {}
        for wheel in wheels:
            for binary in wheel.binaries:
                elf = binary.elf
                if elf and elf.dynamic and elf.machine == machine and elf.bits == 64:
                    self.files[binary.path] = Loaded(binary, wheel)
        self._system = frozenset(system)

    def closure(
        self, root: Loaded, preloaded: Sequence[Loaded] = (), extra: Sequence[Loaded] = ()
    ) -> Closure:
        """Load a root into a process where `preloaded` objects already are.

        extra: further roots of the same scope (libraries that a package opens by hand).
        """
        names: dict[str, Loaded] = {}
        for one in (*preloaded, *extra):
            _name(names, one)
        _name(names, root)
        objects: dict[Loaded, Loaded | None] = {root: None}  # value: who loaded it
        for one in extra:
            objects.setdefault(one, None)
        system: dict[str, None] = {}
        missing: list[tuple[Loaded, str]] = []
        queue = list(objects)
        for current in queue:
            elf = current.binary.elf
            assert elf is not None
            for needed in elf.needed:
                found = names.get(needed) or self._search(needed, current, objects)
                if found is None:
                    if needed in self._system:
                        system[needed] = None
                    else:
                        missing.append((current, needed))
                    continue
                _name(names, found, needed)
                if found not in objects:
                    objects[found] = current
                    queue.append(found)
        return Closure(objects=tuple(objects), system=tuple(system), missing=tuple(missing))

    def _search(
        self, name: str, current: Loaded, loaders: Mapping[Loaded, Loaded | None]
    ) -> Loaded | None:
        if "/" in name:
            return self.files.get(posixpath.normpath(name))
        elf = current.binary.elf
        assert elf is not None
        if elf.runpath is None:
            step: Loaded | None = current
            while step is not None:
                other = step.binary.elf
                assert other is not None
                if other.runpath is None and (found := self._in(other.rpath, step, name)):
                    return found
                step = loaders.get(step)
            return None
        return self._in(elf.runpath, current, name)

    def _in(self, path: str | None, owner: Loaded, name: str) -> Loaded | None:
        for folder in search_folders(path or "", owner.path):
            if found := self.files.get(posixpath.join(folder, name)):
                return found
        return None


def _name(names: dict[str, Loaded], one: Loaded, alias: str = "") -> None:
    elf = one.binary.elf
    assert elf is not None
    for name in (elf.soname, one.binary.name if not elf.soname else "", alias):
        if name:
            names.setdefault(name, one)


def search_folders(path: str, owner: str) -> list[str]:
    """Folders of an RPATH or RUNPATH relative to site-packages; others are left out."""
    origin = posixpath.dirname(owner)
    folders = []
    for entry in path.split(":"):
        if entry.startswith(("$ORIGIN", "${ORIGIN}")):
            rest = entry.replace("${ORIGIN}", "$ORIGIN").removeprefix("$ORIGIN").lstrip("/")
            folder = posixpath.normpath(posixpath.join(origin, rest))
            folders.append("" if folder == "." else folder)
    return folders
