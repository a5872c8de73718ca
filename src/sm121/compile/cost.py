"""At the end of a build: its timeline, its page, and what it cost in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sm121.compile.launching import cost_folder
from sm121.compile.page import cache_sentence, to_html
from sm121.compile.records import read_records, read_run
from sm121.compile.timeline import read_links, summarise, trace
from sm121.context import Context
from sm121.files import write_atomic
from sm121.ui import human_bytes, human_seconds


def cost_page(context: Context) -> Path:
    name = f"{context.key}-{context.options.profile}.cost.html"
    return context.layout.build / "reports" / name


def show_cost(context: Context, ninja_tree: Path, *, built: int = 0) -> Mapping[str, float | int]:
    """Write timeline and page of the run that has just ended, well or not; its figures, for the
    manifest.

    A run that compiled nothing leaves the timeline of the last one that did. ninja_tree:
    setup.py's --build-base. built: objects that ninja said it made, if it came to its end.
    """
    place = cost_folder(context)
    records = read_records(place.records, run=read_run(place))
    if not records:
        lost = ", and the cost of none recorded" if built else ""
        context.ui.say(f"       objects     {built} compiled{lost}")
        return {}
    cost = summarise(records)
    links = [
        link
        for log in ninja_tree.glob("temp.*/.ninja_log")
        for link in read_links(log, since=min(r.start for r in records))
    ]
    write_atomic(place.timeline, trace(records, links))
    title = f"{context.stack_name} {context.options.profile} for {context.options.target}"
    write_atomic(cost_page(context), to_html(records, title=title))
    cache = cache_sentence(cost)
    if not cost.asked:
        cache += (
            ": another folder compiles everything again (install ccache, or unset CCACHE_DISABLE)"
        )
    context.ui.say(
        f"       objects     {sum(r.exit == 0 for r in records)} compiled in {human_seconds(cost.wall)} "
        f"({human_seconds(cost.cpu)} of CPU, largest {human_bytes(cost.peak)}); {cache}"
    )
    context.ui.say(f"       timeline    {place.timeline} (Perfetto), {cost_page(context)}")
    return {
        "hits": cost.hits,
        "cpu_seconds": round(cost.cpu, 1),
        "wall_seconds": round(cost.wall, 1),
        "peak_bytes": cost.peak,
    }
