"""The patches `gb10-kernels`, `-native`, `-components` and `-qutlass`: what 12.x compiles.

vLLM's own CMakeLists.txt runs in CMake's script mode, with the commands that would need
a compiler, torch or a network replaced by ones that write down what they were asked for.
So its own arch functions decide, in a second, for any arch list and without CUDA.
Sources that vLLM generates (Marlin's kernels) are left out of account.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm121.pins.model import SourcesLeftOut, Stack

CUDA = "13.0.88"
STABLE = "csrc/libtorch_stable"
CUTLASS_W8A8 = f"{STABLE}/quantization/w8a8/cutlass"

# Spellings of the Spark's arch, and the family's own.
SM12X = ("12.1", "12.1a", "12.0f", "12.1f")
# Lists without the family: nothing may change for them.
OTHERS = ("7.5", "8.0", "8.9", "9.0a", "10.0a", "7.5 8.0 8.6 8.9 9.0a 10.0 11.0", "8.0 9.0")
MIXED = ("8.0 12.0", "8.9 12.1a", "9.0a 12.0", "10.0 12.0f", "8.0 9.0a 10.0 12.0")

C2X = f"{CUTLASS_W8A8}/scaled_mm_c2x.cu"
NEVER_DISPATCHED = {
    f"{STABLE}/cooperative_topk.cu",
    f"{STABLE}/dsv3_fused_a_gemm.cu",
    f"{STABLE}/fp32_router_gemm.cu",
    f"{STABLE}/fp32_router_gemm_entry.cu",
    f"{STABLE}/moe/dsv3_router_gemm_bf16_out.cu",
    f"{STABLE}/moe/dsv3_router_gemm_entry.cu",
    f"{STABLE}/moe/dsv3_router_gemm_float_out.cu",
}
DROPPED = {C2X} | NEVER_DISPATCHED
NATIVE = {
    f"{STABLE}/quantization/marlin/marlin.cu",
    f"{STABLE}/quantization/marlin/marlin_int4_fp8_preprocess.cu",
    f"{STABLE}/quantization/marlin/gptq_marlin_repack.cu",
    f"{STABLE}/quantization/marlin/awq_marlin_repack.cu",
    f"{STABLE}/quantization/hadamard/hadacore/hadamard_transform_cuda.cu",
    f"{STABLE}/moe/marlin_moe_wna16/ops.cu",
}
# Macros under which a binding or an entry calls into a source that may be left out.
MACRO_SOURCES = {
    "ENABLE_SCALED_MM_C2X": C2X,
    "ENABLE_SCALED_MM_SM120": f"{CUTLASS_W8A8}/scaled_mm_c3x_sm120.cu",
    "VLLM_ENABLE_COOPERATIVE_TOPK": f"{STABLE}/cooperative_topk.cu",
    "ENABLE_NVFP4_SM120": f"{STABLE}/quantization/fp4/nvfp4_scaled_mm_sm120_kernels.cu",
    "ENABLE_CUTLASS_MOE_SM120": f"{CUTLASS_W8A8}/moe/moe_data.cu",
}
NOT_FOR_SM12X = {"fmha_sm100", "flashmla", "tml_fa4"}
QUTLASS_SM100 = {"fused_quantize_mx_sm100.cu", "fused_quantize_nv_sm100.cu"}

# --- vLLM's CMakeLists.txt in script mode ---------------------------------------------

SCRIPT = r"""
cmake_minimum_required(VERSION 3.18)
list(PREPEND CMAKE_MODULE_PATH "${STUBS}/modules")
set(VLLM_PYTHON_EXECUTABLE "${STUBS}/python")
set(FETCHCONTENT_BASE_DIR "${STUBS}/deps")

function(say KIND)
  string(JOIN "|" _line ${KIND} ${ARGN})
  _message(NOTICE "@@${_line}")
endfunction()
macro(message)  # keep the log short, errors apart
  if("${ARGV0}" STREQUAL "FATAL_ERROR")
    _message(${ARGV})
  endif()
endmacro()

macro(cmake_minimum_required)
endmacro()
macro(project)
endmacro()
macro(install)
endmacro()
macro(find_program)
endmacro()
macro(set_source_files_properties)
endmacro()
macro(set_target_properties)
endmacro()
macro(target_include_directories)
endmacro()
macro(target_link_libraries)
endmacro()
macro(target_compile_definitions TARGET SCOPE)
  say(DEFINE ${TARGET} ${ARGN})
endmacro()
macro(target_compile_options TARGET SCOPE)
  string(REGEX MATCHALL "-D[A-Za-z0-9_]+" _macros "${ARGN}")
  say(DEFINE ${TARGET} ${_macros})
endmacro()
macro(add_custom_command)
endmacro()
macro(add_custom_target TARGET)
  say(CUSTOM ${TARGET})
endmacro()

