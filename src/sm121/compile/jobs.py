"""How many compilers at once, and how much memory they share.

As many as there are cores. What they take together is limited apart, by a budget from which
the launcher (sm121.compile.launcher) takes what each object was measured to need: one nvcc of
a CUTLASS kernel was seen to take 9.9 GB, most take less than one; 20 of the large ones on a
128 GB Spark end in the kernel's OOM killer, or in a machine that answers no key.
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
    """A number of jobs, the bytes that they may take together, and why."""

    count: int
    memory: int
    reason: str


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


def choose_jobs(*, asked: int | None, cores: int, available: int) -> Jobs:
    """The user's number if given, else one a core; memory: all that is free but a reserve."""
    memory = max(0, int(available - _RESERVE_GIB * _GIB))
    count = asked or cores
    reason = f"--jobs {asked}" if asked else f"{cores} jobs, one a core"
    return Jobs(
        count=count,
        memory=memory,
        reason=f"{reason}; together they take at most {memory / _GIB:.1f} GiB",
    )
