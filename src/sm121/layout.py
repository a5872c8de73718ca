"""Where everything lies. All paths derive from the project's root and three overrides.

SM121_CACHE moves the download cache (to share it between checkouts), SM121_BUILD the
scratch folder.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sm121.errors import UsageFault

# Separators of CMake lists, of nvcc's -Xcompiler and of shell words.
_ODD = re.compile(r"[\s;,'\"$\\]")


def _refuse_odd(path: Path) -> None:
    if found := _ODD.search(str(path)):
        raise UsageFault(
            f"The path {path} contains {found[0]!r}.",
            cause="vLLM's setup.py, CMake and nvcc split their arguments at such characters",
            remedy="Move the checkout, or SM121_BUILD and SM121_CACHE, to a path without it.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Paths of one checkout of the project."""

    root: Path
    build: Path
    wheelhouse: Path
    cache: Path

    @classmethod
    def find(cls, *, start: Path | None = None, wheelhouse: Path | None = None) -> Layout:
        """The checkout that holds `start` (default: the current directory, then this package).

        Raises UsageFault when no folder with pins/ and patches/ is found.
        """
        own = Path(__file__).resolve().parents[2]
        candidates = [start or Path.cwd(), *(start or Path.cwd()).resolve().parents, own]
        for folder in candidates:
            if (folder / "pins" / "default").is_file() and (folder / "patches").is_dir():
                root = folder.resolve()
                build = Path(os.environ.get("SM121_BUILD", root / "build")).resolve()
                cache = Path(os.environ.get("SM121_CACHE", build / "cache")).resolve()
                for path in (root, build, cache):
                    _refuse_odd(path)
                return cls(
                    root=root,
                    build=build,
                    wheelhouse=(wheelhouse or root / "wheelhouse").resolve(),
                    cache=cache,
                )
        raise UsageFault(
            "This is not a checkout of sm121: no folder here holds pins/default and patches/.",
            remedy="Change into the folder you cloned and run the command there.",
        )

    @property
    def pins(self) -> Path:
        return self.root / "pins"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def source(self) -> Path:
        return self.build / "source"

    @property
    def third_party(self) -> Path:
        return self.source / "third-party"

    @property
    def log(self) -> Path:
        return self.build / "log"

    @property
    def state(self) -> Path:
        return self.build / "state.json"
