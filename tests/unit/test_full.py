"""The profile `full` as it is pinned, its optional parts, and how they are named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sm121.commands.check import check_context
from sm121.commands.common import DEFAULT_PROFILE, clones_of
from sm121.compile.records import component_of
from sm121.compile.stage import wheel_version
from sm121.compile.wheel import component_paths
from sm121.context import Context, Options, reduced
from sm121.errors import CompilerMissing, PinsFault, UsageFault
from sm121.pins.load import load_stack
from sm121.pins.model import Stack
from sm121.source.rust import cargo_environment
from sm121.source.stage import built_components, left_out_groups
from sm121.toolkit import stage
from sm121.toolkit.machine import Compilers, host_machine
from support.stacks import minimal, write_stack

OTHER = "aarch64" if host_machine() == "x86_64" else "x86_64"


@pytest.fixture
def real(root: Path) -> Stack:
    """The stack that has the profile."""
    return load_stack(root / "pins", "0.26.0")


def test_full_is_all_that_is_not_left_out(real: Stack) -> None:
    assert set(real.profiles[DEFAULT_PROFILE].components) == set(real.components) - set(
        real.left_out
    )


def test_each_source_of_full_is_pinned_by_content(real: Stack) -> None:
    full = real.profiles["full"]
    used = {
        name for name, pin in real.sources.items() if set(pin.components) & set(full.components)
    }
    assert used == set(full.sources)
    for name in full.sources:
        pin = real.sources[name]
        assert pin.digest, name
        assert pin.pinned_commit or pin.wheels, f"{name}: neither a clone nor the index can have it"


@pytest.mark.parametrize(
    ("without", "sources", "components"),
    [
        ("fa2", [], ["_vllm_fa2_C"]),  # FA4's Python comes from the same source
        ("qutlass", ["qutlass"], ["_qutlass_C"]),
        ("rust", [], ["vllm-rs", "_rust_tool_parser"]),
    ],
)
def test_what_is_gone_without_an_optional_part(
    real: Stack, without: str, sources: list[str], components: list[str]
) -> None:
    full = real.profiles["full"]
    less = reduced(real, full, [without])
    assert [n for n in full.sources if n not in less.sources] == sources
    assert [n for n in full.components if n not in less.components] == components


def test_use_of_a_source_does_not_decide_where_it_lies(real: Stack) -> None:
    """Its folder's name is in CMake's cache: another one compiles everything again."""
    pin = real.sources["cutlass"]
    assert pin.content() == pin.model_copy(update={"components": (), "commit": None}).content()
    assert pin.content() != pin.model_copy(update={"ref": "v4.4.3"}).content()
    assert json.dumps(pin.content())


def test_series_is_checked_with_what_the_index_has(real: Stack, small: Context) -> None:
    context = replace(small, stack=real, stack_name="0.26.0")
    assert check_context(context, None).options.profile == "kernels"
    assert check_context(context, "full").options.profile == "full"


# --- names --------------------------------------------------------------------------


def facts(**sources: object) -> dict[str, dict[str, object]]:
    return {"patch": {"patches": []}, **({"sources": sources} if sources else {})}


@pytest.fixture
def full(real: Stack, small: Context) -> Context:
    (small.layout.pins / "0.26.0").mkdir()
    lock = small.layout.pins / "0.26.0/pylock.linux-aarch64-cp312.toml"
    lock.write_text("")
    return replace(small, stack=real, stack_name="0.26.0", options=Options(profile="full"))


def test_version_names_what_is_not_in(full: Context) -> None:
    results = facts(sources={}, groups={"rust": "no cargo"}, left_out={"vllm-rs": "no cargo"})
    whole = wheel_version(full, facts(sources={}, groups={}, left_out={}))
    assert whole.startswith("0.26.0+sm121.full.")
    digest = whole.rpartition(".")[2]
    assert wheel_version(full, results) == f"0.26.0+sm121.full.norust.{digest}"
    chosen = replace(full, options=replace(full.options, without=("rust", "fa2")))
    assert wheel_version(chosen, facts()) == f"0.26.0+sm121.full.nofa2.norust.{digest}"


def test_components_are_those_that_can_be_built(full: Context) -> None:
    reason = "cargo is not installed"
    left_out = dict.fromkeys(("vllm-rs", "_rust_tool_parser"), reason)
    results = facts(sources={}, groups={"rust": reason}, left_out=left_out)
    assert set(full.profile.components) - set(built_components(full, results)) == set(left_out)
    assert left_out_groups(full, results) == {"rust": reason}
    chosen = replace(full, options=replace(full.options, without=("fa2",)))
    assert left_out_groups(chosen, results) == {"fa2": "--without", "rust": reason}


def test_deep_gemm_needs_its_library_for_one_cpython() -> None:
    assert component_paths("_deep_gemm_C", python="3.12", machine="aarch64") == (
        "vllm/third_party/deep_gemm/__init__.py",
        "vllm/third_party/deep_gemm/_C.cpython-312-aarch64-linux-gnu.so",
    )
    assert component_paths("spinloop", python="3.12", machine="aarch64") == (
        "vllm/spinloop.abi3.so",
    )


def test_clones_of_the_environment() -> None:
    assert clones_of({"SM121_CLONES": "/a:b/c::"}) == [Path("/a"), Path("b/c")]
    assert clones_of({}) == []


# --- pins that contradict themselves ------------------------------------------------


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"profiles": {"smoke": {"optional": {"x": {"components": ["nope"], "reason": "-"}}}}},
         "profiles.smoke.optional.x: 'nope' is not in the profile"),
        ({"profiles": {"smoke": {"optional": {"No2": {"components": ["spinloop"], "reason": "-"}}}}},
         "optional.No2"),
        ({"sources": {"cutlass": {"components": ["nope"]}}},
         "sources.cutlass.components: no component is named 'nope'"),
        ({"sources": {"cutlass": {"commit": "v4"}}}, "sources.cutlass.commit"),
        ({"sources": {"cutlass": {"handed-over": "post"}}}, "sources.cutlass.handed-over"),
    ],
)  # fmt: skip
def test_faults_in_the_pins(tmp_path: Path, table: dict, says: str) -> None:
    data = minimal()
    for outer, tables in table.items():
        for name, values in tables.items():
            data[outer][name] |= values
    write_stack(tmp_path, data)
    with pytest.raises(PinsFault) as raised:
        load_stack(tmp_path, "1.2.3")
    assert says in "\n".join(raised.value.details)


# --- cargo --------------------------------------------------------------------------


def cargo(
    machine: str, prefixes: Mapping[str, str] = {"/build": "build"}, **environment: str
) -> dict[str, str]:
    compilers = Compilers(cc=Path("/x/cc"), cxx=Path("/x/c++"), version="12", libc="glibc 2.36")
    return cargo_environment(
        machine=machine, compilers=compilers, cargo_home=Path("/c"), work=Path("/w"),
        prefixes=prefixes, environment={"HOME": "/home/x", **environment},
    )  # fmt: skip


def test_cargo_fetches_nothing_while_compiling() -> None:
    variables = cargo(host_machine(), RUSTUP_TOOLCHAIN="1.95")
    assert variables["CARGO_NET_OFFLINE"] == "true"
    assert variables["CARGO_HOME"] == "/c"
    assert variables["RUSTUP_HOME"] == "/home/x/.rustup"
    assert variables["RUSTUP_TOOLCHAIN"] == "1.95"
    flags = variables["CARGO_ENCODED_RUSTFLAGS"].split("\x1f")
    assert "--remap-path-prefix=/build=build" in flags
    assert "--remap-path-prefix=/c=cargo" in flags
    assert "CARGO_BUILD_TARGET" not in variables


def test_rustc_gets_the_longest_prefix_last() -> None:
    """It takes the last option that matches: vLLM's sources are not `build/src`."""
    folders = {"/b/w/src": "vllm", "/b/w/src/deep": "deep", "/b/w": "build", "/": "root"}
    flags = cargo(host_machine(), folders)["CARGO_ENCODED_RUSTFLAGS"].split("\x1f")
    assert [flag for flag in flags if flag.startswith("--remap-path-prefix=")] == [
        "--remap-path-prefix=/=root",
        "--remap-path-prefix=/c=cargo",
        "--remap-path-prefix=/b/w=build",
        "--remap-path-prefix=/b/w/src=vllm",
        "--remap-path-prefix=/b/w/src/deep=deep",
    ]


