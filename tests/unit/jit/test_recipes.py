"""jit.toml: what it says is consistent, and the readings know the messages that were met."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm121.errors import PinsFault
from sm121.jit.readings import read_failure
from sm121.jit.recipes import FILE, load_recipes
from sm121.jit.verify import MODES
from sm121.pins.load import load_stack, stack_names

STACKS = [p.parent.name for p in (Path(__file__).parents[3] / "pins").glob(f"*/{FILE}")]


def test_the_default_stack_has_one(root: Path) -> None:
    assert (root / "pins/default").read_text().strip() in STACKS
    assert set(STACKS) <= set(stack_names(root / "pins"))


@pytest.mark.parametrize("stack", STACKS)
def test_no_kernel_is_both_compiled_and_left_out(root: Path, stack: str) -> None:
    recipes = load_recipes(root / "pins", stack)
    compiled = {k for r in recipes.recipes.values() for mode in MODES for k in r.wanted(mode)}
    assert compiled & set(recipes.reasons()) == set()
    named = [k for one in recipes.left_out for k in one.kernels]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("stack", STACKS)
def test_each_recipe_has_its_function_or_its_module(root: Path, stack: str) -> None:
    files = sorted((root / "src/sm121/jit/inside").glob("calls*.py"))
    calls = "\n".join(file.read_text() for file in files)
    modules = load_stack(root / "pins", stack).jit_cache
    assert modules
    recipes = load_recipes(root / "pins", stack).recipes
    for name, recipe in recipes.items():
        if recipe.flashinfer:
            assert name in modules.modules
            # Else nothing of it is launched, and only static shared memory is looked at.
            assert f"\n@launches\ndef {name}(s: Any)" in calls
        else:
            assert f"\n@recipe\ndef {name}(s: Any)" in calls
    assert calls.count("\n@recipe\n") == sum(not r.flashinfer for r in recipes.values())


def test_an_unknown_key_is_refused_with_its_place(tmp_path: Path, root: Path) -> None:
    text = (root / "pins/0.26.0" / FILE).read_text()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / FILE).write_text(text.replace("hidden_size =", "hidden_sizes ="))
    with pytest.raises(PinsFault) as fault:
        load_recipes(tmp_path, "s")
    assert "hidden_size" in " ".join([str(fault.value), fault.value.cause, *fault.value.details])


def test_a_pattern_that_is_none_is_refused(tmp_path: Path, root: Path) -> None:
    text = (root / "pins/0.26.0" / FILE).read_text()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / FILE).write_text(text.replace('pattern = "timed out"', 'pattern = "("'))
    with pytest.raises(PinsFault):
        load_recipes(tmp_path, "s")


# Each as a compiler said it (the wrong-on-purpose tests, or cases.md), and the kind it must be read as.
SEEN = {
    "fatal error: math_constants.h: No such file or directory": "toolchain",
    'error: cannot open source file "math_constants.h"': "toolchain",
    "ptxas k.ptx, line 9; error : Instruction 'cvt with .e2m1x2' not supported on .target 'sm_121'": "unsupported",
    "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'": "toolchain",
    "nvcc fatal   : Unsupported gpu architecture 'compute_121a'": "toolchain",
    "ptxas application ptx input, line 5; fatal   : Unsupported .version 9.1; current version is '9.0'": "toolchain",
    "killed by signal 11 (Segmentation fault)": "toolchain",
    "undefined symbol: _ZN3tvm3ffi4json9StringifyERKNS0_3AnyE": "pin",
    "TypeError: dynamic_func() missing 1 required positional argument: 'n'": "pin",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376": "over-limit",
    "timed out after 900 s": "toolchain",
    "something nobody has seen": "unknown",
}


@pytest.mark.parametrize(("message", "kind"), SEEN.items())
def test_messages_are_read_rightly(root: Path, message: str, kind: str) -> None:
    rules = load_recipes(root / "pins", "0.26.0").readings
    assert read_failure(message, rules).kind == kind
