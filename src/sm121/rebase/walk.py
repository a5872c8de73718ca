"""A series onto a new upstream, patch by patch; a bad patch does not hide those after it.

Two trees are carried along: `now`, the new upstream with what was carried so far, and `before`,
the pinned upstream with the same patches. A patch that can't be carried is left out of both, so
what a later one meets is upstream's doing. One that does not even fit `before` without it
depends on it, and that is said instead of a verdict of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm121.errors import PatchFailed
from sm121.gitrepo import Author
from sm121.gitseries import Merged, SeriesRepository
from sm121.patches.apply import apply_series
from sm121.patches.series import Patch
from sm121.rebase.memory import Memory
from sm121.rebase.report import PatchRow
from sm121.rebase.verdict import Judge, Judged


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """A patch of the old series as a commit on the pinned base. before, after: its trees."""

    name: str
    path: Path
    subject: str
    message: str
    author: Author
    commit: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One patch that was looked at. now, before: both trees after it, if it can be carried."""

    patch: Carried
    row: PatchRow
    merged: Merged
    now: str
    before: str


def prepare(repository: SeriesRepository, base: str, series: Sequence[Patch]) -> list[Carried]:
    """The series as commits on its own base. Raises PatchFailed if it does not apply there."""
    applied = apply_series(repository, base, series)
    found = []
    tree = repository.tree_of(base)
    for patch, result in zip(series, applied.patches, strict=True):
        if result.status != "applied":
            raise PatchFailed(
                f"{patch.path.name}: the pinned release has it already.",
                remedy="Delete it from the series, then rebase.",
            )
        author, subject, body = repository.mailinfo(patch.path)
        after = repository.tree_of(result.commit)
        found.append(
            Carried(
                name=patch.name, path=patch.path, subject=subject, author=author,
                message=f"{subject}\n\n{body}\n", commit=result.commit, before=tree, after=after,
            )
        )  # fmt: skip
        tree = after
    return found


@dataclass(kw_only=True, slots=True)
class Walk:
    """Where a walk stands: both trees, and which patches are left out of them."""

    judge: Judge
    memory: Memory
    now: str
    before: str
    left_out: list[Carried] = field(default_factory=list)

    def look(self, patch: Carried) -> Step:
        """What becomes of the next patch; changes nothing."""
        repository = self.judge.repository
        if self.before == patch.before:
            after, stuck = patch.after, tuple[str, ...]()
        else:
            own = repository.merge(patch.before, self.before, patch.after)
            after, stuck = own.tree, own.paths
        if stuck:
            return self._dependent(patch, stuck)
        judged = self.judge.patch(self.before, after, self.now)
        return self._step(patch, judged, after)

    def take(self, step: Step) -> None:
        """Go on with a step: with the patch in both trees if it is good, else without it."""
        if step.row.good:
            self.now, self.before = step.now, step.before
        else:
            self.left_out.append(step.patch)

    def rest(self, patches: Sequence[Carried]) -> list[PatchRow]:
        """The verdicts on all further patches, each on what those before it leave."""
        rows = []
        for patch in patches:
            step = self.look(patch)
            self.take(step)
            rows.append(step.row)
        return rows

    def _dependent(self, patch: Carried, stuck: Sequence[str]) -> Step:
        """A patch that does not fit even the pinned base without those that were left out."""
        repository = self.judge.repository
        judged = self.judge.patch(patch.before, patch.after, self.now)
        touching = [
            other.name for other in self.left_out
            if {c.path for c in repository.changes(other.before, other.after)} & set(stuck)
        ]  # fmt: skip
        names = tuple(touching or [other.name for other in self.left_out])
        step = self._step(patch, judged, patch.after)
        if set(judged.merged.paths) - set(stuck):
            return replace(step, row=replace(step.row, depends_on=names))
        # Also if git's merge happens to place it: what it builds on is not there.
        why = f"needs {', '.join(names)}, left out here"
        row = replace(step.row, verdict="depends", depends_on=names, remembered=False, why=why)
        return replace(step, row=row)

    def _step(self, patch: Carried, judged: Judged, after: str) -> Step:
        tree, remembered = judged.merged.tree, False
        if not judged.merged.clean:
            known, still_open = self.memory.recall(judged.merged)
            if not still_open:
                tree = self.judge.repository.with_files(tree, known)
            remembered = not still_open and tree != self.now
        row = PatchRow(
            name=patch.name, subject=patch.subject, verdict=judged.verdict, hunks=judged.hunks,
            offset=max((h.offset for h in judged.hunks), key=abs, default=0),
            remembered=remembered, why=judged.why,
        )  # fmt: skip
        return Step(patch=patch, row=row, merged=judged.merged, now=tree, before=after)