macro(find_package PACKAGE)
  if("${PACKAGE}" STREQUAL "Python")
    set(Python_FOUND TRUE)
    set(Python_VERSION 3.12.0)
    set(Python_VERSION_MAJOR 3)
    set(Python_VERSION_MINOR 12)
  elseif("${PACKAGE}" STREQUAL "Torch")
    set(Torch_VERSION 2.11.0)
    set(CUDA_FOUND TRUE)
    set(CUDA_VERSION 13.0)
    set(CMAKE_CUDA_COMPILER_VERSION ${CUDA_RELEASE})
    set(CMAKE_CUDA_FLAGS "${GENCODES}")
  endif()
endmacro()

# Python programs that vLLM runs: questions to torch, kernel generators.
function(execute_process)
  cmake_parse_arguments(ARG "" "OUTPUT_VARIABLE;RESULT_VARIABLE;ERROR_VARIABLE" "" ${ARGN})
  if(ARG_OUTPUT_VARIABLE)
    set(${ARG_OUTPUT_VARIABLE} "0" PARENT_SCOPE)
  endif()
  if(ARG_RESULT_VARIABLE)
    set(${ARG_RESULT_VARIABLE} 0 PARENT_SCOPE)
  endif()
endfunction()

macro(file MODE)  # the tree is read only
  if(NOT "${MODE}" MATCHES "^(MAKE_DIRECTORY|WRITE)$")
    _file(${MODE} ${ARGN})
  endif()
endmacro()

function(set_property KIND)
  if(KIND STREQUAL "SOURCE")
    string(REGEX MATCHALL "code=[a-z0-9_]+|[a-z0-9_]+\\.h" _codes "${ARGN}")
    list(TRANSFORM _codes REPLACE "code=" "")
    foreach(_source IN LISTS ARGN)
      if(_source STREQUAL "APPEND")
        break()
      endif()
      _set_property(GLOBAL APPEND PROPERTY "CODES ${_source}" ${_codes})
    endforeach()
  endif()
endfunction()

function(Python_add_library TARGET)
  foreach(_source IN LISTS ARGN)
    if(_source MATCHES "\\.(cu|cpp)$")
      get_property(_codes GLOBAL PROPERTY "CODES ${_source}")
      say(OBJECT ${TARGET} ${_source} ${_codes})
    endif()
  endforeach()
endfunction()

macro(FetchContent_Declare NAME)
  set(_arguments "${ARGN}")
  if("SOURCE_SUBDIR" IN_LIST _arguments)
    say(FETCH ${NAME} "sources only")
  else()
    say(FETCH ${NAME})
  endif()
endmacro()
macro(FetchContent_GetProperties)
endmacro()
macro(FetchContent_MakeAvailable NAME)
  set(${NAME}_SOURCE_DIR "${STUBS}/${NAME}")
endmacro()
macro(FetchContent_Populate NAME)
  FetchContent_MakeAvailable(${NAME})
endmacro()

include(CMakeLists.txt)
"""

STUB_FILES = (
    "python",
    "modules/FetchContent.cmake",
    "cutlass/include/cutlass/cutlass.h",
    "flashmla/flash_mla/flash_mla_interface.py",
    "qutlass/qutlass/csrc/bindings.cpp",
    "vllm-flash-attn/csrc/flash_attn/src/flash_fwd_hdim128_bf16_sm80.cu",
    "vllm-flash-attn/csrc/flash_attn/src/flash_fwd_hdim128_bf16_causal_sm80.cu",
    "vllm-flash-attn/csrc/flash_attn/src/flash_bwd_hdim128_bf16_sm80.cu",
)

# Of a commit, all that a configure looks at.
CONFIGURED = ("CMakeLists.txt", "cmake", "csrc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """What a run of CMakeLists.txt defined."""

    # target → source → SASS and PTX, and a header that is included before it
    objects: dict[str, dict[str, tuple[str, ...]]]
    macros: dict[str, frozenset[str]]
    definitions: dict[str, frozenset[str]]  # macros with their values
    custom: frozenset[str]
    fetched: frozenset[str]
    sources_only: frozenset[str]

    @property
    def kernels(self) -> dict[str, tuple[str, ...]]:
        """The objects of vLLM's own two libraries."""
        return self.objects["_C_stable_libtorch"] | self.objects["_moe_C_stable_libtorch"]

    @property
    def qutlass(self) -> dict[str, tuple[str, ...]]:
        """The objects of qutlass, by name; none where it is not built."""
        found = self.objects.get("_qutlass_C", {})
        return {Path(source).name: codes for source, codes in found.items()}


class CMakeError(Exception):
    """CMakeLists.txt stopped with an error of its own."""


