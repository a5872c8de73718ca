"""Which modules a build compiles ahead of time, and what the pins may say of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sm121.context import Context, Options, validate_options
from sm121.errors import PinsFault, UsageFault
from sm121.jitcache.stage import cache_version, left_to_compile
from sm121.pins.load import load_stack, stack_names
from sm121.pins.model import OVERLAY
from sm121.pipeline import all_stages
from support.jitcache import listing, module
from support.stacks import SHA256, write_stack


def made(small: Context, data: dict[str, Any], **options: Any) -> Context:
    """The small context with another stack.toml and other options."""
    write_stack(small.layout.pins, data)
    return replace(small, stack=load_stack(small.layout.pins, "1.2.3"), options=Options(**options))


@pytest.mark.parametrize(
    ("profile", "option", "modules"),
    [
        ("smoke", None, []),
        ("smoke", "listed", ["attention"]),
        ("smoke", "all", ["attention", "moe"]),
        ("kernels", None, ["attention"]),
        ("kernels", "none", []),
    ],
)
def test_profile_and_option_decide(
    small: Context, profile: str, option: str | None, modules
) -> None:
    context = made(small, listing(), profile=profile, jit_cache=option)
    assert sorted(context.jit_modules) == modules
    assert ("jit-cache" in [stage.name for stage in all_stages(context)]) == bool(modules)


def test_what_is_not_made_is_named(small: Context) -> None:
    made_here = made(small, listing(), profile="kernels")
    assert left_to_compile(made_here) == {"moe": "what moe is for"}
    nothing = made(small, listing(), profile="smoke")
    assert set(left_to_compile(nothing)) == {"attention", "moe"}
    assert left_to_compile(nothing)["attention"] == "no JIT cache in this build"
    assert left_to_compile(made(small, listing(), jit_cache="all")) == {}


def test_an_overlay_gets_the_tools_only_for_it(small: Context) -> None:
    data = listing()
    data["profiles"][OVERLAY] = {"summary": "", "components": ["spinloop"], "memory-per-job-gib": 1}
    wheel = {"filename": "vllm-1.2.3-cp38-abi3-linux_aarch64.whl", "sha256": SHA256}
    data["overlay"] = {"wheels": {"linux-aarch64": wheel}}
    plain = [s.name for s in all_stages(made(small, data, profile=OVERLAY))]
    assert plain == ["source", "patch", "overlay", "wheelhouse", "verify"]
    asked = [s.name for s in all_stages(made(small, data, profile=OVERLAY, jit_cache="listed"))]
    assert asked[2:6] == ["overlay", "environment", "toolkit", "jit-cache"]


def test_a_stack_without_modules_refuses_the_option(small: Context) -> None:
    with pytest.raises(UsageFault, match="lists no FlashInfer modules"):
        validate_options(small.stack, Options(jit_cache="all"))
    validate_options(small.stack, Options(jit_cache="none"))


def test_the_version_is_flashinfers_and_changes_with_what_is_in(small: Context) -> None:
    versions = set()
    for edit in (
        lambda d: None,
        lambda d: d["family"]["flashinfer-python"].update(version="0.6.18"),
        lambda d: d["family"]["apache-tvm-ffi"].update(version="0.1.10"),
        lambda d: d["cuda"]["toolkit"].update({"nvidia-cuda-nvcc": "13.0.99"}),
        lambda d: d["jit-cache"]["modules"].update(more=module("more")),
    ):
        data = listing()
        edit(data)
        version = cache_version(made(small, data, profile="kernels"))
        assert version.startswith(data["family"]["flashinfer-python"]["version"] + "+sm121.")
        versions.add(version)
    assert len(versions) == 5
    data = listing()
    data["jit-cache"]["modules"]["attention"]["reason"] = "other words for the same"
    assert cache_version(made(small, data, profile="kernels")) in versions


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (lambda d: d["family"].pop("apache-tvm-ffi"), "needs apache-tvm-ffi in the family"),
        (lambda d: d.pop("jit-cache"), "profiles.kernels.jit-cache: there is no [jit-cache]"),
        (
            lambda d: d["jit-cache"]["left-out"].update(attention=module("attention")),
            "jit-cache.left-out: attention: also in jit-cache.modules",
        ),
        (
            lambda d: d["jit-cache"]["modules"]["attention"].update(generator="os:system"),
            "jit-cache.modules.attention.generator",
        ),
        (
            lambda d: d["jit-cache"]["modules"]["attention"].update(functions=[]),
            "jit-cache.modules.attention.functions",
        ),
        (lambda d: d["jit-cache"].update(modules={}), "jit-cache.modules"),
    ],
)
def test_faults_of_the_pins(small: Context, edit, fault: str) -> None:
    data = listing()
    edit(data)
    with pytest.raises(PinsFault) as raised:
        made(small, data)
    assert fault in " ".join(raised.value.details)


def test_real_pins_say_why_and_where(small: Context, root) -> None:
    for name in stack_names(root / "pins"):
        pin = load_stack(root / "pins", name).jit_cache
        for one in (pin.modules | pin.left_out).values() if pin else ():
            assert len(one.reason) > 20
            assert ".py" in one.source
    pin = load_stack(root / "pins", "0.26.0").jit_cache
    assert pin is not None
    assert {"sparse_mla_sm120", "sampling"} <= set(pin.modules)
