"""What the folders hold that a source's digests cover, and which files of them were changed since.

The digests alone decide. The list of files that lies beside a tree only names what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm121.files import files_digest, files_text, sha256_file, tree_files
from sm121.pins.model import SourcePin


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """digest: of each folder of `pin.digested`. files: path below the tree → sha256, of all of them."""

    digest: Mapping[str, str]
    files: Mapping[str, str]


def read_content(
    pin: SourcePin, tree: Path, sha256: Callable[[Path], str] = sha256_file
) -> Content:
    """Read a source's tree; a folder that is not there has no files."""
    found = {sub: tree_files(tree / sub, sha256) for sub in pin.digested}
    return Content(
        digest={sub: files_digest(files) for sub, files in found.items()},
        files={
            (PurePosixPath(sub) / path).as_posix(): digest
            for sub, files in found.items()
            for path, digest in files.items()
        },
    )


def write_list(file: Path, content: Content) -> None:
    """Keep the list of a tree that is as pinned."""
    file.write_text(files_text(content.files), encoding="utf-8")


def differences(file: Path, content: Content) -> list[str]:
    """What differs from the list, as 'changed: include/a.h'; nothing if no list was kept."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    listed = {path: digest for digest, _, path in (line.partition("  ") for line in lines)}
    return [
        f"{kind}: {path}"
        for path in sorted(listed.keys() | content.files.keys())
        if (kind := _kind(listed.get(path), content.files.get(path)))
    ]


def _kind(before: str | None, now: str | None) -> str:
    if before == now:
        return ""
    return "new" if before is None else "gone" if now is None else "changed"
