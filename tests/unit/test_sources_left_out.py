"""[[sources-left-out]]: held against the series, and told by the manifest and a build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm121.commands.build import sources_line
from sm121.context import Context
from sm121.errors import PinsFault
from sm121.patches.left_out import check_left_out
from sm121.patches.series import load_series
from sm121.patches.stage import PatchStage
from sm121.pins.load import load_stack, stack_names
from sm121.wheelhouse.describe import sources_left_out
from sm121.wheelhouse.manifest import SourcesLeftOutEntry
from support.stacks import minimal, write_stack

WHOLE = {
    "patch": "less", "component": "spinloop", "sources": ["csrc/a.cu", "{cutlass}/b.cu"],
    "reason": "for sm_90",
}  # fmt: skip
SOME = {
    "patch": "thin", "component": "fs_io_C", "sources": ["csrc/io_*.cu"], "kernels": "those of half",
    "reason": "nobody calls them",
}  # fmt: skip
SOURCE = {"source": {"commit": "1" * 40}}


@pytest.fixture
def context(small: Context) -> Context:
    """Of a stack that leaves sources out."""
    write_stack(small.layout.pins, minimal() | {"sources-left-out": [WHOLE, SOME]})
    return replace(small, stack=load_stack(small.layout.pins, "1.2.3"))


def write_series(context: Context, *names: str) -> None:
    folder = context.layout.patches / "vllm/1.2.3"
    for name in names:
        (folder / f"{name}.patch").write_text("the patch\n")
    (folder / "series").write_text("".join(f"{name}.patch\n" for name in names))


def results(*patches: str, **more: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {"patch": {"patches": [{"name": name, "status": "applied"} for name in patches]}, **more}


def told(context: Context, built: tuple[str, ...], *patches: str) -> list[dict[str, Any]]:
    entries = sources_left_out(context, results(*patches), built)
    return [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]


@pytest.mark.parametrize(
    ("series", "what", "cause"),
    [
        (["thin", "lest"], "names less.", "the series has no such patch; did you mean 'lest'?"),
        (["zzz"], "names less, thin.", "the series has no such patch"),
    ],
)
def test_a_patch_that_the_series_has_not_stops_the_stage_with_its_name(
    context: Context, series: list[str], what: str, cause: str
) -> None:
    write_series(context, *series)
    with pytest.raises(PinsFault) as raised:
        PatchStage().inputs(context, SOURCE)
    assert raised.value.what == f"sources-left-out {what}"
    assert raised.value.cause == cause
    assert "stack.toml" in raised.value.remedy


def test_patches_of_the_series_are_fine(context: Context) -> None:
    write_series(context, "less", "other", "thin")
    assert PatchStage().inputs(context, SOURCE)


def test_the_real_stacks_name_patches_of_their_series(root: Path) -> None:
    for name in stack_names(root / "pins"):
        pins = load_stack(root / "pins", name).sources_left_out
        assert pins, name
        check_left_out(pins, load_series(root / "patches/vllm" / name))


def test_the_manifest_has_them_as_the_pins_do(context: Context) -> None:
    assert told(context, ("spinloop", "fs_io_C"), "less", "thin") == [WHOLE, SOME]


def test_nothing_is_said_of_what_is_not_built(context: Context) -> None:
    assert told(context, ("spinloop",), "less", "thin") == [WHOLE]
    assert told(context, ("cumem_allocator",), "less", "thin") == []


def test_nothing_is_said_of_a_patch_that_is_not_there(context: Context) -> None:
    assert told(context, ("spinloop", "fs_io_C"), "thin") == [SOME]


def test_an_overlay_is_upstreams_and_leaves_nothing_out(context: Context) -> None:
    found = results("less", "thin", overlay={})
    assert sources_left_out(context, found, ("spinloop", "fs_io_C")) == ()


def test_the_end_of_a_build_counts_sources_and_names_components_of_kernels() -> None:
    whole, some = (SourcesLeftOutEntry.model_validate(entry) for entry in (WHOLE, SOME))
    one = whole.model_copy(update={"sources": ("csrc/a.cu",)})
    assert sources_line([whole, one]) == "left out of what is built: 3 sources"
    assert sources_line([one]) == "left out of what is built: 1 source"
    assert sources_line([some, some]) == "left out of what is built: some kernels of fs_io_C"
    assert (
        sources_line([whole, some])
        == "left out of what is built: 2 sources and some kernels of fs_io_C"
    )
