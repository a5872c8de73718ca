"""One file in three versions: which hunks of ours meet a change of upstream's, and how.

`before` is the file as our patch found it, `patched` what the patch made of it, `now` what the
new upstream has. All positions are 0-based lines, ranges half-open, taken from git's own diffs
of `before` against the other two (the algorithm that git's merge uses). Two changes meet if
they overlap or touch, which is when git's merge calls a conflict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

State = Literal["applies", "upstreamed", "superseded", "conflict"]
_HEAD = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
_CONTEXT = 3
# Lines that say nothing about what the code does there.
_TRIVIAL = re.compile(rb"^[\s()\[\]{},:;]*$|^\s*(else|try|return|pass|end(if|foreach)?)\b[\s:()]*$")
_COMMENT = re.compile(rb"^\s*(#(\s|$)|//)")


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines [a0, a1) became lines [b0, b1)."""

    a0: int
    a1: int
    b0: int
    b1: int

    @property
    def growth(self) -> int:
        return (self.b1 - self.b0) - (self.a1 - self.a0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """A run of our edits and what upstream has in their place.

    lines [first, last) of `now`, [low, high) of `before`; the three texts are of the whole place
    where they meet. Lines of `now` (1-based), 0 if none: `moved` has our replaced lines
    elsewhere, `there` has what we add, comments aside.
    """

    state: State
    offset: int
    first: int
    last: int
    low: int
    high: int
    before: tuple[bytes, ...] = ()
    upstream: tuple[bytes, ...] = ()
    ours: tuple[bytes, ...] = ()
    moved: int = 0
    there: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """A hunk as the patch file has it: edits no more than twice the context apart.

    line: 1-based, of `before`. whole: all that does not simply apply, as one place, since a
    person who saw only the worst of two places would redo only that. beside: upstream changed
    lines of its context.
    """

    line: int
    whole: Meeting
    meetings: tuple[Meeting, ...] = field(default_factory=tuple)
    beside: bool = False

    @property
    def state(self) -> State | Literal["in part"]:
        states = {m.state for m in self.meetings}
        for worst in ("conflict", "superseded"):
            if worst in states:
                return worst
        return "in part" if len(states) > 1 else next(iter(states), "applies")

    @property
    def offset(self) -> int:
        offsets = [m.offset for m in self.meetings if m.state == "applies"]
        return max(offsets, key=abs, default=0)


def lines_of(content: bytes) -> list[bytes]:
    """Lines as git counts them: only a line feed ends one."""
    *whole, rest = content.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def edits_of(diff: bytes) -> list[Edit]:
    """The edits of a diff without context lines."""
    found = []
    for match in _HEAD.finditer(diff):
        start, count, new, grown = (int(g) if g is not None else 1 for g in match.groups())
        # A range of no lines names the line before it.
        a0, b0 = start - (count > 0), new - (grown > 0)
        found.append(Edit(a0, a0 + count, b0, b0 + grown))
    return found


def moved_line(edits: Sequence[Edit], line: int) -> int:
    """Where a line of the old side is in the new one; inside an edit, where the edit starts."""
    shift = 0
    for edit in edits:
        if line < edit.a1:
            return edit.b0 if line >= edit.a0 else line + shift
        shift += edit.growth
    return line + shift


def judge(
    before: Sequence[bytes], patched: Sequence[bytes], now: Sequence[bytes],
    ours: Sequence[Edit], theirs: Sequence[Edit],
) -> list[Hunk]:  # fmt: skip
    """Every hunk of ours. ours, theirs: the edits from `before` to `patched` and to `now`."""
    hunks = []
    for run in _runs(ours, gap=2 * _CONTEXT):
        meetings = []
        rest = list(run)
        while rest:
            low, high, taken = _meet(rest[0], ours, theirs)
            meetings.append(_meeting(before, patched, now, ours, theirs, low, high, rest[0], taken))
            rest = [edit for edit in rest if edit.a0 > high or edit.a0 < low]
        near = (max(run[0].a0 - _CONTEXT, 0), run[-1].a1 + _CONTEXT)
        # Also an insertion, which has no lines of its own: strictly inside.
        beside = any(t.a0 < near[1] and t.a1 > near[0] for t in theirs)
        whole = _whole(before, patched, now, ours, theirs, meetings)
        hunks.append(Hunk(line=run[0].a0 + 1, whole=whole, meetings=tuple(meetings), beside=beside))
    return hunks


def _runs(edits: Sequence[Edit], *, gap: int) -> list[list[Edit]]:
    runs: list[list[Edit]] = []
    for edit in edits:
        if runs and edit.a0 - runs[-1][-1].a1 <= gap:
            runs[-1].append(edit)
        else:
            runs.append([edit])
    return runs


def _meet(start: Edit, ours: Sequence[Edit], theirs: Sequence[Edit]) -> tuple[int, int, list[Edit]]:
    """The place that an edit shares with everything that touches it, and upstream's edits there."""
    low, high = start.a0, start.a1
    while True:
        taken = [e for e in theirs if e.a0 <= high and e.a1 >= low]
        both = [*taken, *(e for e in ours if taken and e.a0 <= high and e.a1 >= low)]
        wider = (min([low, *(e.a0 for e in both)]), max([high, *(e.a1 for e in both)]))
        if wider == (low, high):
            return low, high, taken
        low, high = wider


def _range(edits: Sequence[Edit], low: int, high: int) -> tuple[int, int]:
    """Lines [low, high) of the old side on the new one, edits at both ends included."""
    before = sum(e.growth for e in edits if e.a1 < low)
    inside = sum(e.growth for e in edits if e.a0 >= low and e.a1 <= high)
    return low + before, high + before + inside


def _whole(
    before: Sequence[bytes], patched: Sequence[bytes], now: Sequence[bytes],
    ours: Sequence[Edit], theirs: Sequence[Edit], meetings: Sequence[Meeting],
) -> Meeting:  # fmt: skip
    """The meetings that don't apply, and what is between them, as one; or the first that does."""
    met = [m for m in meetings if m.state != "applies"]
    there = min(m.there for m in meetings)  # all of the hunk, or it would say too much
    if len(met) < 2:
        return replace(next(iter(met), meetings[0]), there=there)
    low, high = min(m.low for m in met), max(m.high for m in met)
    first, last = _range(theirs, low, high)
    own_first, own_last = _range(ours, low, high)
    return Meeting(
        state=met[0].state, offset=0, first=first, last=last, low=low, high=high,
        before=tuple(before[low:high]), upstream=tuple(now[first:last]),
        ours=tuple(patched[own_first:own_last]), moved=max(m.moved for m in met),
        there=there,
    )  # fmt: skip


def _meeting(
    before: Sequence[bytes], patched: Sequence[bytes], now: Sequence[bytes],
    ours: Sequence[Edit], theirs: Sequence[Edit],
    low: int, high: int, start: Edit, taken: Sequence[Edit],
) -> Meeting:  # fmt: skip
    first, last = _range(theirs, low, high)
    if not taken:
        return Meeting(
            state="applies", offset=first - low, first=first, last=last, low=low, high=high
        )
    own_first, own_last = _range(ours, low, high)
    mine, upstream = tuple(patched[own_first:own_last]), tuple(now[first:last])
    old = tuple(before[low:high])
    own = [e for e in ours if e.a0 >= low and e.a1 <= high]
    if mine == upstream:
        return Meeting(
            state="upstreamed", offset=0, first=first, last=last, low=low, high=high, before=old,
            upstream=upstream, ours=mine,
        )  # fmt: skip
    replaced = _solid([line for e in own for line in before[e.a0 : e.a1]])
    around = [n for e in own for n in (e.a0 - 1, e.a1) if 0 <= n < len(before)]
    acted_on = replaced or _solid([before[n] for n in around])
    # What only adds stands between two lines; one that upstream did not touch is still there.
    kept = not replaced and any(not low <= n < high for n in around)
    gone = bool(acted_on) and not kept and not (set(acted_on) & set(_solid(upstream)))
    if _squeezed(acted_on) in _squeezed(upstream):
        gone = False  # only set in other lines, as formatters do
    if not replaced and any(u.startswith(line) for u in _solid(upstream) for line in acted_on):
        gone = False  # the line beside which we add was only made longer, as imports are
    moved = _find(now, replaced or _anchors(before, own)) if gone else 0
    added = _solid([x for e in own for x in patched[e.b0 : e.b1] if not _COMMENT.match(x)])
    there = 0 if _find(before, added) else _find(now, added)
    return Meeting(
        state="superseded" if gone and not moved else "conflict",
        offset=0, first=first, last=last, low=low, high=high, before=old, upstream=upstream,
        ours=mine, moved=moved, there=there,
    )  # fmt: skip


def _anchors(before: Sequence[bytes], own: Sequence[Edit]) -> list[bytes]:
    """For each edit the nearest lines above and below it that say something.

    One line alone, where the other neighbour is a bracket, would be found in any block that is
    like it.
    """
    found = []
    for e in own:
        above = _solid(before[max(e.a0 - _CONTEXT, 0) : e.a0])
        below = _solid(before[e.a1 : e.a1 + _CONTEXT])
        found += above[-1:] + below[:1]
    return found


def _solid(lines: Sequence[bytes]) -> list[bytes]:
    return [line.strip() for line in lines if not _TRIVIAL.match(line)]


def _squeezed(lines: Sequence[bytes]) -> bytes:
    return b"".join(b"".join(lines).split())


def _find(now: Sequence[bytes], wanted: Sequence[bytes]) -> int:
    """1-based line of `now` where all wanted lines follow one another, 0 if nowhere."""
    if len(wanted) < 2 and sum(map(len, wanted)) < 20:
        return 0
    solid = [(n, line.strip()) for n, line in enumerate(now, 1) if not _TRIVIAL.match(line)]
    texts = [text for _, text in solid]
    for start in range(len(texts) - len(wanted) + 1):
        if texts[start : start + len(wanted)] == list(wanted):
            return solid[start][0]
    return 0
