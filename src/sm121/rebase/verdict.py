"""The verdict on one patch: git's merge decides, the hunks explain it.

===================  ==============================================================
clean                every hunk applies where the patch says
clean with offset    every hunk applies, some on other lines, in a renamed file, or
                     beside lines that upstream changed
upstreamed           every hunk's place has, line for line, what the patch makes of
                     it, and git's merge changes nothing
upstreamed in part   some hunks are upstream's, the others apply
superseded           upstream changed the same lines another way: none of the lines
                     that the hunk replaces (or, if it only adds, none of the lines
                     around it) is in upstream's version of the place, nor do they
                     stand together anywhere else in the file
superseded in part   such hunks beside others that apply or are upstream's
conflict             at least one hunk meets a change of upstream's while lines
                     that it acts on are still there, or were moved
===================  ==============================================================

An empty merge is never taken as success: unless each hunk is proven to be upstream's, the
verdict is conflict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sm121.gitseries import Change, Entry, Merged, SeriesRepository
from sm121.rebase.hunks import Edit, Hunk, edits_of, judge, lines_of, moved_line
from sm121.rebase.report import HunkRow, Verdict

_ABSENT = "000000"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The verdict on one patch, its hunks and the merge that it was read from."""

    verdict: Verdict
    hunks: tuple[HunkRow, ...]
    merged: Merged
    why: str = ""


@dataclass(kw_only=True, slots=True)
class Judge:
    """Judges patches against one new upstream."""

    repository: SeriesRepository
    base: str
    onto: str
    history: bool
    _renames: dict[str, str] | None = None

    def patch(self, before: str, after: str, now: str) -> Judged:
        """A patch that makes the tree `after` of `before`, on the tree `now`."""
        merged = self.repository.merge(before, now, after)
        rows: list[HunkRow] = []
        changes = self.repository.changes(before, after)
        # Asked for at once: one git command instead of one for each.
        self.repository.entries(now, {self.renames.get(c.path, c.path) for c in changes})
        for change in changes:
            rows += self.file(change, now, merged)
        return _sum_up(rows, merged, nothing_left=merged.tree == now)

    def file(self, change: Change, now: str, merged: Merged) -> list[HunkRow]:
        """Every hunk of one file; one row for what has no lines (modes, links, binary files)."""
        path = self.renames.get(change.path, change.path)
        there = self.repository.entry(now, path)
        if there is None and path != change.path:
            path, there = change.path, self.repository.entry(now, change.path)
        conflicted = bool({change.path, path} & set(merged.paths))
        rows = self._lines(change, path, there, conflicted=conflicted) if there else []
        only_mode = change.old.blob == change.new.blob
        if there and _ABSENT not in (change.old.mode, change.new.mode, there.mode):
            rows += _mode(change, path, there)
        if not rows or not (only_mode or rows[0].line):
            rows.append(self._whole(change, path, there, merged, conflicted=conflicted))
        elif conflicted and all(row.state in ("applies", "upstreamed", "in part") for row in rows):
            rows.append(self._whole(change, path, there, merged, conflicted=True))
        return rows

    @property
    def renames(self) -> Mapping[str, str]:
        if self._renames is None:
            self._renames = self.repository.renames(self.base, self.onto)
        return self._renames

    def _lines(self, change: Change, path: str, there: Entry, *, conflicted: bool) -> list[HunkRow]:
        if _ABSENT in (change.old.mode, change.new.mode):
            return []
        if not all(e.mode.startswith("100") for e in (change.old, change.new, there)):
            return []
        ours = self.edits(change.old.blob, change.new.blob)
        theirs = self.edits(change.old.blob, there.blob)
        if not ours or (not theirs and change.old.blob != there.blob):
            return []
        before, patched, now = (
            lines_of(self.repository.blob(e.blob)) for e in (change.old, change.new, there)
        )
        hunks = judge(before, patched, now, ours, theirs)
        return [self._row(change.path, path, there, hunk, conflicted) for hunk in hunks]

    def _row(self, old: str, path: str, there: Entry, hunk: Hunk, conflicted: bool) -> HunkRow:
        whole, state, text, recent = hunk.whole, hunk.state, "", list[str]()
        placed = state in ("conflict", "superseded") and not conflicted
        if placed:
            # The lines meet, and yet git's merge, which splits finer, placed them.
            state, text = "applies", "placed by git's merge"
        elif state in ("conflict", "superseded"):
            recent = self._recent(path, there, whole.first, whole.last)
            if whole.there:
                text = f"upstream has what it adds at line {whole.there}, comments aside"
        shown = state != "applies"
        return HunkRow(
            file=_shown(old), file_now=_shown(path), line=hunk.line, line_now=whole.first + 1, state=state,
            offset=hunk.offset, beside=hunk.beside or placed, text=_shown(text), recent=tuple(recent),
            before=_texts(whole.before) if shown else (), moved_to=whole.moved,
            upstream=_texts(whole.upstream) if shown else (),
            ours=_texts(whole.ours) if shown else (),
        )  # fmt: skip

    def _whole(
        self, change: Change, path: str, there: Entry | None, merged: Merged, *, conflicted: bool
    ) -> HunkRow:
        """A change that has no lines: is it upstream's, does it apply, or neither?"""
        told = next((m for m in merged.messages if path in m or change.path in m), "")
        state = "conflict" if conflicted else "applies"
        text = told or _what(change)
        if _same(change.new, there):
            state, text = "upstreamed", f"upstream has it: {_what(change)}"
        elif conflicted and there is None and change.old.mode != _ABSENT:
            state, text = "superseded", f"upstream removed {change.path}"
        recent = self._recent(path, there, 0, 0) if state in ("conflict", "superseded") else []
        return HunkRow(
            file=_shown(change.path), file_now=_shown(path) if there else "", line=0, line_now=0, state=state,  # type: ignore[arg-type]
            beside=state == "applies" and path != change.path, text=_shown(text), recent=tuple(recent),
        )  # fmt: skip

    def edits(self, old: str, new: str) -> list[Edit]:
        """The edits between two blobs, [] if they are equal or binary."""
        return [] if old == new else edits_of(self.repository.blob_diff(old, new))

    def _recent(self, path: str, there: Entry | None, first: int, last: int) -> list[str]:
        """Upstream's newest commits to these lines of `now`, which has patches of ours too."""
        if not self.history:
            return []
        pristine = self.repository.entry(self.onto, path)
        if there is None or pristine is None or first == last == 0:
            return self.repository.recent(self.onto, path, 0, 0)
        back = self.edits(there.blob, pristine.blob)
        low, high = moved_line(back, first), moved_line(back, max(last - 1, first))
        return self.repository.recent(self.onto, path, low + 1, max(high, low) + 1)


