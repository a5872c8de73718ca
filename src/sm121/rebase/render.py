"""A rebase's report for a person: tables, and upstream's version beside ours."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from sm121.rebase.report import HunkRow, OntoRow, PatchRow
from sm121.ui import Ui

_NARROWEST, _WIDEST = 40, 90
_SHOWN_LINES = 24
_SHORT = {
    "clean": "clean", "clean with offset": "offset", "upstreamed": "upstreamed",
    "upstreamed in part": "upstreamed*", "superseded": "superseded",
    "superseded in part": "superseded*", "conflict": "conflict", "depends": "depends",
}  # fmt: skip


def matrix(ui: Ui, onto: Sequence[OntoRow]) -> None:
    """Patch × release; below, what is not clear from one word."""
    names = [patch.name for patch in onto[0].patches]
    rows = [[name, *(_cell(row.patches[n]) for row in onto)] for n, name in enumerate(names)]
    ui.table(("patch", *(row.label for row in onto)), rows)
    cells = {cell for _, *cells in rows for cell in cells}
    if any("*" in cell for cell in cells):
        ui.say("  * in part: other hunks of the patch apply, or are upstream's")
    if any("(r)" in cell for cell in cells):
        ui.say("  (r) an earlier resolution is remembered and fits")
    for row in onto:
        for patch in row.patches:
            if patch.depends_on and not patch.good:
                ui.say(f"  {row.label}: {patch.name} needs {', '.join(patch.depends_on)}")


def _cell(patch: PatchRow) -> str:
    return _SHORT[patch.verdict] + (" (r)" if patch.remembered else "")


def patches(ui: Ui, rows: Sequence[PatchRow]) -> None:
    """One line per patch of one release."""
    ui.table(
        ("patch", "verdict", "hunks", "became", ""),
        [(p.name, p.verdict, _hunks(p), p.became or "-", _remark(p)) for p in rows],
    )


def _hunks(patch: PatchRow) -> str:
    states = [hunk.state for hunk in patch.hunks]
    if set(states) <= {"applies"}:
        return str(len(states))
    return ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))


def _remark(patch: PatchRow) -> str:
    told = []
    if patch.verdict == "clean with offset":
        beside = sum(hunk.beside for hunk in patch.hunks)
        moved = {h.file_now for h in patch.hunks if h.file_now not in (h.file, "")}
        told.append(f"up to {abs(patch.offset)} line(s) off" if patch.offset else "")
        told.append(f"{beside} hunk(s) beside changed lines" if beside else "")
        told.append(f"moved to {', '.join(sorted(moved))}" if moved else "")
    if patch.remembered and patch.became != "remembered":
        told.append("a remembered resolution fits")
    if patch.depends_on and patch.verdict != "depends":
        told.append(f"needs {', '.join(patch.depends_on)}")
    return "; ".join(part for part in [*told, patch.why] if part)


def details(ui: Ui, patch: PatchRow) -> None:
    """Every hunk of a patch that is not simply applied, both versions beside each other."""
    notable = [hunk for hunk in patch.hunks if hunk.state != "applies"]
    if not notable:
        return
    ui.say()
    ui.say(f"  {ui.style(patch.name, 'bold')}: {patch.subject}")
    for hunk in notable:
        for line in _hunk(hunk):
            ui.say(f"    {line}")


def _hunk(hunk: HunkRow) -> Iterator[str]:
    where = hunk.file_now or hunk.file
    place = f"{where}:{hunk.line_now}" if hunk.line_now else where
    moved = f"; what it replaces stands at line {hunk.moved_to} now" if hunk.moved_to else ""
    told = f"; {hunk.text}" if hunk.text else ""
    yield (
        f"{hunk.state}: {place} (line {hunk.line} of the patch's file){moved}{told}"
        if hunk.line
        else (f"{hunk.state}: {hunk.text or place}")
    )
    for line in hunk.recent:
        yield f"  upstream's change: {line}"
    if hunk.state == "upstreamed" or not (hunk.upstream or hunk.ours):
        return
    width = _width()
    yield f"  {'upstream':<{width}} | ours"
    pairs = list(zip_longest(hunk.upstream, hunk.ours, fillvalue=""))
    for left, right in pairs[:_SHOWN_LINES]:
        for one, other in zip_longest(_wrap(left, width), _wrap(right, width), fillvalue=""):
            yield f"  {one:<{width}} | {other}".rstrip()
    if len(pairs) > _SHOWN_LINES:
        yield f"  … {len(pairs) - _SHOWN_LINES} more lines (--json has all)"


def _width() -> int:
    """Of one column: half the terminal, or what vLLM's lines need where there is none."""
    columns = shutil.get_terminal_size((2 * _WIDEST + 10, 24)).columns
    return max(_NARROWEST, min(_WIDEST, (columns - 10) // 2))


def _wrap(line: str, width: int) -> list[str]:
    text = line.expandtabs(4)
    return [text[at : at + width] for at in range(0, len(text), width)] or [""]


def drift(ui: Ui, row: OntoRow, pinned: str) -> None:
    """What else the new upstream changes: family, third-party sources, components."""
    changed = [f for f in row.family if f.before != f.now or f.against]
    if changed:
        ui.say()
        ui.say(f"  What vLLM {row.label} asks for:")
        ui.table(
            ("requirement", pinned, row.label, "our pin", "proposed"),
            [(f.name, f.before or "-", f.now or "-", f.pinned or "-", f.proposed or "-") for f in changed],
        )  # fmt: skip
        for member in changed:
            for line in member.against:
                for part in textwrap.wrap(f"rule {line}", 96, subsequent_indent="  "):
                    ui.say(f"  {part}")
    if row.sources:
        ui.say()
        ui.table(
            ("third-party source", "file", "pinned", "asked for"),
            [
                (
                    s.name,
                    s.file,
                    s.pinned or "-",
                    " of ".join(filter(None, (s.wanted or "-", s.repository))),
                )
                for s in row.sources
            ],
        )
    for text, names in (("new", row.components_new), ("gone", row.components_gone)):
        if names:
            ui.say(f"  components {text}: {', '.join(names)}")
