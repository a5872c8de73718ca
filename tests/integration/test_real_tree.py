"""The pins and patches against the release's real files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sm121.compile.configure import reads, steps
from sm121.errors import SourceDrift
from sm121.files import sha256_text
from sm121.gitrepo import Repository
from sm121.lock.resolve import REQUIREMENT_FILES, load_checked, lock_targets
from sm121.patches.apply import apply_series
from sm121.patches.lint import lint_series
from sm121.patches.style import check_style
from sm121.pins.model import Stack
from sm121.source.drift import check_drift, declared_components
from sm121.source.stage import EMPTY_TREE
from support.gits import BODY
from support.tools import tool

# --- drift --------------------------------------------------------------------------


def drift(real, stack: Stack, *, pins=None, components=None, commit: str = "") -> tuple[str, ...]:
    """What check_drift finds; () if nothing."""
    commit = commit or real.base
    arguments = (
        real.repository,
        commit,
        real.repository.changed_paths(EMPTY_TREE, commit),
        stack.sources if pins is None else pins,
        stack.components if components is None else components,
    )
    try:
        check_drift(*arguments)
    except SourceDrift as error:
        return error.details
    return ()


def test_pins_agree_with_what_upstreams_cmake_and_setup_ask_for(real, stack: Stack) -> None:
    assert drift(real, stack) == ()


def test_pins_agree_with_the_patched_tree_too(real, stack: Stack) -> None:
    assert drift(real, stack, commit=real.applied.commit) == ()


def test_no_fetch_of_upstreams_cuda_build_is_overlooked(pristine_tree: Path, stack: Stack) -> None:
    """Counted here in another way: every GIT_REPOSITORY line of the files that a CUDA build reads."""
    files = [
        pristine_tree / "CMakeLists.txt",
        *(pristine_tree / "cmake/external_projects").iterdir(),
    ]
    lines = [
        line for file in files for line in file.read_text().splitlines()
        if re.match(r"\s*GIT_REPOSITORY\s", line)
    ]  # fmt: skip
    assert len(lines) == len(stack.sources)


@pytest.mark.parametrize("name", ["cutlass", "qutlass", "triton-kernels", "vllm-flash-attn"])
def test_other_ref_is_told_with_both_values(real, stack: Stack, name: str) -> None:
    pins = dict(stack.sources)
    theirs = pins[name].ref
    pins[name] = pins[name].model_copy(update={"ref": "v9.9.9"})
    (fault,) = drift(real, stack, pins=pins)
    assert f"sources.{name}" in fault
    assert "v9.9.9" in fault
    assert theirs in fault


def test_source_that_is_not_pinned_is_told(real, stack: Stack) -> None:
    pins = {k: v for k, v in stack.sources.items() if k != "msa"}
    (fault,) = drift(real, stack, pins=pins)
    assert "cmake/external_projects/fmha_sm100.cmake fetches vllm-project/msa" in fault
    assert stack.sources["msa"].ref in fault
    assert "stack.toml does not pin" in fault


def test_pin_that_upstream_no_longer_asks_for_is_told(real, stack: Stack) -> None:
    extra = stack.sources["msa"].model_copy(update={"upstream_repository": "someone/else"})
    (fault,) = drift(real, stack, pins={**stack.sources, "extra": extra})
    assert "sources.extra" in fault
    assert "does not fetch someone/else" in fault


def test_new_component_of_upstream_is_told(real, stack: Stack) -> None:
    fewer = {k: v for k, v in stack.components.items() if k not in ("spinloop", "vllm-rs")}
    assert drift(real, stack, components=fewer) == (
        "component spinloop: upstream builds it, [components] does not list it",
        "component vllm-rs: upstream builds it, [components] does not list it",
    )


def test_component_that_upstream_dropped_is_told(real, stack: Stack) -> None:
    (fault,) = drift(real, stack, components={**stack.components, "_old_C": "x"})
    assert fault == "component _old_C: [components] lists it, upstream does not know it"


def test_new_upstream_with_changes_of_every_kind_is_told_as_a_whole(
    real, stack: Stack, pristine_tree: Path, tmp_path: Path
) -> None:
    """The real files, edited as a next release would."""
    tree = tmp_path / "tree"
    for name in ("setup.py", "CMakeLists.txt", "tools/build_rust.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((pristine_tree / name).read_bytes())
    projects = tree / "cmake/external_projects"
    projects.mkdir(parents=True)
    for file in (pristine_tree / "cmake/external_projects").iterdir():
        (projects / file.name).write_bytes(file.read_bytes())
    cmake = tree / "CMakeLists.txt"
    cmake.write_text(cmake.read_text().replace('"v4.4.2"', '"v4.5.0"'))
    (projects / "brand_new.cmake").write_text(
        "FetchContent_Declare(new GIT_REPOSITORY https://github.com/o/new.git GIT_TAG v1)\n"
    )
    setup = tree / "setup.py"
    setup.write_text(setup.read_text() + 'x = CMakeExtension(name="vllm._new_C")\n')
    repository = Repository(tmp_path / "own.git")
    commit = repository.import_tree(tree, message="next", date=stack.vllm.date)
    faults = drift(SimpleNamespace(repository=repository, base=commit), stack)
    repository.close()
    assert faults == (
        "sources.cutlass: pinned at v4.4.2, but CMakeLists.txt asks for v4.5.0",
        "cmake/external_projects/brand_new.cmake fetches o/new at v1, which stack.toml does not pin",
        "component _new_C: upstream builds it, [components] does not list it",
    )


# --- the series ---------------------------------------------------------------------


def test_real_series_applies_in_order_with_no_offset(real) -> None:
    assert [(p.name, p.status, p.offset) for p in real.applied.patches] == [
        (patch.name, "applied", 0) for patch in real.series
    ]


def test_real_series_is_fit_to_be_sent(real) -> None:
    lines = lint_series(real.repository, real.series, real.applied)
    assert lines[0].startswith(f"{len(real.series)} patches: headers, order, no fuzz")
    assert int(lines[1].split()[0]) >= 30


def test_real_series_passes_upstreams_own_style(real, tmp_path: Path) -> None:
    said = check_style(real.repository, real.applied, offline=False, log=tmp_path / "style.log")
    assert re.fullmatch(r"\d\d Python files pass upstream's ruff 0\.14\.0, check and format", said)


def test_what_is_configured_after_which_patch(real) -> None:
    """By what the patch touches; the others can't make a difference."""
    results = {
        "source": {"commit": real.base},
        "patch": {"patches": [asdict(patch) for patch in real.applied.patches]},
    }
    names = [name for name, _ in steps(real.repository, results)]
    assert names == [
        "build-selection", "requirements", "gb10-kernels", "gb10-native", "gb10-components",
        "jit-attention", "nccl-guard", "cutedsl-switch",
        *(p.name for p in real.series if p.name.startswith("fa2-") or p.name == "gb10-qutlass"),
    ]  # fmt: skip