def _sum_up(rows: Sequence[HunkRow], merged: Merged, *, nothing_left: bool) -> Judged:
    states = {row.state for row in rows}
    if merged.clean and nothing_left:
        if states == {"upstreamed"}:
            places = ", ".join(f"{r.file_now or r.file}:{r.line_now}" for r in rows[:4])
            more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
            return Judged(
                verdict="upstreamed", hunks=tuple(rows), merged=merged,
                why=f"all {len(rows)} hunk(s) are there, line for line: {places}{more}",
            )  # fmt: skip
        return Judged(
            verdict="conflict", hunks=tuple(rows), merged=merged,
            why="git's merge leaves nothing of it, and yet not every hunk is upstream's",
        )  # fmt: skip
    verdict: Verdict
    if not merged.clean:
        # git's word counts, also where no hunk of ours shows it (a new file that both add).
        if "conflict" in states or "superseded" not in states:
            verdict = "conflict"
        else:
            verdict = "superseded" if states == {"superseded"} else "superseded in part"
    elif states & {"upstreamed", "in part"}:
        verdict = "upstreamed in part"
    elif any(row.offset or row.beside or row.file_now not in (row.file, "") for row in rows):
        verdict = "clean with offset"
    else:
        verdict = "clean"
    return Judged(verdict=verdict, hunks=tuple(rows), merged=merged)


def _same(wanted: Entry, there: Entry | None) -> bool:
    if there is None or wanted.mode == _ABSENT:
        return there is None and wanted.mode == _ABSENT
    return (there.mode, there.blob) == (wanted.mode, wanted.blob)


def _mode(change: Change, path: str, there: Entry) -> list[HunkRow]:
    """A row for a changed mode (executable or not) of a file that stays a file."""
    modes = (change.old.mode, change.new.mode)
    if modes[0] == modes[1] or not all(m.startswith("100") for m in (*modes, there.mode)):
        return []
    return [
        HunkRow(
            file=_shown(change.path), file_now=_shown(path), line=0, line_now=0,
            state="upstreamed" if there.mode == modes[1] else "applies",
            text=_shown(f"mode of {path} {modes[0]} → {modes[1]}"),
        )
    ]  # fmt: skip


def _what(change: Change) -> str:
    if change.old.mode == _ABSENT:
        return f"new file {change.path}"
    if change.new.mode == _ABSENT:
        return f"{change.path} removed"
    return f"{change.path} as a whole (binary, or a link)"


def _shown(text: str) -> str:
    """Names that are not UTF-8 as text that JSON can carry."""
    return text.encode(errors="backslashreplace").decode()


def _texts(lines: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(line.decode(errors="replace").rstrip("\r\n") for line in lines)
