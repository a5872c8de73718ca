"""The walk over the release's own tree: all that it reaches is accounted for, and so is a kernel
that someone adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm121.jit.discover import discover
from sm121.jit.recipes import load_recipes
from sm121.jit.verify import MODES

ADDED = """

@triton.jit
def _a_kernel_that_upstream_adds(x_ptr):
    tl.store(x_ptr, 0)
"""
PLACE = "vllm/models/deepseek_v4/common/ops/save_partial_states.py"


@pytest.mark.stacks("0.26.0")
def test_every_kernel_of_the_path_is_accounted_for(
    root: Path, stack_name: str, patched_tree: Path, tmp_path: Path
) -> None:
    place = patched_tree / PLACE
    text = place.read_text()
    # A file of its own beside the release's: the tree is shared and only for reading.
    copy = tmp_path / "tree"
    for path in sorted((patched_tree / "vllm").rglob("*.py")):
        target = copy / path.relative_to(patched_tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path == place:
            target.write_text(text + ADDED)
        else:
            target.hardlink_to(path)
    recipes = load_recipes(root / "pins", stack_name)
    found = {
        kernel.name: kernel for kernel in discover(copy, recipes.package, avoid=recipes.avoided())
    }
    claimed = {k for r in recipes.recipes.values() for mode in MODES for k in r.wanted(mode)}
    known = claimed | set(recipes.reasons())
    unaccounted = {n for n, kernel in found.items() if n not in known and not kernel.helper}
    assert unaccounted == {
        "vllm.models.deepseek_v4.common.ops.save_partial_states:_a_kernel_that_upstream_adds"
    }
    # Five families, and enough of each that the walk can't have stopped early.
    counts = {f: sum(k.family == f for k in found.values()) for f in
              ("triton", "cutedsl", "tilelang", "flashinfer", "deepgemm")}  # fmt: skip
    assert counts["tilelang"] == 8
    assert counts["triton"] > 60
    assert counts["cutedsl"] > 10
    assert counts["deepgemm"] > 8
    assert "flashinfer.decode:trtllm_batch_decode_sparse_mla_dsv4" in found