def test_all_that_setup_loads_counts_as_read(pristine_tree: Path) -> None:
    """Files that setup.py names, and those that CMakeLists.txt includes or runs."""
    setup = (pristine_tree / "setup.py").read_text()
    cmake = (pristine_tree / "CMakeLists.txt").read_text()
    loaded = re.findall(r'ROOT_DIR, "([\w/.-]+)", "([\w/.-]+)"', setup)
    named = {f"{folder}/{file}" for folder, file in loaded if (pristine_tree / folder).is_dir()}
    named |= set(
        re.findall(r"(?:include\(|CMAKE_CURRENT_(?:SOURCE|LIST)_DIR}/)([\w/.-]+\.\w+)", cmake)
    )
    assert {"vllm/envs.py", "cmake/utils.cmake"} <= named
    assert [name for name in sorted(named) if not reads(name)] == []


# Patches that use what another one adds.
NEEDS = {
    "fa2-kernels": ["build-selection", "gb10-kernels", "gb10-components", "fa2-optional"],
    "fa2-optional": ["build-selection", "gb10-kernels", "gb10-components"],
    "gb10-components": ["build-selection", "gb10-kernels"],
    "gb10-kernels": ["build-selection"],
    "jit-attention": ["shape-dispatch"],  # where there is one
}


def test_each_patch_stands_alone(real) -> None:
    """One that is dropped or moved must not take others with it."""
    by_name = {patch.name: patch for patch in real.series}
    for patch in real.series:
        needed = [by_name[name] for name in NEEDS.get(patch.name, ()) if name in by_name]
        result = apply_series(real.repository, real.base, [*needed, patch])
        assert {applied.status for applied in result.patches} == {"applied"}


