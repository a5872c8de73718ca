"""The libraries that belong to the system, the driver and the interpreter, as lists.

Their symbol lists lie beside the policy (see policy/README.md for how they were made):
`system-<machine>.json` for glibc, libstdc++ and libgcc, `libcuda.json`, `libpython.json`.
A glibc or libstdc++ symbol never leaves the version it was released with, so a list made
from a newer release is exact for every older one once the floor has been checked.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sm121.abi.elf import Import

LIBCUDA = "libcuda.so.1"
# Loaded with every CPython on Linux, so in scope whatever a file itself needs.
_PROCESS = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
            "libutil.so.1", "ld-linux-aarch64.so.1", "ld-linux-x86-64.so.2")  # fmt: skip


@cache
def data(name: str) -> Any:
    """A JSON file of the policy folder."""
    return json.loads((files("sm121.abi.policy") / name).read_text("utf-8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """listed: library → version ('' for none) → names. python: names that the interpreter
    exports. trusted: libraries that are the system's but whose symbols are not listed, each
    with the prefixes that its names have."""

    listed: Mapping[str, Mapping[str, frozenset[str]]]
    python: frozenset[str]
    trusted: Mapping[str, tuple[str, ...]]

    @classmethod
    def load(cls, *, machine: str, python: str, trusted: Mapping[str, tuple[str, ...]]) -> System:
        """python: 'X.Y'; for one that is not listed, the newest list is used."""
        raw = data(f"system-{machine}.json")["libraries"]
        listed = {
            library: {version: frozenset(names) for version, names in versions.items()}
            for library, versions in raw.items()
        }
        listed[LIBCUDA] = {"": frozenset(data("libcuda.json")["names"])}
        versions = data("libpython.json")["versions"]
        newest = max(versions, key=lambda text: int(text.split(".")[1]))
        return cls(
            listed=listed,
            python=frozenset(versions.get(python, versions[newest])),
            trusted={**trusted, f"libpython{python}.so.1.0": (), "libpython3.so": ()},
        )

    @property
    def names(self) -> frozenset[str]:
        """Every library that is not expected in a wheel."""
        return frozenset(self.listed) | frozenset(self.trusted)

    def defines(self, symbol: Import, loaded: Collection[str]) -> bool:
        """Does the system, with these of its libraries loaded, define a symbol?"""
        if symbol.name in self.python:
            return True
        if symbol.version and symbol.library in self.trusted and symbol.library in loaded:
            return True
        for library in (*_PROCESS, *loaded):
            versions = self.listed.get(library)
            if versions is None:
                continue
            if symbol.version:
                names = versions.get(symbol.version)
                if names and symbol.name in names:
                    return True
                if symbol.name in versions.get("", ()):
                    return True
                if symbol.library == library and names is None:
                    return True  # an unknown version: the floor check names it, once
            elif any(symbol.name in names for names in versions.values()):
                return True
        return any(symbol.name.startswith(self.trusted.get(library, ())) for library in loaded)
