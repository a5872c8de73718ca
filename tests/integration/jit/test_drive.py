"""Children that crash, hang or can't begin: each costs its own recipe, no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sm121.jit import drive
from sm121.jit.drive import Bench, run_recipes

# Speaks as inside/work.py does. Recipes: ok, launches, crash, hang, compiler (hangs), raise.
CHILD = """
import faulthandler, json, os, subprocess, sys
job = json.load(open(sys.argv[1]))
def tell(**event):
    with open(job["out"], "a") as file:
        file.write(json.dumps(event) + "\\n")
tell(begin="imports")
faulthandler.dump_traceback_later(job["seconds"], exit=True)
if "bad" in job["recipes"][0]:
    print("cannot import")
    tell(end="imports", error="ImportError: no such thing")
    sys.exit(1)
if "abort" in job["recipes"][0]:
    os.abort()
tell(end="imports", error="")
for name in job["recipes"]:
    tell(begin=name)
    faulthandler.dump_traceback_later(job["seconds"], exit=True)
    if name == "crash":
        os.kill(os.getpid(), 11)
    if name == "compiler":
        subprocess.run(["sleep", "60"])
    while name == "hang":
        pass
    if name != "raise":
        tell(recipe=name, kernel=name, mode=job["mode"])
    if name == "launches":
        tell(recipe=name, kernel="second", mode=job["mode"])
        tell(recipe=name, launches={"k": {"threads": 32, "dynamic_shared": 8}}, mode=job["mode"])
    tell(end=name, error="ValueError: x" if name == "raise" else "")
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "work.py").write_text(CHILD)
    monkeypatch.setattr(drive, "INSIDE", inside)
    return Bench(
        tree=tmp_path, python=Path(sys.executable), toolkit=tmp_path / "cuda",
        work=tmp_path / "work", log=tmp_path / "log.txt", seconds=2, shapes={}, modules={},
    )  # fmt: skip


def test_the_next_recipes_run_behind_one_that_crashes_or_hangs(bench: Bench) -> None:
    begun: list[str] = []
    told = run_recipes(bench, "triton", ["ok", "crash", "raise", "hang", "also"], begun.append)
    assert [len(one.records) for one in told.values()] == [1, 0, 0, 0, 1]
    errors = {name: one.error.splitlines()[:1] for name, one in told.items()}
    assert errors["crash"] == ["killed by signal 11 (Segmentation fault)"]
    assert errors["raise"] == ["ValueError: x"]
    assert errors["hang"] == ["timed out after 2 s"]
    assert errors["ok"] == errors["also"] == []
    assert begun.count("imports") == 3


@pytest.mark.timeout(30)
def test_a_compiler_that_hangs_is_given_up_with_its_recipe(bench: Bench) -> None:
    """It holds the pipe that is read; and the crash after it is no time limit."""
    told = run_recipes(bench, "triton", ["compiler", "crash", "ok"], lambda name: None)
    errors = {name: one.error.splitlines()[:1] for name, one in told.items()}
    assert errors == {
        "compiler": ["timed out after 2 s"],
        "crash": ["killed by signal 11 (Segmentation fault)"], "ok": [],
    }  # fmt: skip


def test_launches_that_are_told_later_belong_to_all_records_of_their_recipe(bench: Bench) -> None:
    told = run_recipes(bench, "triton", ["ok", "launches"], lambda name: None)
    assert "launches" not in told["ok"].records[0]
    launches = {"k": {"threads": 32, "dynamic_shared": 8}}
    assert [(one["kernel"], one["launches"]) for one in told["launches"].records] == [
        ("launches", launches), ("second", launches),
    ]  # fmt: skip


def test_imports_that_fail_fail_every_recipe_with_the_familys_words(bench: Bench) -> None:
    told = run_recipes(bench, "triton", ["bad", "other"], lambda name: None)
    assert {one.error.splitlines()[0] for one in told.values()} == {"ImportError: no such thing"}


def test_an_abort_at_import_is_told(bench: Bench) -> None:
    told = run_recipes(bench, "tilelang", ["abort", "other"], lambda name: None)
    assert all(one.error.startswith("killed by signal 6") for one in told.values())


def test_nothing_of_the_callers_reaches_a_compiler(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "/elsewhere")
    monkeypatch.setenv("LD_PRELOAD", "")
    seen = drive.environment(bench, "triton")
    assert "TRITON_PTXAS_BLACKWELL_PATH" not in seen
    assert seen["CUDA_HOME"] == str(bench.toolkit)
