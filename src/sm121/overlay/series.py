"""The series as an overlay has it: which commit its Python is taken from, and each patch's fate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sm121.context import Context, Results
from sm121.errors import PinsFault
from sm121.overlay.plan import Change, Fate, plan
from sm121.overlay.release import PACKAGE, Release
from sm121.patches.series import load_series
from sm121.patches.stage import series_folder
from sm121.pins.model import OverlayPin

if TYPE_CHECKING:
    from sm121.gitrepo import Repository


def python_series(
    context: Context, results: Results, repository: Repository, pin: OverlayPin
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Commit and patches to take Python from: the patch stage's, or a series without those that
    the pins leave out whole."""
    if not pin.left_out:
        return str(results["patch"]["commit"]), results["patch"]["patches"]
    from sm121.patches.apply import apply_series

    series = load_series(series_folder(context))
    if unknown := sorted(set(pin.left_out) - {patch.name for patch in series}):
        raise PinsFault(
            f"overlay.left-out names {', '.join(unknown)}.", cause="the series has no such patch",
            remedy="Correct the name in stack.toml, or remove the line.",
        )  # fmt: skip
    kept = [patch for patch in series if patch.name not in pin.left_out]
    applied = apply_series(repository, str(results["source"]["commit"]), kept)
    repository.point(f"refs/sm121/overlay/{context.stack_name}", applied.commit)
    return applied.commit, [asdict(patch) for patch in applied.patches]


def fates_of(
    repository: Repository, base: str, patches: Sequence[Mapping[str, Any]], release: Release,
    pin: OverlayPin,
) -> list[Fate]:  # fmt: skip
    """What becomes of each patch; those upstream has and those left out last. Raises as `plan`."""
    parent = base
    changes: list[Change] = []
    upstreamed: list[Fate] = []
    added: set[str] = set()
    for patch in patches:
        if patch["status"] == "upstreamed":
            upstreamed.append(Fate(name=patch["name"], status="upstreamed", not_applied={}))
            continue
        files = tuple(repository.changed_paths(parent, patch["commit"]))
        before = repository.blobs(parent, PACKAGE)
        added |= {path for path in files if path not in before}
        changes.append(Change(name=patch["name"], files=files))
        parent = patch["commit"]
    left_out = [
        Fate(name=name, status="left out", not_applied={}, reason=why)
        for name, why in pin.left_out.items()
    ]
    return [*plan(changes, wheel=release.sizes, added=added, pin=pin), *upstreamed, *left_out]
