"""A build's records as a timeline: for trace viewers, and summed up for people."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.compile.records import Record

_MICRO = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A library that ninja linked. start, end: seconds since 1970."""

    library: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentCost:
    """Objects of one CMake target, those that the cache answered, and CPU seconds."""

    name: str
    objects: int
    hits: int
    cpu: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildCost:
    """What one build took. wall, cpu, waited (for memory): seconds; peak: bytes of one process."""

    objects: int
    hits: int
    asked: int
    wall: float
    cpu: float
    waited: float
    peak: int
    components: tuple[ComponentCost, ...]
    longest: tuple[Record, ...]


def read_links(ninja_log: Path, *, since: float) -> list[Link]:
    """Libraries linked since a time, out of .ninja_log (versions 5 to 7; ninja's build_log.cc).

    Its times are milliseconds since ninja's start, and its third column is when the command was
    started, or ended (restat rules, ninja before 1.11): the library itself says when it was done.
    """
    try:
        lines = ninja_log.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    links = {}
    for line in lines[1:]:
        parts = line.split("\t")
        if len(parts) == 5 and parts[3].endswith(".so"):
            with contextlib.suppress(FileNotFoundError):
                end = (ninja_log.parent / parts[3]).stat().st_mtime
                start = end - (int(parts[1]) - int(parts[0])) / 1000
                links[parts[3]] = Link(library=parts[3], start=start, end=end)
    return [link for link in links.values() if link.end >= since]


def summarise(records: Sequence[Record]) -> BuildCost:
    """Sum up the records of one run. A component's objects count once each, failures too."""
    grouped: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        grouped[record.component].append(record)
    components = [
        ComponentCost(
            name=name,
            objects=len(group),
            hits=sum(r.cache == "hit" for r in group),
            cpu=sum(r.cpu for r in group),
        )
        for name, group in grouped.items()
    ]
    return BuildCost(
        objects=len(records),
        hits=sum(r.cache == "hit" for r in records),
        asked=sum(r.cache != "off" for r in records),
        wall=max((r.end for r in records), default=0.0)
        - min((r.start - r.waited for r in records), default=0.0),
        cpu=sum(r.cpu for r in records),
        waited=sum(r.waited for r in records),
        peak=max((r.rss for r in records), default=0),
        components=tuple(sorted(components, key=lambda c: -c.cpu)),
        longest=tuple(sorted(records, key=lambda r: -r.cpu)[:20]),
    )


def lanes(records: Sequence[Record]) -> list[tuple[int, Record]]:
    """Each record with a lane in which nothing else runs at that time, by start."""
    free: list[float] = []
    placed = []
    for record in sorted(records, key=lambda r: r.start):
        lane = next((i for i, end in enumerate(free) if end <= record.start), len(free))
        if lane == len(free):
            free.append(0.0)
        free[lane] = record.end
        placed.append((lane, record))
    return placed


def trace(records: Sequence[Record], links: Sequence[Link] = ()) -> str:
    """The Chrome trace of a build (JSON Object Format), for Perfetto or chrome://tracing.

    One lane per compiler at work, the memory of those at work as a counter (bytes).
    """
    origin = min((r.start - r.waited for r in records), default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "compile"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "link"}},
    ]
    for lane, record in lanes(records):
        events.append(
            {
                "ph": "X", "pid": 1, "tid": lane + 1,
                "name": Path(record.source).name, "cat": record.component,
                "ts": round((record.start - origin) * _MICRO),
                "dur": round((record.end - record.start) * _MICRO),
                "args": {
                    "object": record.object, "cpu_s": record.cpu, "peak_bytes": record.rss,
                    "cache": record.cache, "waited_s": record.waited, "exit": record.exit,
                },
            }
        )  # fmt: skip
    held = 0
    changes = [(r.start, r.rss) for r in records] + [(r.end, -r.rss) for r in records]
    for moment, change in sorted(changes):
        held += change
        events.append(
            {
                "ph": "C", "pid": 1, "name": "memory", "ts": round((moment - origin) * _MICRO),
                "args": {"bytes": held},
            }
        )  # fmt: skip
    for index, link in enumerate(links):
        events.append(
            {
                "ph": "X", "pid": 2, "tid": index + 1, "name": link.library, "cat": "link",
                "ts": round((link.start - origin) * _MICRO),
                "dur": round((link.end - link.start) * _MICRO),
            }
        )  # fmt: skip
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=0)