def test_real_series_has_stable_ids(real, tmp_path: Path) -> None:
    assert apply_series(real.repository, real.base, real.series) == real.applied


def test_patched_release_differs_only_where_the_patches_say(real) -> None:
    named = {
        line.removeprefix("diff --git a/").split(" b/")[0]
        for patch in real.series
        for line in patch.path.read_text().splitlines()
        if line.startswith("diff --git ")
    }
    assert set(real.repository.changed_paths(real.base, real.applied.commit)) == named


@pytest.mark.stacks("0.26.0")  # the pipeline's doing, whatever the release
def test_editing_a_python_patch_rewrites_only_its_files(real, tmp_path: Path) -> None:
    """So that ninja, which looks at times, rebuilds no object."""
    out = tmp_path / "work/src"
    real.repository.checkout(real.applied.commit, out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    edited = tmp_path / "gb10-memory.patch"
    (patch,) = (p for p in real.series if p.name == "gb10-memory")
    text = patch.path.read_text()
    line = "+        # they release meanwhile must not count as room for the KV cache."
    assert text.count(line) == 1
    edited.write_text(text.replace(line, line.replace("room", "space")))
    series = [
        type(p)(name=p.name, path=edited if p.name == patch.name else p.path, sha256=p.sha256)
        for p in real.series
    ]
    again = apply_series(real.repository, real.base, series)
    wanted = ["vllm/v1/worker/gpu_worker.py"]
    assert real.repository.checkout(again.commit, out) == wanted
    after = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    assert after.keys() == before.keys()
    rewritten = [str(p.relative_to(out)) for p in before if before[p] != after[p]]
    assert rewritten == wanted


# --- requirements -------------------------------------------------------------------


def exact(tree: Path, name: str) -> dict[str, Requirement]:
    """Requirements with == in a requirements file."""
    found = {}
    for raw in (tree / name).read_text().splitlines():
        line = re.sub(r"(^|\s)#.*$", "", raw).strip()
        if line and not line.startswith("-"):
            requirement = Requirement(line)
            if any(s.operator == "==" for s in requirement.specifier):
                found[canonicalize_name(requirement.name)] = requirement
    return found


def test_patched_requirements_agree_with_the_pins(patched_tree: Path, stack: Stack) -> None:
    seen = set()
    for file in REQUIREMENT_FILES:
        for name, requirement in exact(patched_tree, file).items():
            if pin := stack.family.get(name):
                assert str(requirement.specifier) == f"=={pin.version}", (file, requirement)
                assert set(pin.extras) <= requirement.extras, (file, requirement)
                seen.add(name)
    assert {"torch", "flashinfer-python", "apache-tvm-ffi", "tilelang", "nvidia-cutlass-dsl",
            "cuda-python"} <= seen  # fmt: skip


# What upstream pins otherwise; cuda-python it does not pin at all.
PINNED_OTHERWISE = {
    "0.26.0": {"flashinfer-python", "apache-tvm-ffi", "nvidia-cutlass-dsl"},
    "0.28.0": {"flashinfer-python"},
}


def test_pristine_requirements_do_not(pristine_tree: Path, stack: Stack, stack_name: str) -> None:
    """Else the patch would not be needed."""
    asked = exact(pristine_tree, "requirements/cuda.txt")
    differing = {
        name for name, r in asked.items()
        if name in stack.family and str(r.specifier) != f"=={stack.family[name].version}"
    }  # fmt: skip
    assert differing == PINNED_OTHERWISE[stack_name]


def test_cutlass_dsl_keeps_its_cuda13_extra(patched_tree: Path) -> None:
    assert exact(patched_tree, "requirements/cuda.txt")["nvidia-cutlass-dsl"].extras == {"cu13"}


def test_patched_requirements_name_no_other_index(patched_tree: Path) -> None:
    for file in REQUIREMENT_FILES:
        assert not re.search(
            r"^\s*--?(extra-index|index|find|i\b)", (patched_tree / file).read_text(), re.M
        )


def test_committed_locks_were_made_from_these_pins_and_patches(
    real, root: Path, stack: Stack, stack_name: str
) -> None:
    digests = {
        name: sha256_text(real.repository.read(real.applied.commit, name) or "")
        for name in REQUIREMENT_FILES
    }
    for target in lock_targets(stack):
        for kind in ("family", "host"):
            load_checked(root / "pins", stack_name, stack, kind, target, digests)


# --- build-selection: CMake ---------------------------------------------------------


@pytest.fixture(scope="module")
def cmake() -> Callable[[str], subprocess.CompletedProcess[str]]:
    own = Path(sys.executable).with_name("cmake")
    program = str(own) if own.exists() else tool("cmake")

    def run(script: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, "-P", script], capture_output=True, text=True, check=False)

    return run


