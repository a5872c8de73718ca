"""What changed between two locks: for a person, and which distributions moved."""

from __future__ import annotations

import difflib
from pathlib import Path

from packaging.pylock import Pylock

from sm121.errors import LockStale
from sm121.lock.pylock import read_lock, render_lock


def difference(path: Path, new: Pylock) -> list[str]:
    """What would change in a lock file: '-torch 2.11.0 <file> <sha256>' lines; [] if nothing."""
    try:
        old = _lines(read_lock(path))
        same = path.read_text(encoding="utf-8") == render_lock(new)
    except LockStale:
        old, same = [], False
    if same:
        return []
    changes = [
        line
        for line in difflib.unified_diff(old, _lines(new), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    return [f"{path.name}:", *(f"  {line}" for line in changes or ["only its inputs changed"])]


def moves(path: Path, new: Pylock) -> dict[str, tuple[str, str]]:
    """Distributions whose version changes: name → (old, new); '-' where it was or is absent."""
    try:
        old = {p.name: str(p.version) for p in read_lock(path).packages}
    except LockStale:
        old = {}
    now = {p.name: str(p.version) for p in new.packages}
    return {
        name: (str(old.get(name, "-")), str(now.get(name, "-")))
        for name in sorted(old.keys() | now.keys())
        if old.get(name) != now.get(name)
    }


def _lines(lock: Pylock) -> list[str]:
    return [
        f"{package.name} {package.version} {wheel.filename} {wheel.hashes['sha256'][:16]}"
        for package in lock.packages
        for wheel in package.wheels or ()
    ]