Configure = Callable[..., Configured]


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stand-ins for what vLLM's CMake looks at outside of vLLM."""
    root = tmp_path_factory.mktemp("stubs")
    for name in STUB_FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def gencodes(archs: str) -> str:
    """Torch's compiler flags for a TORCH_CUDA_ARCH_LIST."""
    numbers = [arch.replace(".", "") for arch in archs.split()]
    return " ".join(f"-gencode arch=compute_{n},code=sm_{n}" for n in numbers)


@pytest.fixture(scope="session")
def configure(stubs: Path) -> Configure:
    script = stubs / "script.cmake"
    script.write_text(SCRIPT)
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.fail("cmake is needed to read CMakeLists.txt")

    @functools.cache
    def run(tree: Path, archs: str, *, cuda: str = CUDA, components: str = "") -> Configured:
        settings = {
            "STUBS": stubs,
            "GENCODES": gencodes(archs),
            "CUDA_RELEASE": cuda,
            "VLLM_BUILD_COMPONENTS": components,
            "CUTLASS_INCLUDE_DIR": stubs / "cutlass/include",
        }
        defines = [f"-D{name}={value}" for name, value in settings.items()]
        # CMake's script mode takes the folder that it is started in for the source's.
        done = subprocess.run(
            [cmake, "-Wno-dev", *defines, "-P", script],
            cwd=tree,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CMakeError(re.sub(r"\s+", " ", done.stderr))
        return parse(done.stderr, tree)

    return run


def parse(log: str, tree: Path) -> Configured:
    said = [line[2:].split("|") for line in log.splitlines() if line.startswith("@@")]
    objects: dict[str, dict[str, tuple[str, ...]]] = {}
    definitions: dict[str, set[str]] = {}
    for kind, target, *rest in said:
        if kind == "OBJECT":
            source, *codes = rest
            if re.search(r"/sm\d\d_kernel_\w+\.cu$", source):
                continue  # a tree that was configured for real holds them
            objects.setdefault(target, {})[source.removeprefix(f"{tree}/")] = tuple(codes)
        elif kind == "DEFINE":
            found = {macro.removeprefix("-D") for macro in rest}
            definitions.setdefault(target, set()).update(found)
    assert objects, f"CMakeLists.txt defined nothing:\n{log}"
    return Configured(
        objects=objects,
        macros={
            target: frozenset(macro.partition("=")[0] for macro in found)
            for target, found in definitions.items()
        },
        definitions={target: frozenset(found) for target, found in definitions.items()},
        custom=frozenset(target for kind, target, *_ in said if kind == "CUSTOM"),
        fetched=frozenset(target for kind, target, *_ in said if kind == "FETCH"),
        sources_only=frozenset(target for kind, target, *rest in said if kind == "FETCH" and rest),
    )


# --- the tables of docs/gb10-kernels.md and docs/stack-0.28.0.md -------------------------

TABLES = {"0.26.0": "docs/gb10-kernels.md", "0.28.0": "docs/stack-0.28.0.md"}


def row(archs: str, configured: Configured) -> str:
    """Objects of vLLM's two libraries, what GPU code they hold, and what else is fetched."""
    codes = Counter(
        " + ".join(dict.fromkeys(code)) or "none" for code in configured.kernels.values()
    )
    counts = (len(configured.objects[f"{name}_stable_libtorch"]) for name in ("_C", "_moe_C"))
    cells = [
        f"`{archs}`",
        *map(str, counts),
        ", ".join(f"{count} × {code}" for code, count in sorted(codes.items())),
        ", ".join(sorted(configured.fetched & NOT_FOR_SM12X)) or "none",
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.usefixtures("real")  # so that it runs for every stack
@pytest.mark.parametrize("archs", SM12X)
@pytest.mark.parametrize("tree", ["pristine_tree", "patched_tree"])
def test_docs_say_what_cmake_says(
    configure: Configure, request: pytest.FixtureRequest, root: Path, stack_name: str,
    tree: str, archs: str,
) -> None:  # fmt: skip
    said = (root / TABLES[stack_name]).read_text()
    heading = "Before" if tree == "pristine_tree" else "After"
    table = said.split(f"\n{heading}:\n")[1].lstrip().split("\n\n")[0]
    assert row(archs, configure(request.getfixturevalue(tree), archs)) in table.splitlines()


# --- kernels that 12.x never dispatches to --------------------------------------------


@pytest.mark.parametrize("archs", SM12X)
def test_upstream_compiles_kernels_that_sm12x_never_runs(
    configure: Configure, pristine_tree: Path, archs: str
) -> None:
    """The fault."""
    assert configure(pristine_tree, archs).kernels.keys() >= DROPPED


@pytest.mark.parametrize("archs", SM12X)
def test_exactly_these_objects_are_gone(
    configure: Configure, pristine_tree: Path, patched_tree: Path, archs: str
) -> None:
    before = configure(pristine_tree, archs).kernels
    after = configure(patched_tree, archs).kernels
    assert before.keys() - after.keys() == DROPPED
    assert after.keys() - before.keys() == set()


# --- what stack.toml, and so the manifest, says of it ----------------------------------

Sources = dict[tuple[str, str], tuple[str, ...]]  # (component, source) → codes


def as_pinned(configured: Configured, stubs: Path) -> Sources:
    """The objects, with sources named as stack.toml names them."""
    return {
        (target, re.sub(rf"^{re.escape(str(stubs))}/([^/]+)/", r"{\1}/", source)): codes
        for target, sources in configured.objects.items()
        for source, codes in sources.items()
    }


def declared(pins: Iterable[SourcesLeftOut]) -> set[tuple[str, str]]:
    """Sources that are left out whole."""
    return {(pin.component, source) for pin in pins if not pin.kernels for source in pin.sources}


def thinned(pins: Iterable[SourcesLeftOut], objects: Sources) -> set[tuple[str, str]]:
    """Sources some of whose kernels are left out. Each path must be that of a source, at least."""
    found = set()
    for pin in pins:
        for pattern in pin.sources if pin.kernels else ():
            matched = {
                (component, source)
                for component, source in objects
                if component == pin.component and fnmatchcase(source, pattern)
            }
            assert matched, pattern
            found |= matched
    return found


def with_header(objects: Sources) -> set[tuple[str, str]]:
    """Sources before which a header of ours is included: it decides which kernels they have."""
    return {key for key, codes in objects.items() if any(code.endswith(".h") for code in codes)}


@pytest.mark.parametrize("archs", SM12X)
def test_the_stack_declares_all_that_is_left_out(
    configure: Configure, pristine_tree: Path, patched_tree: Path, stubs: Path, stack: Stack,
    archs: str,
) -> None:  # fmt: skip
    before = as_pinned(configure(pristine_tree, archs), stubs)
    after = as_pinned(configure(patched_tree, archs), stubs)
    dropped = {(c, source) for c, source in before.keys() - after.keys() if c not in stack.left_out}
    assert declared(stack.sources_left_out) == dropped
    assert thinned(stack.sources_left_out, after) == with_header(after)
    assert with_header(before) == set()


def test_each_patch_leaves_out_what_the_stack_says_of_it(
    configure: Configure, real, stubs: Path, stack: Stack, tmp_path: Path
) -> None:
    def objects(commit: str) -> Sources:
        tree = tmp_path / commit
        real.repository.export(commit, tree, paths=CONFIGURED)
        return as_pinned(configure(tree, "12.1a"), stubs)

    patches = [patch for patch in real.applied.patches if patch.commit]
    parents = [real.base, *(patch.commit for patch in patches)]
    told = {pin.patch for pin in stack.sources_left_out}
    assert told <= {patch.name for patch in patches}
    for patch, parent in zip(patches, parents, strict=False):
        if patch.name not in told:
            continue
        pins = [pin for pin in stack.sources_left_out if pin.patch == patch.name]
        before, after = objects(parent), objects(patch.commit)
        assert declared(pins) == before.keys() - after.keys(), patch.name
        assert thinned(pins, after) == with_header(after) - with_header(before), patch.name


@pytest.mark.parametrize("cuda", ["12.8.93", "12.9.86"])
@pytest.mark.parametrize("archs", ["12.0", "12.0a", "12.1a", "12.0a 12.1a"])
def test_older_cuda_drops_the_same(
    configure: Configure, pristine_tree: Path, patched_tree: Path, archs: str, cuda: str
) -> None:
    before = configure(pristine_tree, archs, cuda=cuda).kernels
    after = configure(patched_tree, archs, cuda=cuda).kernels
    assert before.keys() - after.keys() == DROPPED


@pytest.mark.parametrize("archs", SM12X)
def test_upstream_leaves_some_to_the_driver(
    configure: Configure, pristine_tree: Path, archs: str
) -> None:
    """The fault: PTX of another family is all that 12.x gets."""
    kernels = configure(pristine_tree, archs).kernels
    foreign = {
        source
        for source, codes in kernels.items()
        if any("120" not in code and "121" not in code for code in codes)
    }
    assert foreign == NATIVE | {C2X}


@pytest.mark.parametrize("archs", SM12X)
def test_all_that_is_left_is_native(configure: Configure, patched_tree: Path, archs: str) -> None:
    kernels = configure(patched_tree, archs).kernels
    cuda_sources = {source for source in kernels if source.endswith(".cu")}
    assert cuda_sources >= NATIVE
    for source in cuda_sources:
        assert kernels[source], f"{source} is compiled for the compiler's default arch"
        assert set(kernels[source]) <= {"sm_120", "sm_120f"}, source


@pytest.mark.parametrize("archs", OTHERS)
def test_other_gpus_get_what_they_got(
    configure: Configure, pristine_tree: Path, patched_tree: Path, archs: str
) -> None:
    before = configure(pristine_tree, archs)
    after = configure(patched_tree, archs)
    assert after.objects == before.objects
    assert after.custom == before.custom
    assert after.fetched == before.fetched
    assert after.sources_only == before.sources_only == {"triton_kernels"}
    # Those of others hang on `if(TARGET …)`, which script mode always denies.
    for target in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        assert after.macros[target] == before.macros[target]


@pytest.mark.parametrize("archs", MIXED)
def test_a_mixed_list_loses_only_sm12x_code(
    configure: Configure, pristine_tree: Path, patched_tree: Path, archs: str
) -> None:
    before = configure(pristine_tree, archs)
    after = configure(patched_tree, archs)
    assert after.fetched == before.fetched
    assert C2X in after.kernels
    for source, codes in before.kernels.items():
        lost = set(codes) - set(after.kernels.get(source, ()))
        gained = set(after.kernels.get(source, ())) - set(codes)
        if source in NEVER_DISPATCHED:
            assert lost <= {"sm_120", "sm_120f"}, source
            assert not gained, source
            assert source in after.kernels or set(codes) == lost, source
        elif source in NATIVE:
            assert gained <= {"sm_120", "sm_120f"}, source
        else:
            assert not lost | gained, source


@pytest.mark.parametrize("archs", [*SM12X, *OTHERS, *MIXED])
def test_a_macro_is_set_exactly_where_its_source_is_compiled(
    configure: Configure, patched_tree: Path, archs: str
) -> None:
    """Declared, called and not compiled is an undefined symbol at import."""
    configured = configure(patched_tree, archs)
    macros = configured.macros["_C_stable_libtorch"]
    for macro, source in MACRO_SOURCES.items():
        if macro != "ENABLE_CUTLASS_MOE_SM120":  # its source serves other families too
            assert (macro in macros) == (source in configured.kernels), macro
        elif macro in macros:
            assert source in configured.kernels


# --- the proof that 12.x can't reach them ---------------------------------------------


def expression(tree: Path, file: str, target: str) -> ast.Expression:
    """The one expression that is assigned to a name in a file."""
    (value,) = (
        node.value
        for node in ast.walk(ast.parse((tree / file).read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == target
    )
    return ast.Expression(value)


def gpu(capability: int) -> SimpleNamespace:
    """`current_platform` on a CUDA GPU, as vllm/platforms/interface.py has it."""

    def as_int(value: int | tuple[int, int]) -> int:
        return value if isinstance(value, int) else value[0] * 10 + value[1]

    return SimpleNamespace(
        is_cuda=lambda: True,
        is_device_capability=lambda value: as_int(value) == capability,
        has_device_capability=lambda value: capability >= as_int(value),
        is_device_capability_family=lambda value: value // 10 == capability // 10,
    )


class Anything:
    """Satisfies every other condition of a gate."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *args: object) -> Anything:
        return self

    def __bool__(self) -> bool:
        return True


def gate_is_open(tree: Path, file: str, target: str, capability: int, **names: object) -> bool:
    code = compile(expression(tree, file, target), file, "eval")
    return bool(eval(code, {"current_platform": gpu(capability), **names}))


GATE_LINEAR = "vllm/model_executor/layers/fused_moe/router/gate_linear.py"
INDEXER = "vllm/model_executor/layers/sparse_attn_indexer.py"
DEEPSEEK_V2 = "vllm/model_executor/models/deepseek_v2.py"
BF16, FP32 = object(), object()


def router_gates(tree: Path, capability: int) -> dict[str, bool]:
    """GateLinear's gates for a layer that has all that the kernels ask for."""
    torch = SimpleNamespace(bfloat16=BF16, float32=FP32)

    def is_open(target: str, **names: object) -> bool:
        return gate_is_open(tree, GATE_LINEAR, target, capability, torch=torch, **names)

    arch = {name: is_open(name) for name in ("is_hopper", "is_blackwell")}
    specialized = is_open("can_use_specialized_kernels", bias=False, **arch)
    layer = SimpleNamespace(
        allow_specialized_router_gemm=specialized,
        weight=SimpleNamespace(dtype=BF16),
        DSV3_SUPPORTED_NUM_EXPERTS=[256],
        DSV3_SUPPORTED_HIDDEN_SIZES=[7168],
        DSV3_UNSUPPORTED_SHAPES=set(),
        FP32_SUPPORTED_SHAPES={(7168, 256)},
    )
    shape = {"input_size": 7168, "output_size": 256, "bias": False, "self": layer}
    dsv3 = is_open("self.allow_dsv3_router_gemm", **shape, **arch)
    layer.weight.dtype = FP32
    fp32 = is_open("self.allow_fp32_router_gemm", **shape, **arch)
    return {"dsv3_router_gemm": dsv3, "fp32_router_gemm": fp32}


def cooperative_topk_gate(tree: Path, capability: int) -> bool:
    logits = SimpleNamespace(stride=lambda dim: 4096)
    names = {"topk_tokens": 512, "num_rows": 1, "logits": logits}
    return gate_is_open(tree, INDEXER, "use_cooperative_topk", capability, **names)


def fused_a_gate(tree: Path, capability: int) -> bool:
    layer = SimpleNamespace(weight=SimpleNamespace(dtype=BF16, shape=(2112, 7168)))
    torch = SimpleNamespace(bfloat16=BF16)
    return gate_is_open(
        tree, DEEPSEEK_V2, "self._use_min_latency_gemm", capability, self=layer, torch=torch
    )


@pytest.mark.usefixtures("real")  # so that it runs for every stack
@pytest.mark.parametrize("tree", ["pristine_tree", "patched_tree"])
@pytest.mark.parametrize(
    ("capability", "is_open"), [(90, True), (100, True), (120, False), (121, False)]
)
def test_python_gates_are_shut_on_sm12x_only(
    request: pytest.FixtureRequest, tree: str, capability: int, is_open: bool
) -> None:
    root = request.getfixturevalue(tree)
    assert router_gates(root, capability) == {
        "dsv3_router_gemm": is_open,
        "fp32_router_gemm": is_open,
    }
    assert cooperative_topk_gate(root, capability) is is_open
    assert fused_a_gate(root, capability) is is_open


# Where an op is called, as opposed to defined, registered or tested.
CALLERS = {
    "cooperative_topk": {INDEXER},
    "dsv3_router_gemm": {GATE_LINEAR},
    "dsv3_fused_a_gemm": {DEEPSEEK_V2},
    "fp32_router_gemm": {GATE_LINEAR},
    "cutlass_scaled_mm_azp": {"vllm/model_executor/kernels/linear/scaled_mm/cutlass.py"},
}


# And only for SM103.
CALLERS_ONLY_IN: dict[str, dict[str, set[str]]] = {
    "0.26.0": {},
    "0.28.0": {
        "dsv3_fused_a_gemm": {
            "vllm/models/kimi_k3/nvidia/low_latency_gemm.py",
            "vllm/models/deepseek_v32/nvidia/glm52_low_latency_gemm.py",
        }
    },
}


def calls(file: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            func = node.func
            yield func.attr if isinstance(func, ast.Attribute) else func.id


def sm103_only(file: Path) -> bool:
    """Whether a module makes its plans, without which it calls no kernel, on SM103 only."""
    functions = {
        n.name: n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef)
    }
    gate = ast.unparse(functions["_is_sm103"].body[-1])
    installers = [
        function for name, function in functions.items()
        if name.startswith(("enable_", "build_", "maybe_", "try_"))
    ]  # fmt: skip
    return gate == "return current_platform.is_device_capability((10, 3))" and all(
        "not _is_sm103()" in ast.unparse(function) for function in installers
    )


def test_nobody_else_calls_them(patched_tree: Path, stack_name: str) -> None:
    found: dict[str, set[str]] = {name: set() for name in CALLERS}
    for file in (patched_tree / "vllm").rglob("*.py"):
        text = file.read_text()
        relative = file.relative_to(patched_tree).as_posix()
        if relative == "vllm/_custom_ops.py" or not any(name in text for name in CALLERS):
            continue
        for name in set(calls(file)) & CALLERS.keys():
            found[name].add(relative)
    more = {
        name: callers | CALLERS_ONLY_IN[stack_name].get(name, set())
        for name, callers in CALLERS.items()
    }
    assert found == more
    for file in CALLERS_ONLY_IN[stack_name].get("dsv3_fused_a_gemm", ()):
        assert sm103_only(patched_tree / file)


def preprocessed(file: Path, macros: Iterable[str]) -> str:
    """A C++ source without its includes, after the preprocessor."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.fail("a C++ preprocessor is needed to read the entry code")
    text = re.sub(r"^#include.*$", "", file.read_text(), flags=re.M)
    defines = [f"-D{macro}=1" for macro in macros]
    return subprocess.run(
        [compiler, "-E", "-P", "-x", "c++", *defines, "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def called_entries(text: str) -> list[str]:
    """Calls (not declarations) of per-arch entry points, in order."""
    return re.findall(r"(?<!void )\b(cutlass_\w+_sm\d+)\(", text)


def body(text: str, function: str) -> str:
    start = re.search(rf"^void {function}\([^)]*\) {{", text, re.M)
    assert start, function
    return text[start.end() : text.index("\n}", start.end())]


ENTRY = f"{CUTLASS_W8A8}/scaled_mm_entry.cu"


def test_the_entry_calls_nothing_that_is_not_compiled(
    configure: Configure, patched_tree: Path
) -> None:
    configured = configure(patched_tree, "12.1a")
    text = preprocessed(patched_tree / ENTRY, configured.macros["_C_stable_libtorch"])
    called = set(called_entries(text))
    assert called == {"cutlass_scaled_mm_sm120"}
    compiled = "".join((patched_tree / s).read_text() for s in configured.kernels)
    assert all(re.search(rf"^void {name}\(", compiled, re.M) for name in called)


def test_upstream_sends_azp_on_sm12x_into_a_trap(configure: Configure, pristine_tree: Path) -> None:
    """c2x *is* called there, by `cutlass_scaled_mm_azp`; but what is compiled traps."""
    configured = configure(pristine_tree, "12.1a")
    assert configured.kernels[C2X] == ("sm_89", "compute_89")
    text = preprocessed(pristine_tree / ENTRY, configured.macros["_C_stable_libtorch"])

    # scaled_mm: the first branch is for >= 120, and returns.
    assert called_entries(body(text, "cutlass_scaled_mm"))[0] == "cutlass_scaled_mm_sm120"
    assert "if (version_num >= 120) {" in body(text, "cutlass_scaled_mm")
    # azp: no branch for SM12x, so that 121 >= 80 goes to sm80.
    azp = body(text, "cutlass_scaled_mm_azp")
    assert called_entries(azp) == [
        "cutlass_scaled_mm_azp_sm89",
        "cutlass_scaled_mm_azp_sm80",
        "cutlass_scaled_mm_azp_sm75",
    ]
    assert "if (version_num == 89) {" in azp
    assert "if (version_num >= 80) {" in azp

    # And all that sm80's dispatch instantiates is empty from 8.9 on.
    folder = pristine_tree / CUTLASS_W8A8
    dispatch = (folder / "scaled_mm_c2x_sm80_dispatch.cuh").read_text()
    guards = re.findall(r"cutlass_2x_gemm<cutlass::arch::Sm80, (\w+),", dispatch)
    assert len(guards) == dispatch.count("cutlass_2x_gemm<") > 0
    assert set(guards) == {"enable_sm80_to_sm89"}
    common = (pristine_tree / STABLE / "cutlass_extensions/common.hpp").read_text()
    guard = common[common.index("struct enable_sm80_to_sm89") :].partition("};")[0]
    assert "#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 890" in guard
    assert 'asm("trap;")' in guard


# --- components -----------------------------------------------------------------------


@pytest.mark.parametrize("archs", SM12X)
def test_upstream_fetches_what_sm12x_cannot_use(
    configure: Configure, pristine_tree: Path, archs: str
) -> None:
    """The fault."""
    configured = configure(pristine_tree, archs)
    assert configured.fetched >= NOT_FOR_SM12X
    assert "vllm-flash-attn" not in configured.sources_only


@pytest.mark.parametrize("archs", SM12X)
def test_what_sm12x_cannot_use_is_not_fetched(
    configure: Configure, pristine_tree: Path, patched_tree: Path, archs: str
) -> None:
    before = configure(pristine_tree, archs)
    after = configure(patched_tree, archs)
    assert before.fetched - after.fetched == NOT_FOR_SM12X
    # setup.py names these targets whatever the arch.
    assert after.custom >= {
        "_flashmla_C",
        "_flashmla_extension_C",
        "_vllm_fa3_C",
        "_vllm_fa4_cutedsl_C",
        "fmha_sm100",
        "tml_fa4",
    }


@pytest.mark.parametrize("archs", SM12X)
def test_fa2_is_native_and_fa3_is_nothing(
    configure: Configure, patched_tree: Path, stubs: Path, archs: str
) -> None:
    configured = configure(patched_tree, archs)
    # Its own CMakeLists.txt, which defines FA3, does not run.
    assert "vllm-flash-attn" in configured.sources_only
    assert "_vllm_fa3_C" not in configured.objects
    sources = {
        Path(source).relative_to(stubs).name: codes
        for source, codes in configured.objects["_vllm_fa2_C"].items()
    }
    native = configured.kernels[f"{STABLE}/activation_kernels.cu"]
    # The patch `fa2-kernels`, where the series has it.
    if (patched_tree / "cmake/external_projects/fa2_switches.h").is_file():
        native = (*native, "fa2_switches.h")
    assert sources == {
        "flash_api.cpp": (),
        "flash_api_sparse.cpp": (),
        "flash_api_torch_lib.cpp": (),
        "flash_fwd_hdim128_bf16_causal_sm80.cu": native,
        "flash_fwd_hdim128_bf16_sm80.cu": native,
    }


def test_fa2_can_be_left_out(configure: Configure, patched_tree: Path) -> None:
    chosen = "_C_stable_libtorch;_moe_C_stable_libtorch;_vllm_fa4_cutedsl_C"
    configured = configure(patched_tree, "12.1a", components=chosen)
    assert configured.objects.keys() == {"_C_stable_libtorch", "_moe_C_stable_libtorch"}


@pytest.mark.parametrize(
    "name", ["_vllm_fa3_C", "_flashmla_C", "_flashmla_extension_C", "fmha_sm100", "tml_fa4"]
)
def test_asking_for_it_by_name_is_an_error(
    configure: Configure, patched_tree: Path, name: str
) -> None:
    asked = f"_C_stable_libtorch;_moe_C_stable_libtorch;{name}"
    with pytest.raises(CMakeError, match=f"{name} is in VLLM_BUILD_COMPONENTS but can't be built"):
        configure(patched_tree, "12.1a", components=asked)
    configure(patched_tree, "9.0a", components=asked)


def test_setup_lets_fa3_be_missing_in_place(pristine_tree: Path, patched_tree: Path) -> None:
    """An in-place build copies the library of each extension that is not optional."""
    assert fa3_extension(pristine_tree) == {"name": "'vllm.vllm_flash_attn._vllm_fa3_C'"}
    assert fa3_extension(patched_tree) == {
        "name": "'vllm.vllm_flash_attn._vllm_fa3_C'",
        "optional": "not BUILD_COMPONENTS",
    }


def fa3_extension(tree: Path) -> dict[str | None, str]:
    (call,) = (
        node
        for node in ast.walk(ast.parse((tree / "setup.py").read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "CMakeExtension"
        and "_vllm_fa3_C" in ast.unparse(node)
    )
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


# Python that uses what is not there on 12.x, and the condition in front of it.
@pytest.mark.parametrize(
    ("file", "condition"),
    [
        ("vllm/models/inkling/nvidia/ops/fa4_rel_attention.py", "capability.major in (10, 11)"),
        (
            "vllm/models/minimax_m3/common/indexer.py",
            "current_platform.is_cuda() and current_platform.is_device_capability_family(100)",
        ),
        (
            "vllm/v1/attention/ops/flashmla.py",
            "not current_platform.is_device_capability_family(90)",
        ),
    ],
)
def test_python_does_not_reach_what_is_left_out(
    patched_tree: Path, file: str, condition: str
) -> None:
    assert condition in re.sub(r"\s+", " ", (patched_tree / file).read_text())


# --- qutlass --------------------------------------------------------------------------


def qutlass_archs(configured: Configured) -> set[str]:
    """What qutlass' sources are told of the arch; nothing where it is not built."""
    macros = configured.definitions.get("_qutlass_C", ())
    return {macro for macro in macros if macro.startswith("TARGET_CUDA_ARCH=")}


@pytest.mark.patch("gb10-qutlass")
@pytest.mark.parametrize("archs", SM12X)
def test_upstream_compiles_qutlass_sources_that_sm12x_never_calls(
    configure: Configure, pristine_tree: Path, archs: str
) -> None:
    """The fault: what calls them is behind `TARGET_CUDA_ARCH == 100`."""
    configured = configure(pristine_tree, archs)
    assert configured.qutlass.keys() >= QUTLASS_SM100
    assert qutlass_archs(configured) == {"TARGET_CUDA_ARCH=120"}


@pytest.mark.patch("gb10-qutlass")
@pytest.mark.parametrize(
    ("archs", "cuda"),
    [
        *((archs, CUDA) for archs in [*SM12X, *OTHERS, *MIXED]),
        *((archs, "12.8.93") for archs in ["12.0a", "12.1a", "10.0a", "8.0 12.0a", "10.0a 12.0a"]),
    ],
)
def test_qutlass_loses_these_two_exactly_where_nothing_calls_them(
    configure: Configure, pristine_tree: Path, patched_tree: Path, archs: str, cuda: str
) -> None:
    before = configure(pristine_tree, archs, cuda=cuda)
    after = configure(patched_tree, archs, cuda=cuda)
    told = qutlass_archs(after)
    assert told == qutlass_archs(before)
    lost = QUTLASS_SM100 if told == {"TARGET_CUDA_ARCH=120"} else set()
    assert after.qutlass == {k: v for k, v in before.qutlass.items() if k not in lost}
    # Called and not compiled is an undefined symbol at import.
    called = QUTLASS_SM100 if told == {"TARGET_CUDA_ARCH=100"} else set()
    assert after.qutlass.keys() & QUTLASS_SM100 == called


@pytest.mark.patch("gb10-qutlass")
@pytest.mark.parametrize(
    ("archs", "told"),
    [
        ("9.0a", set()),
        ("12.1a", {"TARGET_CUDA_ARCH=120"}),
        ("8.0 12.0", {"TARGET_CUDA_ARCH=120"}),
        ("10.0a", {"TARGET_CUDA_ARCH=100"}),
        ("10.0 12.0f", {"TARGET_CUDA_ARCH=100"}),
    ],
)
def test_these_lists_are_of_every_kind(
    configure: Configure, patched_tree: Path, archs: str, told: set[str]
) -> None:
    """Else the test above could be true of nothing."""
    assert qutlass_archs(configure(patched_tree, archs)) == told
