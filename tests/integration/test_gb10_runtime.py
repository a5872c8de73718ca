"""The patches `gb10-warmup`, `gb10-memory` and `gb10-docs`.

Nothing of vLLM is imported (it wants torch): the functions under test are cut out of
their sources by AST and run as they are, with stand-ins for what they call.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

KERNEL_WARMUP = "vllm/model_executor/warmup/kernel_warmup.py"
GPU_WORKER = "vllm/v1/worker/gpu_worker.py"
TROUBLESHOOTING = "docs/usage/troubleshooting.md"
GIB = 1 << 30


def run_source(nodes: list[ast.stmt], namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute statements without evaluating their annotations."""
    module = ast.Module(body=nodes, type_ignores=[])
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "<cut out>", "exec", flags, dont_inherit=True), namespace)
    return namespace


# --- warm-up --------------------------------------------------------------------------


def gpu(capability: int) -> SimpleNamespace:
    """`current_platform` on a CUDA GPU, as vllm/platforms/interface.py has it."""
    return SimpleNamespace(
        has_device_capability=lambda value: capability >= value,
        is_device_capability_family=lambda value: value // 10 == capability // 10,
    )


def warms_router_gemm(
    tree: Path, capability: int, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether `kernel_warmup` of this tree warms the CuTeDSL router GEMM."""
    wanted = {"kernel_warmup", "_uses_ll_bf16_router_gemm"}
    functions = [
        node
        for node in ast.parse((tree / KERNEL_WARMUP).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in wanted
    ]
    msa = "vllm.model_executor.warmup.minimax_m3_msa_warmup"
    fake = ModuleType(msa)
    fake.minimax_m3_msa_warmup = MagicMock()  # type: ignore[attr-defined]
    for name in (".".join(msa.split(".")[:n]) for n in range(1, 4)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, msa, fake)

    loaded = {
        node.id
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    builtins = dir(__builtins__) if isinstance(__builtins__, ModuleType) else __builtins__
    namespace: dict[str, Any] = {name: MagicMock() for name in loaded if name not in builtins}
    namespace["current_platform"] = gpu(capability)
    namespace["has_flashinfer"] = lambda: False
    warmed = namespace["_warmup_ll_bf16_router_gemm"] = MagicMock()
    run_source(list(functions), namespace)

    worker = MagicMock()
    worker.model_runner.attn_groups = []
    worker.vllm_config.model_config.architectures = [architecture]
    namespace["kernel_warmup"](worker)
    return warmed.called


def test_upstream_warms_a_router_gemm_that_sm12x_never_uses(
    pristine_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault."""
    assert warms_router_gemm(pristine_tree, 121, "DeepseekV4ForCausalLM", monkeypatch)


@pytest.mark.stacks("0.26.0")
@pytest.mark.parametrize("architecture", ["InklingForCausalLM", "InklingMTPModel"])
def test_the_router_gemm_is_warmed_for_inkling(
    patched_tree: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Its gate has a condition of its own, which 12.x meets. From 0.28 on only the shapes of
    GateLinear modules are warmed, which Inkling's gate is not: test_who_uses_the_router_gemm."""
    assert warms_router_gemm(patched_tree, 121, architecture, monkeypatch)


@pytest.mark.parametrize(
    ("capability", "architecture", "warmed"),
    [
        (121, "DeepseekV4ForCausalLM", False),
        (120, "DeepseekV3ForCausalLM", False),
        (90, "DeepseekV3ForCausalLM", True),
        (100, "DeepseekV4ForCausalLM", True),
        (89, "DeepseekV3ForCausalLM", False),
    ],
)
def test_the_router_gemm_is_warmed_where_it_is_used(
    patched_tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: int,
    architecture: str,
    warmed: bool,
) -> None:
    assert warms_router_gemm(patched_tree, capability, architecture, monkeypatch) is warmed


def test_who_uses_the_router_gemm(patched_tree: Path, stack_name: str) -> None:
    users = {
        file.relative_to(patched_tree / "vllm").as_posix()
        for file in (patched_tree / "vllm").rglob("*.py")
        if re.search(r"cute_dsl(\.ll_bf16)? import", file.read_text())
        and "ll_bf16" in file.read_text()
    }
    inkling = {"models/inkling/nvidia/moe.py"}
    others = {"0.26.0": set(), "0.28.0": {"models/inkling/amd/moe.py"}}
    assert users == inkling | others[stack_name] | {
        "model_executor/layers/fused_moe/router/gate_linear.py",
        "model_executor/warmup/kernel_warmup.py",
    }
    for name in inkling:
        tree = ast.parse((patched_tree / "vllm" / name).read_text())
        classes = {n.name: n.bases for n in tree.body if isinstance(n, ast.ClassDef)}
        assert ast.unparse(classes["InklingGate"][0]) == "nn.Module"


# --- unified memory -------------------------------------------------------------------

WEIGHTS = 40 * GIB
PEAK = 2 * GIB
REQUESTED = 100 * GIB
FREE_AT_FIRST = 110 * GIB


def available_memory(
    tree: Path, *, integrated: bool, non_torch: int, free_after: int
) -> tuple[int, MagicMock]:
    """What `Worker.determine_available_memory` of this tree gives to the KV cache."""
    (worker_class,) = (
        node
        for node in ast.parse((tree / GPU_WORKER).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Worker"
    )
    (function,) = (
        node
        for node in worker_class.body
        if isinstance(node, ast.FunctionDef) and node.name == "determine_available_memory"
    )
    function.decorator_list = []

    result = SimpleNamespace(
        before_profile=SimpleNamespace(torch_peak=0),
        after_profile=SimpleNamespace(free_memory=free_after),
        torch_peak_increase=PEAK,
        non_torch_increase=non_torch,
        weights_memory=WEIGHTS,
        # From 0.28 on, vllm/utils/mem_utils.py: PyTorch has reserved the weights by then.
        total_consumed=WEIGHTS + non_torch,
        transient_peak_headroom=PEAK,
        non_kv_cache_memory=WEIGHTS + non_torch + PEAK,
    )

    @contextlib.contextmanager
    def memory_profiling(*args: object, **kwargs: object) -> Iterator[SimpleNamespace]:
        yield result

    none = object()
    torch = MagicMock()
    torch.accelerator.memory_stats.return_value = {"allocated_bytes.all.peak": PEAK}
    logger = MagicMock()
    namespace: dict[str, Any] = {
        "CUDAGraphMode": SimpleNamespace(NONE=none),
        "current_platform": SimpleNamespace(
            is_cuda_alike=lambda: True, is_integrated_gpu=lambda index: integrated
        ),
        "envs": SimpleNamespace(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=True),
        "format_gib": lambda size: f"{size / GIB:.2f}",
        "logger": logger,
        "maybe_apply_startup_plan": lambda worker: None,
        "memory_profiling": memory_profiling,
        "reserve_mm_ipc_gpu_memory": lambda size, *config: size,
        "torch": torch,
    }
    run_source([function], namespace)

    worker = MagicMock()
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
    worker.init_snapshot = SimpleNamespace(free_memory=FREE_AT_FIRST, total_memory=120 * GIB)
    worker.requested_memory = REQUESTED
    worker.vllm_config.compilation_config.cudagraph_mode = none
    worker._reserve_mm_ipc_gpu_memory = lambda size: size
    return namespace["determine_available_memory"](worker), logger


def test_upstream_dies_when_the_host_releases_unified_memory(pristine_tree: Path) -> None:
    """The fault."""
    with pytest.raises(AssertionError, match="Error in memory profiling"):
        available_memory(
            pristine_tree, integrated=True, non_torch=-45 * GIB, free_after=FREE_AT_FIRST + GIB
        )


def test_upstream_gives_released_memory_to_the_cache(pristine_tree: Path) -> None:
    """The fault behind it: also without the assertion, the cache would be too large."""
    size, _ = available_memory(
        pristine_tree, integrated=True, non_torch=-10 * GIB, free_after=FREE_AT_FIRST - GIB
    )
    assert size == REQUESTED - WEIGHTS - PEAK + 10 * GIB


@pytest.mark.parametrize("free_after", [FREE_AT_FIRST + GIB, FREE_AT_FIRST, FREE_AT_FIRST - GIB])
def test_released_unified_memory_is_reported_and_left_alone(
    patched_tree: Path, free_after: int
) -> None:
    size, logger = available_memory(
        patched_tree, integrated=True, non_torch=-10 * GIB, free_after=free_after
    )
    assert size == REQUESTED - WEIGHTS - PEAK
    (call,) = logger.warning.call_args_list
    assert "10.00 GiB of the unified memory" in call.args[0] % call.args[1:]


@pytest.mark.parametrize("non_torch", [0, GIB, 3 * GIB])
@pytest.mark.parametrize("integrated", [True, False])
def test_an_undisturbed_profile_is_what_it_was(
    pristine_tree: Path, patched_tree: Path, integrated: bool, non_torch: int
) -> None:
    sizes = set()
    for tree in (pristine_tree, patched_tree):
        size, logger = available_memory(
            tree, integrated=integrated, non_torch=non_torch, free_after=FREE_AT_FIRST - WEIGHTS
        )
        assert not logger.warning.called
        sizes.add(size)
    assert sizes == {REQUESTED - WEIGHTS - PEAK - non_torch}


def test_a_discrete_gpu_is_not_corrected(pristine_tree: Path, patched_tree: Path) -> None:
    for tree in (pristine_tree, patched_tree):
        size, logger = available_memory(
            tree, integrated=False, non_torch=-GIB, free_after=FREE_AT_FIRST - WEIGHTS
        )
        assert size == REQUESTED - WEIGHTS - PEAK + GIB
        assert not logger.warning.called


def test_a_discrete_gpu_still_refuses(pristine_tree: Path, patched_tree: Path) -> None:
    for tree in (pristine_tree, patched_tree):
        with pytest.raises(AssertionError, match="Error in memory profiling"):
            available_memory(
                tree, integrated=False, non_torch=-45 * GIB, free_after=FREE_AT_FIRST + GIB
            )


# --- documentation --------------------------------------------------------------------

VARIABLES = {"TRITON_PTXAS_BLACKWELL_PATH", "DG_JIT_USE_NVRTC", "DG_JIT_NVCC_COMPILER"}


def documented(tree: Path) -> set[str]:
    return VARIABLES & set(re.findall(r"\b[A-Z_]+\b", (tree / TROUBLESHOOTING).read_text()))


def test_upstream_does_not_name_the_jit_variables(pristine_tree: Path) -> None:
    """The fault: all it names is TRITON_PTXAS_PATH, which Blackwell no longer reads."""
    assert documented(pristine_tree) == set()


def test_the_jit_variables_are_documented(patched_tree: Path) -> None:
    assert documented(patched_tree) == VARIABLES
