"""Objects by their sha256: `store/<sha256>`, and `incoming/<sha256>` while they come.

Only hashes decide. A hash that was computed is remembered with the file's size, time and inode,
whose *equality* is all that counts: a wrong clock changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CHUNK = 1 << 20
MODE = 0o644


def sha256(path: Path) -> str:
    """sha256 of a file, '' if it can't be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_CHUNK):
                digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()


def write_atomic(path: Path, text: str) -> None:
    """A whole file or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Store:
    """root: the folder on the node that releases, objects and environments lie in."""

    def __init__(self, root: Path) -> None:
        self.folder, self.incoming = root / "store", root / "incoming"
        self._memory = root / "store.json"
        self._known: dict[str, list[int]] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._known = dict(json.loads(self._memory.read_text()).items())

    def make(self) -> None:
        for folder in (self.folder, self.incoming):
            folder.mkdir(exist_ok=True)

    def path(self, digest: str) -> Path:
        return self.folder / digest

    def damaged(self, wanted: Iterable[str], *, thorough: bool) -> tuple[set[str], set[str]]:
        """(absent, altered) of the wanted objects; altered ones are taken out of the store.

        thorough: read every object; else only those whose size, time or inode changed.
        """
        absent, doubted = set(), []
        for digest in wanted:
            identity = _identity(self.path(digest))
            if identity is None:
                absent.add(digest)
            elif thorough or self._known.get(digest) != identity:
                doubted.append(digest)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda digest: sha256(self.path(digest)), doubted)
            altered = {digest for digest, got in zip(doubted, found, strict=True) if got != digest}
        for digest in doubted:
            if digest in altered:
                self.path(digest).unlink(missing_ok=True)
                self._known.pop(digest, None)
            else:
                self._remember(digest)
        self.save()
        return absent, altered

    def arriving(self, wanted: Iterable[str]) -> dict[str, int]:
        """Bytes that an earlier, broken transfer left, by object."""
        sizes = {}
        for digest in wanted:
            with contextlib.suppress(OSError):
                sizes[digest] = (self.incoming / digest).lstat().st_size
        return sizes

    def admit(self, sizes: Mapping[str, int]) -> list[str]:
        """Take what arrived into the store. Returns what is not what its name says; that is
        removed, so that it comes anew."""
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = dict(
                zip(sizes, pool.map(lambda d: sha256(self.incoming / d), sizes), strict=True)
            )
        bad = []
        for digest, got in found.items():
            file = self.incoming / digest
            if got != digest or file.is_symlink():
                # What is only cut short is resumed by the next transfer.
                if not got or file.lstat().st_size >= sizes[digest]:
                    file.unlink(missing_ok=True)
                bad.append(digest)
                continue
            file.chmod(MODE)
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
            file.replace(self.path(digest))
            self._remember(digest)
        self.save()
        return bad

    def forget(self, kept: set[str]) -> int:
        """Remove every object but these, and what arrives of others; returns how many."""
        gone = 0
        for folder in (self.folder, self.incoming):
            for file in folder.iterdir():
                if file.name not in kept:
                    file.unlink()
                    self._known.pop(file.name, None)
                    gone += 1
        self.save()
        return gone

    def _remember(self, digest: str) -> None:
        if identity := _identity(self.path(digest)):
            self._known[digest] = identity

    def save(self) -> None:
        # On a full disk: what is not remembered is read again.
        with contextlib.suppress(OSError):
            write_atomic(self._memory, json.dumps(self._known))


def _identity(path: Path) -> list[int] | None:
    """Size, time and inode of a regular file, None of anything else."""
    try:
        stat = path.lstat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino] if (stat.st_mode & 0o170000) == 0o100000 else None  # fmt: skip
