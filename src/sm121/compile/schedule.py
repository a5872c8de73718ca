"""How long a build takes on other machines: list scheduling of measured objects."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One object: seconds that it takes on one core, and bytes of memory meanwhile."""

    name: str
    seconds: float
    memory: int = 0


def wall_seconds(jobs: Iterable[Job], *, cores: int, memory: int | None = None) -> float:
    """Seconds until the last job ends, if they are started in the order given.

    A core that is free takes the next job, and waits with it until it fits into `memory` (bytes;
    None: no limit) beside those that run: the rule of ninja and of sm121.compile.budget. What
    several compilers on one machine cost each other (memory bandwidth, clocks) is not in it.
    """
    running: list[tuple[float, int]] = []
    now, held = 0.0, 0
    for job in jobs:
        while running and (
            len(running) >= cores or (memory is not None and held + job.memory > memory)
        ):
            now, freed = heapq.heappop(running)
            held -= freed
        heapq.heappush(running, (now + job.seconds, job.memory))
        held += job.memory
    return max((end for end, _ in running), default=0.0)


def longest_first(jobs: Iterable[Job]) -> list[Job]:
    """The order in which sm121.compile.order has them started."""
    return sorted(jobs, key=lambda job: -job.seconds)