def ask(cmake, tree: Path, folder: Path, listed: str, call: str):
    """Run a call with the tree's own cmake/utils.cmake loaded."""
    script = folder / "ask.cmake"
    script.write_text(
        # vLLM itself asks for 3.26; Debian 12's is good enough for these functions.
        f'cmake_minimum_required(VERSION 3.25)\nset(VLLM_BUILD_COMPONENTS "{listed}")\ninclude("{tree}/cmake/utils.cmake")\n{call}\n'
    )
    return cmake(script)


@pytest.mark.parametrize(
    ("listed", "asked", "enabled"),
    [
        ("", "spinloop", True),
        ("", "a b", True),
        ("spinloop", "spinloop", True),
        ("spinloop;fs_io_C", "fs_io_C", True),
        ("spinloop", "fs_io_C", False),
        ("spinloop", "_C spinloop", True),
        ("spinloop", "_C _moe_C", False),
        ("_C_stable_libtorch", "_C", False),
        ("_C", "_C_stable_libtorch", False),
        ("spinloop", "", False),
    ],
)
def test_cmake_knows_which_components_are_enabled(
    cmake, patched_tree: Path, tmp_path: Path, listed: str, asked: str, enabled: bool
) -> None:
    call = f'vllm_component_enabled(OUT {asked})\nmessage("answer=${{OUT}}")'
    done = ask(cmake, patched_tree, tmp_path, listed, call)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == f"answer={'TRUE' if enabled else 'FALSE'}"


def test_cmake_includes_only_projects_of_enabled_components(
    cmake, patched_tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "project.cmake").write_text('message("included")\nset(SEEN yes)\n')
    call = (
        f'vllm_include_for_components("{tmp_path}/project.cmake" _qutlass_C)\nmessage("${{SEEN}}.")'
    )
    out = ask(cmake, patched_tree, tmp_path, "spinloop", call)
    assert out.stderr.split() == ["."]
    inside = ask(cmake, patched_tree, tmp_path, "spinloop;_qutlass_C", call)
    assert inside.stderr.split() == ["included", "yes."]


def test_cmake_refuses_a_named_component_that_it_cannot_build(
    cmake, patched_tree: Path, tmp_path: Path
) -> None:
    call = 'set(CUDA_ARCHS "12.1a")\nvllm_define_empty_target(_qutlass_C)'
    done = ask(cmake, patched_tree, tmp_path, "_qutlass_C", call)
    assert done.returncode != 0
    assert "_qutlass_C is in VLLM_BUILD_COMPONENTS but can't be built" in done.stderr
    assert '"12.1a"' in done.stderr


def test_every_external_project_is_behind_its_component(patched_tree: Path, stack: Stack) -> None:
    """Nothing that is left out is fetched: no bare include() of a project is left."""
    text = (patched_tree / "CMakeLists.txt").read_text()
    assert not re.search(r"^\s*include\(\s*cmake/external_projects/", text, re.MULTILINE)
    guarded = re.findall(
        r"vllm_include_for_components\(cmake/external_projects/(\w+)\.cmake\s+([^)]+)\)", text
    )
    assert {name for name, _ in guarded} == {
        p.stem for p in (patched_tree / "cmake/external_projects").glob("*.cmake")
    }
    for _, components in guarded:
        assert set(components.split()) <= set(stack.components)


# --- build-selection: setup.py ------------------------------------------------------

SELECTION = ("get_build_components", "component_name", "is_component_enabled", "select_components")


