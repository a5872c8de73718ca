"""Check: the wheel's files are what the manifest's patches make of them.

Each patch is undone in memory, last one first: a hunk's new side must be found in the file,
and is replaced by its old side. Files that a wheel does not hold (CMake, csrc, requirements)
cannot be seen in it; a patch that has only such files is reported as not checkable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sm121.abi.context import Context, finding
from sm121.abi.facts import Wheel
from sm121.abi.report import Finding

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchFile:
    """A patch of the series: name as in the manifest, its text, and git's stable patch id."""

    name: str
    text: str
    patch_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """old, new: the two sides' lines without the leading sign."""

    old: tuple[str, ...]
    new: tuple[str, ...]


def parse(text: str) -> dict[str, list[Hunk]]:
    """File on the new side → hunks, of a unified diff as `git format-patch` writes it.

    A deleted file is listed under its old name with no hunks' new lines.
    """
    files: dict[str, list[Hunk]] = {}
    current: list[Hunk] | None = None
    lines = text.splitlines()
    at = 0
    old_name = ""
    while at < len(lines):
        line = lines[at]
        at += 1
        if line.startswith("--- "):
            old_name = line[4:].split("\t")[0].removeprefix("a/")
        elif line.startswith("+++ "):
            name = line[4:].split("\t")[0].removeprefix("b/")
            current = files.setdefault(old_name if name == "/dev/null" else name, [])
        elif current is not None and (match := _HUNK.match(line)):
            olds, news = int(match[1] or 1), int(match[2] or 1)
            old: list[str] = []
            new: list[str] = []
            while at < len(lines) and (len(old) < olds or len(new) < news):
                sign, rest = lines[at][:1], lines[at][1:]
                at += 1
                if sign in ("-", " ", ""):
                    old.append(rest)
                if sign in ("+", " ", ""):
                    new.append(rest)
            current.append(Hunk(old=tuple(old), new=tuple(new)))
    return files


def check_patches(
    context: Context,
    wheel: Wheel,
    patches: Sequence[PatchFile],
    read: Callable[[str], str | None],
) -> Iterator[Finding]:
    """patches: in series order. read: a file of the wheel by path, None if it has none."""
    promised: Mapping[str, str] = context.expected.patches or {}
    known = {patch.name: patch for patch in patches}
    for name, patch_id in promised.items():
        patch = known.get(name)
        if patch is None:
            yield finding(
                "patch", wheel, "", f"the manifest lists patch {name}, which the series does not have",
                names=[name],
            )  # fmt: skip
        elif patch.patch_id != patch_id:
            yield finding(
                "patch", wheel, "",
                f"patch {name} has id {patch.patch_id[:12]}; the manifest says {patch_id[:12]}: the "
                "wheel was built from another text of it",
                names=[name],
            )  # fmt: skip
    state: dict[str, list[str] | None] = {}
    for patch in reversed(patches):
        if patch.name not in promised:
            continue
        seen = 0
        for path, hunks in parse(patch.text).items():
            if path not in state:
                content = read(path)
                state[path] = content.splitlines() if content is not None else None
            lines = state[path]
            if lines is None:
                continue
            seen += 1
            for number, hunk in enumerate(hunks, 1):
                if not _undo(lines, hunk):
                    yield finding(
                        "patch", wheel, path,
                        f"patch {patch.name} is not in the wheel: hunk {number} of {len(hunks)} was "
                        f"not found in {path}",
                        names=[patch.name],
                    )  # fmt: skip
        if not seen:
            yield finding(
                "patch", wheel, "",
                f"patch {patch.name} cannot be seen in the wheel: it changes only files of the build",
                note=True, names=[patch.name],
            )  # fmt: skip


def _undo(lines: list[str], hunk: Hunk) -> bool:
    """Replace the new side by the old one, in place; False if the new side is not there."""
    new = list(hunk.new)
    if not new:
        return True
    for at in range(len(lines) - len(new) + 1):
        if lines[at] == new[0] and lines[at : at + len(new)] == new:
            lines[at : at + len(new)] = hunk.old
            return True
    return False
