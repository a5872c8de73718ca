"""How many compilers at once: cores and memory. Too many nvcc freeze a unified-memory machine.

One nvcc of a CUTLASS kernel was seen to take 9.9 GB; 20 of them on a 128 GB Spark end in
the kernel's OOM killer, or in a machine that answers no key.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
# What the build leaves to the rest of the machine.
_RESERVE_GIB = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Jobs:
    """A number of jobs and the sentence that explains it."""

    count: int
    reason: str


def available_memory() -> int:
    """Bytes that can be used now: the system's MemAvailable, or less if a cgroup limits us."""
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        if limit != "max":
            available = min(available, int(limit) - used + _reclaimable(_CGROUP / "memory.stat"))
    except (OSError, ValueError):
        pass
    return available


def _reclaimable(stat: Path) -> int:
    """Page cache that the kernel gives up at once (cgroup-v2, memory.stat, inactive_file)."""
    try:
        return int(dict(line.split() for line in stat.read_text().splitlines())["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def usable_cores() -> int:
    """Cores that this process may use: taskset, cpusets and CPU quotas (cpu.max) count."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def choose_jobs(
    *, asked: int | None, memory_per_job_gib: float, cores: int, available: int
) -> Jobs:
    """The user's number if given, else the smaller of cores and memory / memory per job."""
    by_memory = max(1, int((available / _GIB - _RESERVE_GIB) / memory_per_job_gib))
    if asked is not None:
        reason = f"--jobs {asked}"
        if asked > by_memory:
            reason += (
                f"; memory suggests at most {by_memory} "
                f"({available / _GIB:.0f} GiB free, {memory_per_job_gib:g} GiB a job)"
            )
        return Jobs(count=asked, reason=reason)
    if by_memory < cores:
        return Jobs(
            count=by_memory,
            reason=f"{by_memory} jobs by memory ({available / _GIB:.0f} GiB free, "
            f"{memory_per_job_gib:g} GiB a job), not {cores} cores",
        )
    return Jobs(count=cores, reason=f"{cores} jobs, one a core")