def test_crossing_cargo_builds_and_links_for_the_target() -> None:
    variables = cargo(OTHER)
    assert variables["CARGO_BUILD_TARGET"] == f"{OTHER}-unknown-linux-gnu"
    assert variables[f"CARGO_TARGET_{OTHER.upper()}_UNKNOWN_LINUX_GNU_LINKER"] == "/x/cc"
    assert variables[f"CC_{OTHER}_unknown_linux_gnu"] == "/x/cc"


@pytest.mark.parametrize(("profile", "asked"), [("full", True), ("kernels", False)])
def test_deepgemms_python_is_looked_for_before_anything_is_downloaded(
    real: Stack, monkeypatch: pytest.MonkeyPatch, profile: str, asked: bool
) -> None:
    def missing(_: object) -> None:
        raise CompilerMissing("no CPython 3.12")

    def next_step(_: object) -> None:
        raise UsageFault("went on")

    monkeypatch.setattr(stage, "deepgemm_python", missing)
    monkeypatch.setattr(stage, "host_interpreter", next_step)
    context = SimpleNamespace(stack=real, profile=real.profiles[profile])
    with pytest.raises(CompilerMissing if asked else UsageFault):
        stage.EnvironmentStage().run(cast(Context, context), {})


def test_costs_that_are_shipped_are_of_sources_and_components_of_the_stack(
    real: Stack, root: Path
) -> None:
    costs = json.loads((root / "pins/0.26.0/costs.json").read_text())["objects"]
    assert {component_of(name) for name in costs} <= set(real.components)
    named = {found for name in costs for found in re.findall(r"\{(.*?)\}", name)}
    assert {"qutlass", "vllm-flash-attn"} <= named <= set(real.sources)
