"""Files: hashes (remembered for large files), atomic writes, content digests of trees."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sm121.errors import HashMismatch

_CHUNK = 1 << 20


def sha256_file(path: Path) -> str:
    """sha256 of a file's content, lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_text(*parts: str) -> str:
    """sha256 over several strings, each framed by its length so that none can imitate another."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


class HashMemory:
    """sha256 of files, remembered by path, size, modification time and inode.

    A verified 400 MB wheel is not read again by a run that changes nothing. A file that was
    rewritten gets another inode or time, so a stale hash is not believed.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._known: dict[str, list[object]] = {}
        self._changed = False
        with contextlib.suppress(OSError, ValueError, AttributeError):
            known = json.loads(store.read_text()).items()
            self._known = {k: v for k, v in known if isinstance(v, list) and len(v) == 4}

    def sha256(self, path: Path) -> str:
        stat = path.stat()
        key = str(path.resolve())
        identity: list[object] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self._known.get(key)
        if known and known[:3] == identity:
            return str(known[3])
        digest = sha256_file(path)
        self._known[key] = [*identity, digest]
        self._changed = True
        return digest

    def remember(self, path: Path, digest: str) -> None:
        """Note a hash that was computed while the file was written."""
        stat = path.stat()
        self._known[str(path.resolve())] = [stat.st_size, stat.st_mtime_ns, stat.st_ino, digest]
        self._changed = True

    def moved(self, old: Path, new: Path) -> None:
        """A file was renamed: what was known of it stays true."""
        if known := self._known.pop(str(old.absolute()), None):
            self._known[str(new.resolve())] = known
            self._changed = True

    def save(self) -> None:
        if self._changed:
            write_atomic(self._store, json.dumps(self._known, indent=0, sort_keys=True))
            self._changed = False


def link_or_copy(source: Path, destination: Path) -> None:
    """The same file under a second name: a hard link, or a checked copy on another file system.

    Raises HashMismatch if the copy is not what the source is.
    """
    temporary = destination.with_name(f".{destination.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, temporary)
        if sha256_file(temporary) != sha256_file(source):
            temporary.unlink()
            raise HashMismatch(
                f"The copy of {source.name} is not what was copied.",
                cause=f"from {source} to {destination}",
                remedy="Check the disk and memory of this machine.",
            ) from None
    temporary.replace(destination)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing: temporary name in the same folder, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def fresh_directory(path: Path) -> Iterator[Path]:
    """Fill a directory under a temporary name; it appears at `path` only if the block succeeds.

    What was at `path` before is replaced. A killed process leaves `path` as it was, and a
    `.partial` sibling that the next run removes.
    """
    temporary = path.with_name(f"{path.name}.partial")
    old = path.with_name(f"{path.name}.old")
    if old.exists() and not path.exists():
        old.rename(path)  # killed between the two renames below
    remove_tree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        remove_tree(temporary)
        raise
    remove_tree(old)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    remove_tree(old)


def remove_tree(path: Path) -> None:
    """Remove a file, link or directory; read-only files inside are no obstacle."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def tree_size(path: Path) -> int:
    """Bytes that a file or directory takes on disk (hard links counted once)."""
    if path.is_file():
        return path.stat().st_blocks * 512
    seen: set[int] = set()
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                stat = os.lstat(os.path.join(folder, name))  # noqa: PTH118 - hot loop
                if stat.st_ino not in seen:
                    seen.add(stat.st_ino)
                    total += stat.st_blocks * 512
    return total


def tree_files(root: Path, sha256: Callable[[Path], str] = sha256_file) -> dict[str, str]:
    """Path below a directory → sha256, of all its regular files; what git keeps in `.git` is none.

    sha256: HashMemory's, for a tree that is looked at in every run.
    """
    return {
        file.relative_to(root).as_posix(): sha256(file)
        for file in root.rglob("*")
        if file.is_file() and not file.is_symlink() and ".git" not in file.relative_to(root).parts
    }


def files_text(files: Mapping[str, str]) -> str:
    """Lines 'SHA256  RELATIVE/PATH\\n' in the order of the paths, as `sha256sum -c` reads them."""
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(files.items()))


def files_digest(files: Mapping[str, str]) -> str:
    """Content digest of a directory's files: 'h1:' and hex, as Go's dirhash.Hash1 defines it.

    sha256 over `files_text`. Modes and times do not count, since wheels and sdists lose them,
    so the same headers have the same digest in a clone, out of git and out of a wheel.
    """
    return "h1:" + hashlib.sha256(files_text(files).encode()).hexdigest()


def tree_digest(root: Path) -> str:
    """Content digest of a directory (`files_digest`)."""
    return files_digest(tree_files(root))
