"""Which symbols stay open when a root is loaded: glibc's lookup, (name, version) at a time.

Source: glibc elf/dl-lookup.c `check_match`, elf/dl-version.c. Weak references are no fault;
an undefined symbol without a relocation is never looked up (`elf.read_elf` leaves it out).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sm121.abi.elf import Exports, Import
from sm121.abi.facts import Binary
from sm121.abi.scope import Closure, Loaded, Scene
from sm121.abi.system import System


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """A strong reference that nobody in scope satisfies. root: what was being loaded."""

    symbol: Import
    user: Loaded
    root: Loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A NEEDED library that is nowhere. through: who needs it, when that is not judged itself."""

    library: str
    user: Loaded
    root: Loaded
    through: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionGap:
    """A library is there but lacks a version that the user's verneed asks of it."""

    library: str
    version: str
    user: Loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """Result over a whole set. checked: strong imports looked up per binary path."""

    open: tuple[Open, ...]
    missing: tuple[Missing, ...]
    gaps: tuple[VersionGap, ...]
    checked: dict[str, int]


def defines(exports: Exports, symbol: Import) -> bool:
    """Would the loader bind this reference to that file?"""
    if not symbol.version:
        return symbol.name in exports.plain
    if not exports.versioned:
        return symbol.name in exports.plain
    return f"{symbol.name}@{symbol.version}" in exports.exact or symbol.name in exports.base


class Resolver:
    """Symbol lookups in one scene. Own-closure results are remembered per object."""

    def __init__(
        self,
        scene: Scene,
        system: System,
        *,
        global_roots: Sequence[Loaded],
        local_roots: Sequence[Loaded],
    ) -> None:
        """global_roots: opened RTLD_GLOBAL before anything else; local_roots: loaded first,
        visible by name only (what `import torch` leaves behind)."""
        self.scene, self.system = scene, system
        self.global_objects = _objects(scene.closure(r) for r in global_roots)
        preloaded = list(self.global_objects)
        for root in local_roots:
            preloaded += scene.closure(root, preloaded).objects
        self.preloaded = tuple(dict.fromkeys(preloaded))
        self._own: dict[Loaded, tuple[Import, ...]] = {}
        self._closures: dict[Loaded, Closure] = {}

    def closure(self, one: Loaded, extra: Sequence[Loaded] = ()) -> Closure:
        if extra:
            return self.scene.closure(one, self.preloaded, extra)
        if one not in self._closures:
            elf = one.binary.elf
            assert elf is not None
            # A program starts a process of its own: nothing is loaded before it.
            before = () if elf.interpreter and not elf.soname else self.preloaded
            self._closures[one] = self.scene.closure(one, before)
        return self._closures[one]

    def open_symbols(self, one: Loaded) -> tuple[Import, ...]:
        """Strong imports of an object that its own closure and the process leave open."""
        if one not in self._own:
            elf = one.binary.elf
            assert elf is not None
            strong = [s for s in elf.imports if not s.weak]
            self._own[one] = tuple(self._filter(strong, self.closure(one)))
        return self._own[one]

    def _filter(self, symbols: Iterable[Import], closure: Closure) -> Iterable[Import]:
        tables = [o.binary.elf.exports for o in (*self.global_objects, *closure.objects)
                  if o.binary.elf]  # fmt: skip
        for symbol in symbols:
            if self.system.defines(symbol, closure.system):
                continue
            if not any(defines(table, symbol) for table in tables):
                yield symbol

    def resolve(
        self, subjects: Sequence[Loaded], extras: dict[Loaded, Sequence[Loaded]]
    ) -> Resolution:
        """Check every subject in every scope that it is loaded in.

        extras: per root, libraries that its package opens before it.
        """
        wanted = set(subjects)
        inner = {
            o for s in self.scene.files.values() for o in self.closure(s).objects if o is not s
        }
        found_open: dict[tuple[Loaded, Import], Open] = {}
        missing: dict[tuple[Loaded, str], Missing] = {}
        for root in self.scene.files.values():
            elf = root.binary.elf
            assert elf is not None
            if root in inner and not is_extension(root):
                continue
            closure = self.closure(root, extras.get(root, ()))
            if not wanted.intersection(closure.objects):
                continue
            for user, name in closure.missing:
                if user in wanted:
                    missing.setdefault((user, name), Missing(library=name, user=user, root=root))
                elif root in wanted:
                    missing.setdefault(
                        (root, name),
                        Missing(library=name, user=root, root=root, through=user.path),
                    )
            for user in closure.objects:
                if user not in wanted:
                    continue
                left: Iterable[Import] = self.open_symbols(user)
                if user is not root or root in extras:
                    left = self._filter(left, closure)
                for symbol in left:
                    found_open.setdefault((user, symbol), Open(symbol=symbol, user=user, root=root))
        return Resolution(
            open=tuple(found_open.values()),
            missing=tuple(missing.values()),
            gaps=tuple(self._gaps(subjects)),
            checked={
                s.path: sum(not i.weak for i in s.binary.elf.imports)
                for s in subjects if s.binary.elf
            },
        )  # fmt: skip

    def _gaps(self, subjects: Sequence[Loaded]) -> Iterable[VersionGap]:
        """Versions asked of libraries in the set; the system's are the floors' business."""
        for user in subjects:
            elf = user.binary.elf
            assert elf is not None
            providers = {}
            for one in self.closure(user).objects:
                other = one.binary.elf
                if other is not None:
                    providers[other.soname or one.binary.name] = other
            for library, versions in elf.needs_versions:
                if (provider := providers.get(library)) and provider.defines_versions:
                    for version in versions:
                        if version not in provider.defines_versions:
                            yield VersionGap(library=library, version=version, user=user)


INIT = "PyInit_"


def is_extension(one: Loaded) -> bool:
    """A Python extension module: opened by itself, whatever else needs it."""
    return is_extension_binary(one.binary)


def is_extension_binary(binary: Binary) -> bool:
    elf = binary.elf
    return elf is not None and any(n.startswith(INIT) for n in elf.exports.plain)


def _objects(closures: Iterable[Closure]) -> tuple[Loaded, ...]:
    return tuple(dict.fromkeys(o for c in closures for o in c.objects))
