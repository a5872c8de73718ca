"""What becomes of each patch, when only Python can change and the binaries are the release's.

A file of a patch either ends up in the wheel, or decides its METADATA, or is an input of the
build (then the binaries are as if it had not been patched), or is in no wheel anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sm121.errors import PatchFailed, PinsFault
from sm121.lock.resolve import REQUIREMENT_FILES
from sm121.overlay.release import PACKAGE
from sm121.pins.model import OverlayPin

Status = Literal["applied", "applied in part", "left out", "upstreamed"]

# In the repository for people and CI; no wheel holds them, ours neither.
_NEVER_IN_A_WHEEL = ("docs/", "tests/", "benchmarks/", "examples/", ".github/", ".buildkite/")
_BUILD = "an input of the build; the binaries are the release's own"
_ELSEWHERE = "in no wheel"
_DATA = "not in the release's wheel: package data that its build leaves out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A patch of the series and the files that its commit changes."""

    name: str
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    """What became of a patch. files: changed in the wheel, METADATA for requirement files.
    not_applied: its other files, each with the reason. reason: for anything but 'applied'."""

    name: str
    status: Status
    files: tuple[str, ...] = ()
    not_applied: Mapping[str, str]
    reason: str = ""


def plan(
    changes: Sequence[Change], *, wheel: Collection[str], added: Collection[str], pin: OverlayPin
) -> list[Fate]:
    """Decide for every patch. wheel: members of the release's wheel. added: files that the
    series adds.

    Raises PatchFailed for a patch of Python and inputs of the build that the pins do not name:
    its Python may rely on what was not compiled, and half of it must not be there in silence.
    Raises PinsFault if the pins name one that is not of that kind.
    """
    fates: list[Fate] = []
    undecided: list[str] = []
    needless = set(pin.python_alone)
    for change in changes:
        sorted_in = {path: _not_in_wheel(path, wheel, added) for path in change.files}
        inside = tuple(p for p, why in sorted_in.items() if not why)
        outside = {path: why for path, why in sorted_in.items() if why}
        build = [path for path, why in outside.items() if why != _ELSEWHERE]
        status: Status = "applied"
        reason = ""
        if not inside:
            status, reason = "left out", _BUILD if build else f"all that it changes is {_ELSEWHERE}"
        elif build and change.name in pin.python_alone:
            status, reason = "applied in part", pin.python_alone[change.name]
            needless.discard(change.name)
        elif build:
            undecided.append(f"{change.name}: {', '.join(inside)} without {', '.join(build)}")
        fates.append(
            Fate(name=change.name, status=status, files=inside, not_applied=outside, reason=reason)
        )
    if undecided:
        raise PatchFailed(
            f"{len(undecided)} patch(es) change Python and inputs of the build.",
            details=undecided,
            cause="in an overlay the binaries stay the release's own, and the Python may need what "
            "was not compiled",
            remedy="Write into stack.toml why the Python is right alone (overlay.python-alone), or "
            "that the patch is left out whole (overlay.left-out).",
        )
    if needless:
        raise PinsFault(
            f"overlay.python-alone names {', '.join(sorted(needless))}.",
            cause="no patch of that name changes both Python and inputs of the build",
            remedy="Remove the line from stack.toml.",
        )
    return fates


def _not_in_wheel(path: str, wheel: Collection[str], added: Collection[str]) -> str:
    """Why a file has no place in the wheel; '' if it has one."""
    if path in REQUIREMENT_FILES or path in wheel:
        return ""
    if path.startswith(PACKAGE):
        return "" if path.endswith(".py") and path in added else _DATA
    if path.startswith(_NEVER_IN_A_WHEEL) or path.endswith(".md"):
        return _ELSEWHERE
    return _BUILD
