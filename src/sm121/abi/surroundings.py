"""What the lock would put around a wheel, as far as it is in the download cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name

from sm121.errors import LockStale
from sm121.fetch import Cache, fetch_locked
from sm121.files import HashMemory, write_atomic
from sm121.layout import Layout
from sm121.lock.pylock import LockedFile, Target, lock_path, locked_files, read_lock
from sm121.repair.wheel import read_wheel
from sm121.ui import Ui

Wanted = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """paths: wheels that are there. lacking: 'NAME VERSION' of those that are not.

    instead: what the toolkit's lock has in place of a missing one, as a sentence.
    """

    paths: tuple[Path, ...]
    lacking: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Locked:
    """The wheels that a stack locks for one platform and Python, and where they would lie."""

    layout: Layout
    stack: str
    target: Target
    memory: HashMemory
    ui: Ui
    fetch: bool = False
    _read: dict[str, dict[str, LockedFile]] = field(default_factory=dict, init=False)

    def files(self, kind: str) -> dict[str, LockedFile]:
        """By distribution; empty if there is no such lock (another Python than the stack's)."""
        if kind not in self._read:
            self._read[kind] = self._files(kind)
        return self._read[kind]

    def _files(self, kind: str) -> dict[str, LockedFile]:
        path = lock_path(self.layout.pins, self.stack, kind, self.target)
        try:
            return {f.distribution: f for f in locked_files(read_lock(path), self.target)}
        except LockStale:
            return {}

    def cached(self, files: Iterable[LockedFile]) -> list[Path]:
        """Those that are in the cache. Their hash is the folder's name; `verify` checks it."""
        cache = Cache(self.layout.cache, self.memory)
        paths = (cache.path(f.sha256, f.filename) for f in files)
        return [path for path in paths if path.is_file()]

    def around(self, wanted: Wanted, besides: Collection[str] = ()) -> Surroundings:
        """The family's wheels for which `wanted` holds, but for the distributions `besides`.

        One that is not in the cache is taken from the lock of the toolkit: what a build was
        linked against. Fetches only if asked to.
        """
        cache = Cache(self.layout.cache, self.memory)
        toolkit: dict[str, LockedFile] | None = None
        paths: list[Path] = []
        lacking: list[str] = []
        instead: list[str] = []
        for name, file in self.files("family").items():
            if not wanted(name) or name in besides:
                continue
            path = cache.path(file.sha256, file.filename)
            if not path.is_file() and self.fetch:
                fetch_locked([file], target=self.target, cache=cache, offline=False, ui=self.ui)
            if path.is_file():
                paths.append(path)
                continue
            toolkit = self.files("host") if toolkit is None else toolkit
            other = toolkit.get(name)
            if other and (near := cache.path(other.sha256, other.filename)).is_file():
                paths.append(near)
                instead.append(f"{name} {other.version} (toolkit's) for {file.version}")
            else:
                lacking.append(f"{name} {file.version}")
        return Surroundings(paths=tuple(paths), lacking=tuple(lacking), instead=tuple(instead))

    def around_torch(self, besides: Collection[str] = ()) -> Surroundings:
        """torch and everything that it requires, so that `import torch` works."""
        if "torch" not in self.files("family"):
            lacking = f"torch (nothing is locked for {self.target.tag})"
            return Surroundings(paths=(), lacking=(lacking,))
        lock = lock_path(self.layout.pins, self.stack, "family", self.target)
        known = self.layout.cache / "abi" / "torch" / self.memory.sha256(lock)
        try:
            names = set(json.loads(known.read_text()))
        except (OSError, ValueError):
            names = self._torch_requires()
            found = self.around(names.__contains__)
            if not found.lacking:  # else there may be more, behind what could not be read
                write_atomic(known, json.dumps(sorted(names)))
        return self.around(names.__contains__, besides)

    def _torch_requires(self) -> set[str]:
        """Distributions that torch requires, itself too, as far as their wheels are here."""
        family = self.files("family")
        environment: Mapping[str, object] = self.target.environment()
        done: set[tuple[str, str]] = set()
        todo = [("torch", "")]
        while todo:
            name, extra = todo.pop()
            if (name, extra) in done or name not in family:
                continue
            done.add((name, extra))
            for path in self.around(name.__eq__).paths:
                for asked in read_wheel(path).requirements():
                    marker, with_extra = asked.marker, {**environment, "extra": extra}
                    if marker is None or marker.evaluate(with_extra):  # type: ignore[arg-type]
                        other = canonicalize_name(asked.name)
                        todo += [(other, one) for one in ("", *asked.extras)]
        return {name for name, _ in done}
