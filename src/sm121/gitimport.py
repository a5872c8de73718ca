"""A stream of files as input of `git fast-import`: no folder, and no file a blob, in between."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import IO

IMPORT_REF = "refs/sm121/importing"
# depth 0: looking for deltas takes longer than all the rest. done: a stream that ends early is
# an error.
FAST_IMPORT = ("--quiet", "--force", "--done", "--depth=0", "--date-format=raw")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedFile:
    """One file to store: path below the root, git's mode, content (a link's: its target)."""

    path: str
    mode: str
    data: bytes


def write_stream(
    stream: IO[bytes], files: Iterable[ImportedFile], *, message: str, who: tuple[str, str],
    date: datetime,
) -> None:  # fmt: skip
    """Write one parentless commit on IMPORT_REF (git-fast-import(1)) and close the stream."""
    person = f"{who[0]} <{who[1]}> {int(date.timestamp())} {date.strftime('%z')}"
    text = message.encode()
    stream.write(f"reset {IMPORT_REF}\ncommit {IMPORT_REF}\n".encode())
    stream.write(f"author {person}\ncommitter {person}\n".encode())
    stream.write(b"data %d\n%s\ndeleteall\n" % (len(text), text))
    for file in files:
        name = file.path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        head = f'M {file.mode} inline "{name}"\ndata {len(file.data)}\n'
        stream.write(os.fsencode(head) + file.data + b"\n")
    stream.write(b"done\n")
    stream.close()
