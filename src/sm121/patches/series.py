"""A series: patches/<package>/<release>/series and the `git format-patch` files it lists.

`series` has one file name a line, in the order of application; `#` starts a comment. File
names carry no number: the order is the series' alone, so a patch can move without a rename.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.errors import PatchFailed
from sm121.files import sha256_file

_NAME = re.compile(r"^[a-z][a-z0-9]*(-[a-z0-9]+)*\.patch$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One patch file; `name` is the file name without its suffix."""

    name: str
    path: Path
    sha256: str


def load_series(folder: Path) -> list[Patch]:
    """Read a series. Raises PatchFailed when series and files disagree or a name is malformed."""
    listing = folder / "series"
    if not listing.is_file():
        raise PatchFailed(
            f"{listing} does not exist.", remedy="Every release needs one; it may be empty."
        )
    names = [
        line.split("#", 1)[0].strip() for line in listing.read_text(encoding="utf-8").splitlines()
    ]
    names = [name for name in names if name]
    present = sorted(p.name for p in folder.glob("*.patch"))
    faults = [f"{name}: listed twice" for name in sorted({n for n in names if names.count(n) > 1})]
    for name in names:
        if name not in present:
            near = difflib.get_close_matches(name, present, n=1)
            faults.append(
                f"{name}: listed, but there is no such file"
                + (f" (is it {near[0]}?)" if near else "")
            )
        elif not _NAME.match(name):
            faults.append(
                f"{name}: names are lower-case words with dashes, without a number in front"
            )
    faults += [f"{name}: not listed in series" for name in present if name not in names]
    if faults:
        raise PatchFailed(
            f"{listing} and the files beside it disagree.",
            details=faults,
            remedy="A patch that is not wanted any more is deleted, not left unlisted.",
        )
    return [
        Patch(
            name=name.removesuffix(".patch"), path=folder / name, sha256=sha256_file(folder / name)
        )
        for name in names
    ]


def listing(text: str, names: Sequence[str]) -> str:
    """The text of a `series` file for other patches: comments and blank lines stay.

    names: file names in their order. Lines of patches that are gone go; a new one comes behind
    the patch before it. In another order, comments move with the patch that follows them; the
    comment that begins the file stays there.
    """
    lines = text.splitlines()
    named = [(line.split("#", 1)[0].strip(), line) for line in lines]
    old = [name for name, _ in named if name]
    if [n for n in old if n in names] == [n for n in names if n in old]:
        kept = [(name, line) for name, line in named if not name or name in names]
    else:
        kept = _reordered(named, names)
    for place, name in enumerate(names):
        if name not in old:
            before = names[place - 1] if place else ""
            at = next(
                (n + 1 for n, (known, _) in enumerate(kept) if before and known == before), None
            )
            if at is None:
                at = next((n for n, (known, _) in enumerate(kept) if known), len(kept))
            kept.insert(at, (name, name))
    return "".join(f"{line}\n" for _, line in kept)


def _reordered(named: Sequence[tuple[str, str]], names: Sequence[str]) -> list[tuple[str, str]]:
    blocks: dict[str, list[tuple[str, str]]] = {}
    head: list[tuple[str, str]] = []
    pending: list[tuple[str, str]] = []
    for name, line in named:
        if not blocks and not pending and not head and line.startswith("#"):
            head.append((name, line))
            continue
        pending.append((name, line))
        if name:
            blocks[name], pending = pending, []
    return [*head, *(row for name in names for row in blocks.get(name, [])), *pending]
