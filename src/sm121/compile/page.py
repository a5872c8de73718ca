"""What a build cost, as an HTML page with a picture of it (SVG, no script)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from sm121.abi.page import html_page
from sm121.compile.records import Record
from sm121.compile.timeline import BuildCost, lanes, summarise
from sm121.ui import human_bytes, human_seconds

_WIDTH = 1040
_LANE = 22
# Apart for people who see no red or no green (Okabe and Ito's palette).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")


def to_html(records: Sequence[Record], *, title: str) -> str:
    """The page of one run's records."""
    cost = summarise(records)
    names = [component.name for component in cost.components]
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    body = (
        f"{_head(cost, title)}<section><h2>When</h2>{_picture(records, colours)}</section>"
        f"{_components(cost, colours)}{_longest(cost)}"
    )
    return html_page(f"build: {title}", body)


def cache_sentence(cost: BuildCost) -> str:
    """'97 of 103 objects out of ccache (94.2 %)', or that none was asked."""
    if not cost.asked:
        return "no compiler cache"
    return f"{cost.hits} of {cost.asked} objects out of ccache ({cost.hits / cost.asked:.1%})"


def _head(cost: BuildCost, title: str) -> str:
    figures = [
        ("objects", f"{cost.objects}"), ("wall time", human_seconds(cost.wall)),
        ("CPU time", human_seconds(cost.cpu)), ("cache", cache_sentence(cost)),
        ("largest process", human_bytes(cost.peak)),
        ("waited for memory", human_seconds(cost.waited)),
    ]  # fmt: skip
    cells = "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in figures)
    return f"<header><h1>Where the minutes went</h1><p>{escape(title)}</p><dl>{cells}</dl></header>"


def _picture(records: Sequence[Record], colours: Mapping[str, str]) -> str:
    """One row per compiler at work, one box per object; answers of the cache are pale."""
    placed = lanes(records)
    origin = min((r.start for r in records), default=0.0)
    span = max((r.end for r in records), default=1.0) - origin or 1.0
    rows = 1 + max((lane for lane, _ in placed), default=0)
    boxes = []
    for lane, record in placed:
        width = max((record.end - record.start) / span * _WIDTH, 0.5)
        told = (
            f"{record.object}: {human_seconds(record.cpu)} of CPU, "
            f"{human_bytes(record.rss)}, cache {record.cache}"
        )
        opacity = 0.3 if record.cache == "hit" else 1
        boxes.append(
            f'<rect x="{(record.start - origin) / span * _WIDTH:.1f}" y="{lane * _LANE}" '
            f'width="{width:.1f}" height="{_LANE - 3}" fill="{colours[record.component]}" '
            f'opacity="{opacity}" stroke="#fff" stroke-width="0.4">'
            f"<title>{escape(told)}</title></rect>"
        )
    height = rows * _LANE
    ticks = "".join(
        f'<text x="{x}" y="{height + 14}" text-anchor="{anchor}" font-size="12" fill="#5c6570">'
        f"{human_seconds(span * part)}</text>"
        for part, x, anchor in ((0, 0, "start"), (0.5, _WIDTH / 2, "middle"), (1, _WIDTH, "end"))
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height + 20}" width="100%" role="img" '
        f'aria-label="{len(records)} objects on {rows} cores">{"".join(boxes)}{ticks}</svg>'
    )


def _components(cost: BuildCost, colours: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><td><span class="key" style="background:{colours[c.name]}"></span>'
        f"<code>{escape(c.name)}</code></td><td class=num>{c.objects}</td><td class=num>{c.hits}</td>"
        f"<td class=num>{human_seconds(c.cpu)}</td>"
        f"<td class=num>{c.cpu / cost.cpu if cost.cpu else 0:.0%}</td></tr>"
        for c in cost.components
    )
    return (
        "<section><h2>Components</h2><table><thead><tr><th>component</th><th class=num>objects</th>"
        "<th class=num>out of the cache</th><th class=num>CPU time</th><th class=num>share</th></tr>"
        f"</thead><tbody>{rows}</tbody></table></section>"
    )


def _longest(cost: BuildCost) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(r.object.rpartition('.dir/')[2])}</code></td>"
        f"<td>{escape(r.component)}</td><td class=num>{human_seconds(r.cpu)}</td>"
        f"<td class=num>{human_bytes(r.rss)}</td><td>{escape(r.cache)}</td></tr>"
        for r in cost.longest
    )
    return (
        "<section><h2>Longest objects</h2><table><thead><tr><th>object</th><th>component</th>"
        "<th class=num>CPU time</th><th class=num>memory</th><th>cache</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></section>"
    )