def selection(tree: Path, listed: str) -> dict[str, Any]:
    """setup.py's own selection functions, cut out by AST, with this list asked for."""
    nodes = [
        node
        for node in ast.parse((tree / "setup.py").read_text()).body
        if (isinstance(node, ast.FunctionDef) and node.name in SELECTION)
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BUILD_COMPONENTS")
    ]
    assert len(nodes) == len(SELECTION) + 1, "setup.py has moved"
    namespace: dict[str, Any] = {
        "envs": SimpleNamespace(VLLM_BUILD_COMPONENTS=listed),
        "VLLM_TARGET_DEVICE": "cuda",
    }
    exec(compile(ast.Module(nodes, []), "setup.py", "exec"), namespace)
    return namespace


def test_upstream_has_no_selection(pristine_tree: Path) -> None:
    """The fault: nothing in setup.py, and no condition around any external project."""
    assert "VLLM_BUILD_COMPONENTS" not in (pristine_tree / "setup.py").read_text()
    with pytest.raises(AssertionError, match="has moved"):
        selection(pristine_tree, "spinloop")
    included = re.findall(
        r"^ *include\((cmake/external_projects/[\w.]+)\)",
        (pristine_tree / "CMakeLists.txt").read_text(),
        re.MULTILINE,
    )
    assert len(included) >= 6


def extensions(*names: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(name=f"vllm.{name}") for name in names]


CMAKE = extensions("spinloop", "fs_io_C", "vllm_flash_attn._vllm_fa2_C", "_C_stable_libtorch")
RUST = extensions("vllm-rs", "_rust_tool_parser")


def chosen(tree: Path, listed: str) -> list[list[str]]:
    lists = selection(tree, listed)["select_components"](CMAKE, RUST)
    return [[ext.name for ext in exts] for exts in lists]


def test_setup_builds_everything_without_a_list(patched_tree: Path) -> None:
    for listed in ("", "  "):
        assert chosen(patched_tree, listed) == [[e.name for e in CMAKE], [e.name for e in RUST]]


def test_setup_builds_only_what_is_listed_rust_included(patched_tree: Path) -> None:
    assert chosen(patched_tree, "spinloop, _vllm_fa2_C") == [
        ["vllm.spinloop", "vllm.vllm_flash_attn._vllm_fa2_C"], [],
    ]  # fmt: skip
    assert chosen(patched_tree, "vllm-rs") == [[], ["vllm.vllm-rs"]]


@pytest.mark.parametrize("listed", ["spinlop", "spinloop,_C", "spinloop,", ","])
def test_setup_refuses_unknown_names_and_lists_the_valid_ones(
    patched_tree: Path, listed: str
) -> None:
    with pytest.raises(ValueError, match="VLLM_BUILD_COMPONENTS") as raised:
        chosen(patched_tree, listed)
    message = str(raised.value)
    bad = next(n.strip() for n in listed.split(",") if n.strip() != "spinloop")
    assert repr(bad) in message
    assert (
        "Valid names: _C_stable_libtorch, _rust_tool_parser, _vllm_fa2_C, fs_io_C, spinloop, vllm-rs."
        in message
    )


def test_setup_and_cmake_get_the_same_list(patched_tree: Path) -> None:
    assert (
        '"-DVLLM_BUILD_COMPONENTS={}".format(";".join(BUILD_COMPONENTS))'
        in (patched_tree / "setup.py").read_text()
    )


def test_component_list_of_the_pins_is_upstreams(patched_tree: Path, stack: Stack) -> None:
    """Read from setup.py by AST here, not by the pattern that the pipeline uses."""
    setup = (patched_tree / "setup.py").read_text()
    rust = (patched_tree / "tools/build_rust.py").read_text()
    names = {
        keyword.value.value.removeprefix("vllm.").removeprefix("vllm_flash_attn.")
        for source in (setup, rust)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg in ("name", "target")
        and isinstance(keyword.value, ast.Constant)
        and str(keyword.value.value).startswith("vllm.")
    }
    assert names == set(stack.components)
    assert declared_components(setup, rust) == names


def test_our_own_patches_carry_what_lint_asks_for(real) -> None:
    """A guard against a lint that checks nothing: take the trailers away, and it must fail."""
    assert "Upstream-Status" in BODY
    for patch in real.series:
        text = patch.path.read_text()
        assert len(re.findall(r"^Upstream-Status: ", text, re.MULTILINE)) == 1
        assert "Signed-off-by: " in text
