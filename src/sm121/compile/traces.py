"""Traces of the machine in what was compiled on it: paths of the build."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

# What the name of a file or folder may go on with.
_NAME = rb"\w.+@-"
# Before a path: nothing that it could be the end of, or a compiler's option (`-I/src`).
_BEFORE = re.compile(rb"(?:\A|[^/%b]|(?:\A|[^/%b])-[A-Z])\Z" % (_NAME, _NAME))
_LOOK_BACK = 3
# So many names in a row are no part of another path by chance.
_UNMISTAKABLE = 3


def path_faults(name: str, data: bytes, forbidden: Sequence[str]) -> list[str]:
    """A sentence for each forbidden path (absolute) that a library holds, or begins a path with.

    Whole names only: of a checkout in /src, `csrc/flash_attn/src/x.h` and `/src2/x.h` say
    nothing. A path of three names or more counts wherever it stands (`-isystem/home/me/x`, or right
    behind another text, as Rust lays out its own); a shorter one only where a path can begin.
    """
    return [
        f"{name}: holds the build path {path}"
        for path in forbidden
        if any(
            path.count("/") >= _UNMISTAKABLE or _BEFORE.search(before)
            for before in _contexts(path, data)
        )
    ]


def _contexts(path: str, data: bytes) -> Iterator[bytes]:
    """What stands before each place that could be the path. A pattern that begins with its text
    is searched for a hundred times as fast as one that looks back first."""
    for match in re.finditer(re.escape(path.encode()) + rb"(?![%b])" % _NAME, data):
        yield data[max(0, match.start() - _LOOK_BACK) : match.start()]
