"""cases.md 12: as many compilers as cores and memory allow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sm121.compile import jobs as jobs_module
from sm121.compile.jobs import available_memory, choose_jobs, usable_cores

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "free_gib", "per_job", "count"),
    [
        (20, 128, 10, 12),  # a Spark: twenty nvcc of 10 GB would take 200
        (20, 128, 1.5, 20),
        (2, 24, 1.5, 2),
        (16, 4, 1.5, 1),
        (16, 0.5, 10, 1),  # one job is the least, however little there is
        (1, 512, 1.5, 1),
    ],
)
def test_jobs_by_cores_and_memory(cores: int, free_gib: float, per_job: float, count: int) -> None:
    jobs = choose_jobs(
        asked=None, memory_per_job_gib=per_job, cores=cores, available=int(free_gib * GIB)
    )
    assert jobs.count == count
    assert ("memory" in jobs.reason) == (count < cores)
    assert str(count) in jobs.reason


def test_two_gib_stay_for_the_machine() -> None:
    jobs = choose_jobs(asked=None, memory_per_job_gib=1, cores=64, available=10 * GIB)
    assert jobs.count == 8


def test_asked_number_wins_and_too_many_are_remarked() -> None:
    many = choose_jobs(asked=20, memory_per_job_gib=10, cores=20, available=64 * GIB)
    assert many.count == 20
    assert "memory suggests at most 6" in many.reason
    few = choose_jobs(asked=2, memory_per_job_gib=10, cores=20, available=64 * GIB)
    assert (few.count, few.reason) == (2, "--jobs 2")


def fake_cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(jobs_module, "_CGROUP", folder)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=50 * GIB))


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
    assert 0 < available_memory() <= psutil.virtual_memory().total
