"""As many compilers as cores, and how much memory there is (cases.md 12)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sm121.compile import jobs as jobs_module
from sm121.compile import memory as memory_module
from sm121.compile.jobs import choose_jobs, usable_cores
from sm121.compile.memory import available_memory

GIB = 1 << 30


def test_one_job_a_core_and_all_memory_but_two_gib() -> None:
    jobs = choose_jobs(asked=None, cores=20, available=128 * GIB)
    assert (jobs.count, jobs.memory) == (20, 126 * GIB)
    assert jobs.reason == "20 jobs, one a core; together they take at most 126.0 GiB"


def test_asked_number_wins_and_memory_stays_limited() -> None:
    jobs = choose_jobs(asked=40, cores=20, available=64 * GIB)
    assert (jobs.count, jobs.memory) == (40, 62 * GIB)
    assert "--jobs 40" in jobs.reason


def test_no_memory_to_speak_of_is_a_budget_of_nothing() -> None:
    """One compile at a time runs then (test_budget)."""
    assert choose_jobs(asked=None, cores=4, available=GIB).memory == 0


def fake_cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {50 * GIB // 1024} kB\n")
    monkeypatch.setattr(memory_module, "_CGROUP", str(folder))
    monkeypatch.setattr(memory_module, "_MEMINFO", str(folder / "meminfo"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 50 * GIB),
        ({"memory.max": "max\n", "memory.current": "1\n"}, 50 * GIB),
        ({"memory.max": f"{8 * GIB}\n", "memory.current": f"{2 * GIB}\n"}, 6 * GIB),
        (
            {
                "memory.max": f"{8 * GIB}\n",
                "memory.current": f"{7 * GIB}\n",
                "memory.stat": f"anon {GIB}\ninactive_file {5 * GIB}\n",
            },
            6 * GIB,
        ),
        ({"memory.max": f"{80 * GIB}\n", "memory.current": f"{2 * GIB}\n"}, 50 * GIB),
        ({"memory.max": "nonsense\n", "memory.current": "1\n"}, 50 * GIB),
    ],
    ids=[
        "no cgroup",
        "no limit",
        "limit",
        "page cache does not count",
        "limit above the machine",
        "unreadable",
    ],
)
def test_container_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    fake_cgroup(monkeypatch, tmp_path, files)
    assert available_memory() == expected


def test_only_cores_that_we_may_use_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module.os, "sched_getaffinity", lambda _: {3, 5})
    assert usable_cores() == 2


def test_figures_of_this_machine_are_plausible() -> None:
    assert usable_cores() >= 1
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
