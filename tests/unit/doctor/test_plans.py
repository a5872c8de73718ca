"""What doctor says a build takes from nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sm121.compile.measured import measured_of
from sm121.context import Context, Options
from sm121.doctor import plans as module
from sm121.doctor.model import Plan
from sm121.doctor.plans import plans
from sm121.doctor.reference import load_references, reference_of
from sm121.pins.load import load_stack
from sm121.ui import human_seconds
from support.costs import GIB, finish, measure, of, ship

KERNELS = ("spinloop", "fs_io_C", "cumem_allocator", "_C_stable_libtorch", "_moe_C_stable_libtorch")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, and memory for one object of 6 GiB beside a small one."""
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "available_memory", lambda: 9 * GIB)


@pytest.fixture
def real(small: Context, root: Path, machine: None) -> Context:
    """The real pins in an empty folder; nothing measured elsewhere."""
    stack = load_stack(root / "pins", "0.26.0")
    return dataclasses.replace(small, stack=stack, options=Options(jobs=None))


def plan_of(context: Context, profile: str) -> Plan:
    (found,) = (plan for plan in plans(context, default="full") if plan.profile == profile)
    return found


def other(profile: str) -> float:
    return 60 * reference_of(profile).other_minutes


def test_one_for_each_profile(real: Context) -> None:
    found = plans(real, default="full")
    assert [plan.profile for plan in found] == list(real.stack.profiles)
    assert [plan.profile for plan in found if plan.default] == ["full"]


def test_what_was_never_measured_is_told_by_figures(real: Context) -> None:
    plan = plan_of(real, "kernels")
    figures = reference_of("kernels")
    assert (plan.seconds, plan.basis) == (figures.seconds(2), "estimate")
    assert plan.text.startswith(f"{figures.task_minutes:g} task minutes on 2 job(s), measured: x86")
    assert plan_of(real, "full").text.endswith("Rust is not counted")
    assert (plan_of(real, "overlay").seconds, plan_of(real, "overlay").jobs) == (42, 1)


def test_a_rebuild_of_one_object_is_no_build_from_nothing(small: Context, machine: None) -> None:
    objects = [of("spinloop", f"{n}.cpp") for n in range(3)]
    measure(small, *objects, cpu=100.0)
    finish(small, "environment", seconds=500, content="with all of its downloads")
    finish(small, "compile-smoke", seconds=7, objects=1, jobs=2, cost={"hits": 0})
    (plan,) = plans(small, default="smoke")
    assert (plan.seconds, plan.basis) == (200 + other("smoke"), "estimate")
    assert plan.text == (
        "3 objects, 3 measured here, 5 min 00 s of CPU, the longest first on 2 job(s): 3 min 20 s; "
        "all else, measured elsewhere: 1 min 30 s"
    )


@pytest.mark.parametrize(
    ("result", "basis"),
    [
        ({"objects": 3, "jobs": 2, "cost": {"hits": 0}}, "recorded"),
        ({"objects": 3, "jobs": 2, "cost": {"hits": 1}}, "estimate"),
        ({"objects": 3, "jobs": 8, "cost": {"hits": 0}}, "estimate"),
        ({"objects": 2, "jobs": 2, "cost": {"hits": 0}}, "estimate"),
        ({"objects": 0, "jobs": 2, "cost": {}}, "estimate"),
    ],
)
def test_only_a_run_that_compiled_everything_is_recorded(
    small: Context, machine: None, result: dict[str, object], basis: str
) -> None:
    measure(small, *(of("spinloop", f"{n}.cpp") for n in range(3)), cpu=100.0)
    finish(small, "compile-smoke", seconds=222, **result)
    (plan,) = plans(small, default="smoke")
    compiling = {"recorded": 222, "estimate": 200}[basis]
    assert (plan.basis, plan.seconds) == (basis, compiling + other("smoke"))
    assert ("3 objects, all compiled in a run here: 3 min 42 s" in plan.text) == (
        basis == "recorded"
    )


def test_own_measurements_go_before_the_pins_and_memory_counts(real: Context) -> None:
    ship(real, {of(c): (100.0, GIB) for c in KERNELS} | {of("_qutlass_C"): (9999.0, GIB)})
    plan = plan_of(real, "kernels")
    jit = 60 * load_references().jit_cache_minutes / 2
    assert (plan.seconds, plan.basis) == (300 + jit + other("kernels"), "estimate")
    assert "5 objects, 5 elsewhere (pins/1.2.3/costs.json)" in plan.text
    assert f"FlashInfer's modules, measured elsewhere: {human_seconds(jit)};" in plan.text
    # Two large ones, which don't fit beside each other: 1000, then 1000 beside the small ones.
    kernels = dataclasses.replace(real, options=Options(profile="kernels"))
    measure(kernels, *map(of, KERNELS[3:]), cpu=1000.0, rss=6 * GIB)
    plan = plan_of(real, "kernels")
    assert plan.seconds == 2000 + jit + other("kernels")
    assert "5 objects, 2 measured here and 3 elsewhere" in plan.text


def test_flashinfers_modules_as_they_were_measured_here(real: Context) -> None:
    ship(real, {of(c): (100.0, GIB) for c in KERNELS})
    measure(real, "sampling/a.cuda.o", folder="flashinfer", cpu=50.0)
    finish(real, "jit-cache", modules={"sampling": {"codes": {"sm_121a": 2}}})
    assert "FlashInfer's modules, measured elsewhere" in plan_of(real, "kernels").text
    measure(real, "sampling/b.cuda.o", folder="flashinfer", cpu=50.0)
    plan = plan_of(real, "kernels")
    assert plan.seconds == 300 + 50 + other("kernels")
    assert "FlashInfer's modules, measured here: 50 s" in plan.text


def test_costs_that_the_default_stack_ships_are_those_of_its_profiles(
    real: Context, root: Path
) -> None:
    """They are of every profile; each is told by its own alone."""
    pins = dataclasses.replace(
        real, stack_name="0.26.0", layout=dataclasses.replace(real.layout, root=root)
    )
    objects = {}
    for name in ("smoke", "kernels", "full"):
        profile = dataclasses.replace(pins, options=Options(profile=name))
        measured = measured_of(profile)
        assert measured.lacking == ()
        objects[name] = len(measured.costs)
        assert plan_of(pins, name).text.startswith(
            f"{objects[name]} objects, {objects[name]} elsewhere"
        )
    assert objects == {"smoke": 3, "kernels": 98, "full": 184}
