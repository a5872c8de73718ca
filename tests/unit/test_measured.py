"""What is known of a profile's objects before it is built."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sm121.compile.launching import source_places
from sm121.compile.measured import compiled_components, largest_need, measured_of
from sm121.compile.stage import CompileStage
from sm121.context import Context, Options
from sm121.pins.load import load_stack
from support.costs import GIB, finish, measure, of, ship

KERNELS = ("spinloop", "fs_io_C", "cumem_allocator", "_C_stable_libtorch", "_moe_C_stable_libtorch")
SMOKE = KERNELS[:3]


@pytest.fixture
def kernels(small: Context, root: Path) -> Context:
    """A build of `kernels` of the real pins in an empty folder, none of it measured elsewhere."""
    stack = load_stack(root / "pins", "0.26.0")
    return dataclasses.replace(small, stack=stack, options=Options(profile="kernels"))


def test_components_that_a_compiler_makes(kernels: Context) -> None:
    assert compiled_components(kernels) == KERNELS
    full = dataclasses.replace(kernels, options=Options(profile="full"))
    assert compiled_components(full) == (*KERNELS, "_vllm_fa2_C", "_deep_gemm_C", "_qutlass_C")


def test_a_smoke_build_says_nothing_of_the_kernels(kernels: Context) -> None:
    assert largest_need(kernels) == 10 * GIB
    measure(kernels, *map(of, SMOKE))
    finish(kernels, "compile-smoke")
    assert largest_need(kernels) == 10 * GIB
    assert measured_of(kernels).lacking == KERNELS[3:]
    smoke = dataclasses.replace(kernels, options=Options(profile="smoke"))
    assert (largest_need(smoke), measured_of(smoke).lacking) == (GIB // 5, ())


def test_more_than_the_pins_guess_if_that_was_measured(kernels: Context) -> None:
    measure(kernels, of("_C_stable_libtorch"), rss=12 * GIB)
    assert largest_need(kernels) == 12 * GIB


def test_a_killed_build_has_not_measured_all_of_what_it_began(kernels: Context) -> None:
    measure(kernels, *map(of, KERNELS))
    assert measured_of(kernels).lacking == KERNELS
    finish(kernels, "compile-kernels")
    assert measured_of(kernels).lacking == ()
    assert largest_need(kernels) == GIB // 5


def test_what_came_out_of_the_compiler_cache_is_not_measured(kernels: Context) -> None:
    measure(kernels, *map(of, KERNELS))
    measure(kernels, of("_C_stable_libtorch", "b.cu"), cache="hit")
    finish(kernels, "compile-kernels")
    assert measured_of(kernels).lacking == ("_C_stable_libtorch",)
    ship(kernels, {of("_C_stable_libtorch", "b.cu"): (5, 2 * GIB)})
    assert measured_of(kernels).lacking == ()
    assert largest_need(kernels) == 2 * GIB


def test_own_measurements_go_before_the_pins_and_other_profiles_do_not_count(
    kernels: Context,
) -> None:
    ship(kernels, {of(c): (100, 4 * GIB) for c in (*KERNELS, "_qutlass_C")})
    measure(kernels, of("_moe_C_stable_libtorch"), rss=3 * GIB)
    measured = measured_of(kernels)
    assert measured.lacking == ()
    assert set(measured.costs) == set(map(of, KERNELS))
    assert measured.costs[of("_moe_C_stable_libtorch")].rss == 3 * GIB
    assert measured.here == {of("_moe_C_stable_libtorch")}


def test_objects_of_sources_that_the_pins_no_longer_name_are_not_of_this_build(
    kernels: Context,
) -> None:
    full = dataclasses.replace(kernels, options=Options(profile="full"))
    ship(full, {"CMakeFiles/_vllm_fa2_C.dir/{vllm-flash-attn}/a.cu.o": (1, GIB)})
    now = f"CMakeFiles/_vllm_fa2_C.dir{source_places(full)['vllm-flash-attn']}/a.cu.o"
    before = full.layout.third_party / "vllm-flash-attn-0123456789ab/tree/a.cu.o"
    measure(full, now, f"CMakeFiles/_vllm_fa2_C.dir{before}", rss=2 * GIB)
    assert {n: c.rss for n, c in measured_of(full).costs.items()} == {now: 2 * GIB}


def configure(context: Context, *objects: str) -> None:
    rules = CompileStage().work(context) / "ninja-1/temp.linux/build.ninja"
    rules.parent.mkdir(parents=True, exist_ok=True)
    rules.write_text("".join(f"build {name}: CUDA_COMPILER__x src\n\n" for name in objects))


def test_objects_that_are_no_longer_built_do_not_count(kernels: Context) -> None:
    """Sources that a new patch leaves out: measured once, or only ever out of the cache."""
    measure(kernels, *map(of, KERNELS))
    measure(kernels, of("_C_stable_libtorch", "gone.cu"), rss=12 * GIB)
    measure(kernels, of("_C_stable_libtorch", "cached.cu"), cache="hit")
    configure(kernels, *map(of, KERNELS))
    finish(kernels, "compile-kernels")
    assert measured_of(kernels).costs.keys() == set(map(of, KERNELS))
    assert (largest_need(kernels), measured_of(kernels).lacking) == (GIB // 5, ())


def test_what_is_configured_says_what_is_lacking(kernels: Context) -> None:
    """Also of a killed build, and of a component that a finished one was made without."""
    measure(kernels, *map(of, KERNELS))
    configure(kernels, *map(of, KERNELS), of("_moe_C_stable_libtorch", "to-come.cu"))
    finish(kernels, "compile-kernels")
    assert measured_of(kernels).lacking == ("_moe_C_stable_libtorch",)
