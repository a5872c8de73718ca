"""The report as lines for a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from sm121.jit.report import FAULTS, Report, Row, Variant
from sm121.ui import human_seconds

_MESSAGE_LINES = 6
_PARTLY = (
    "shared (n of m): the most that the n of a module's m kernels take which the calls made here launch "
    "(jit.toml's sizes); others may be launched at other sizes, and were held against the limit with "
    "their static part only"
)
_UNKNOWN = "shared + ?: no launch was seen, so the static part alone was held against the limit"


def render_table(report: Report, *, whole: bool = False) -> Iterator[str]:
    """Rows by family; helpers and what is left out only if `whole`, else counted."""
    shown = [row for row in report.rows if whole or row.verdict not in ("helper", "left-out")]
    header = ("family", "kernel", "verdict", "target", "regs", "shared", "spills", "n", "time")
    body = [_cells(row) for row in shown]
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
    for line in [header, *body]:
        yield "  " + "  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip()
    for text in shared_notes(shown):
        yield f"  {text}"
    for row in shown:
        if row.verdict in FAULTS:
            yield from _explained(row)
    for note in report.notes:
        yield f"  {note.kind}: {note.text}"
    counts = Counter(row.verdict for row in report.rows)
    yield f"  {', '.join(f'{n} {verdict}' for verdict, n in counts.most_common())}"
    for one in report.first_start:
        yield (
            f"  first start: {one.family}: {one.compilations} compilations of {one.kernels} "
            f"kernels, {human_seconds(one.seconds)} here, one after another; "
            + (
                "shipped in a wheelhouse with --jit-cache"
                if one.shipped
                else f"kept by the node in {one.cache}"
            )
        )


def shared_text(made: Sequence[Variant]) -> str:
    """Most shared memory of a block: '512'; '512 (2 of 9)' of those launched here; '512 + ?' where
    no launch was seen and only the static part is known."""
    known = [v for v in made if v.shared_dynamic >= 0]
    most = max(v.shared_static + max(v.shared_dynamic, 0) for v in known or made)
    if len(known) == len(made):
        return f"{most:,}"
    return f"{most:,} ({len(known)} of {len(made)})" if known else f"{most:,} + ?"


def shared_notes(rows: Sequence[Row]) -> list[str]:
    """What shared_text leaves open in these rows, and why."""
    texts = [shared_text(row.variants) for row in rows if row.variants]
    notes = [_PARTLY] if any(text.endswith(")") for text in texts) else []
    return notes + ([_UNKNOWN] if any(text.endswith("?") for text in texts) else [])


def short_name(kernel: str) -> str:
    """'…cache_utils:_kernel' of a dotted name."""
    module, _, name = kernel.partition(":")
    return f"{module.rpartition('.')[2]}:{name}"


def _cells(row: Row) -> Sequence[str]:
    made = row.variants
    if not made:
        return (row.family, short_name(row.kernel), row.verdict, "", "", "", "", "", "")
    spills = max(v.spills for v in made) if all(v.spills >= 0 for v in made) else -1
    return (
        row.family, short_name(row.kernel), row.verdict,
        ", ".join(sorted({v.target for v in made})),
        str(max(v.registers for v in made)),
        shared_text(made),
        str(spills) if spills >= 0 else "?", str(len(made)), human_seconds(row.seconds),
    )  # fmt: skip


def _explained(row: Row) -> Iterator[str]:
    yield f"  {row.verdict}: {row.kernel} ({row.where})"
    if row.why:
        yield f"      {row.why}"
    if row.via:
        yield f"      reached by {' < '.join(row.via[:3])}"
    if row.reading:
        yield f"      reading: {row.reading.kind}: {row.reading.says}"
        yield f"      next:    {row.reading.next}"
    for line in telling(row.message)[:_MESSAGE_LINES]:
        yield f"      | {line[:200]}"


def telling(message: str) -> list[str]:
    """The lines that name an error; of a message that has none, all. (TileLang's begins with the
    whole source.)"""
    lines = [line for line in message.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"(?i)\b(error|fatal)\b|No such file", line)]
    return named or lines
