"""The patch `jit-attention`: DeepseekV4FlashInferSM120JitAttention and its gate.

No SM12x GPU: the class and FlashInfer's Python are the real ones. FlashInfer's kernels are computed
in PyTorch from the packed cache (support/dsv4_sm120.py), and the results compared with dense
attention; or the runner is a fake that records its arguments.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from sm121.pins.model import Stack
from support.dsv4 import run_scenarios, unpacked

pytestmark = pytest.mark.patch("jit-attention")
GATE = "VLLM_DSV4_SM120_JIT_ATTN"
JIT = "DeepseekV4FlashInferSM120JitAttention"
STOCK = "DeepseekV4FlashInferSM120Attention"
NAMES = [
    "stock_scratch", "jit_scratch", "dense", "draft", "arguments", "zero_tokens", "strided",
    "reserve", "reserve_late", "too_small", "undispatchable", "at_start", "widths", "log", "not_sm12x",
    "other_runner",
]  # fmt: skip


@pytest.fixture(scope="module")
def wheel(flashinfer_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(flashinfer_wheel, tmp_path_factory.mktemp("flashinfer"))


@pytest.fixture(scope="module")
def run(torch_python: Path, patched_tree: Path, wheel: Path) -> dict[str, Any]:
    return run_scenarios(torch_python, patched_tree, wheel, *NAMES)


@pytest.fixture(scope="module")
def before(torch_python: Path, pristine_tree: Path, wheel: Path) -> dict[str, Any]:
    return run_scenarios(torch_python, pristine_tree, wheel, "stock_scratch")


# --- the gate -----------------------------------------------------------------------------------

BACKENDS = (
    "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_DSV4",
    "FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4",
)  # fmt: skip


def select(tree: Path, gate: bool, major: int, backend: str | None) -> str:
    """What _select_dsv4_attn_cls of the tree's model.py picks."""
    module = ast.parse((tree / "vllm/models/deepseek_v4/nvidia/model.py").read_text())
    wanted = ("_get_sm12_attn_cls", "_select_dsv4_attn_cls")
    body = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    enum = SimpleNamespace(**{name: SimpleNamespace(name=name) for name in BACKENDS})
    capability = SimpleNamespace(major=major, minor=0)
    names: dict[str, Any] = {
        "envs": SimpleNamespace(**{GATE: gate}),
        "current_platform": SimpleNamespace(get_device_capability=lambda: capability),
        "AttentionBackendEnum": enum,
        "VllmConfig": object,
        "DeepseekV4Attention": object,
    }
    for cls in (JIT, STOCK, "DeepseekV4FlashInferMLAAttention", "DeepseekV4FlashMLAAttention"):
        names[cls] = type(cls, (), {})
    exec(compile(ast.Module(body=body, type_ignores=[]), "model.py", "exec"), names)
    chosen = getattr(enum, backend) if backend else None
    config = SimpleNamespace(attention_config=SimpleNamespace(backend=chosen))
    return names["_select_dsv4_attn_cls"](config).__name__


@pytest.mark.parametrize("backend", [None, *BACKENDS[2:]])
@pytest.mark.parametrize("major", [9, 10, 12])
def test_gate_is_off_by_default(
    patched_tree: Path, pristine_tree: Path, major: int, backend: str | None
) -> None:
    chosen = select(patched_tree, False, major, backend)
    assert chosen == select(pristine_tree, False, major, backend)
    assert chosen != JIT


@pytest.mark.parametrize("backend", [None, "FLASHINFER_MLA_SPARSE_DSV4"])
def test_gate_is_at_both_ways_to_the_sm12x_class(patched_tree: Path, backend: str | None) -> None:
    assert select(patched_tree, False, 12, backend) == STOCK
    assert select(patched_tree, True, 12, backend) == JIT


def test_upstream_has_no_gate(pristine_tree: Path) -> None:
    assert select(pristine_tree, True, 12, None) == STOCK


@pytest.mark.parametrize(
    ("major", "backend"),
    [
        (9, None),
        (10, None),
        (10, "FLASHINFER_MLA_SPARSE_DSV4"),
        (12, "FLASHMLA_SPARSE"),
        (12, "FLASHMLA_SPARSE_DSV4"),
    ],
)
def test_gate_that_cannot_engage_is_an_error(
    patched_tree: Path, major: int, backend: str | None
) -> None:
    with pytest.raises(ValueError, match=f"{GATE}=1 needs an SM12x GPU and FlashInfer") as e:
        select(patched_tree, True, major, backend)
    assert f"major={major}" in str(e.value)
    assert (backend or "auto") in str(e.value)


def test_gate_is_a_registered_variable(patched_tree: Path) -> None:
    """vllm/envs.py warns of, or refuses, what it does not know."""
    script = (
        "import runpy, sys\n"
        f"v = runpy.run_path(sys.argv[1])['environment_variables'][{GATE!r}]\n"
        "print(v())\n"
    )
    shown = []
    for value in (None, "0", "1"):
        env = {} if value is None else {GATE: value}
        command = [sys.executable, "-c", script, patched_tree / "vllm/envs.py"]
        shown.append(subprocess.check_output(command, text=True, env=env).strip())
    assert shown == ["False", "False", "True"]


def test_one_line_says_that_the_gate_engaged(run: dict[str, Any], stack: Stack) -> None:
    (line,) = run["log"]["jit"]
    assert GATE in line
    assert JIT in line
    assert f"FlashInfer {stack.family['flashinfer-python'].version}." in line
    assert run["log"]["stock"] == []


# --- results ------------------------------------------------------------------------------------

RATIOS = ["1", "4", "128"]  # sliding window only, C4A and C128A layers
KERNELS = {
    "decodes": [["decode", 7]],
    "prefill 64": [["decode", 64]],
    "prefill 65": [["prefill", 65]],
    "decode 64": [["decode", 64]],
    "decode 65": [["prefill", 65]],
    # two chunks of prefills (four requests, then one), then the decodes
    "mixed": [["prefill", 110], ["decode", 30], ["decode", 3]],
}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("batch", KERNELS)
def test_result_is_that_of_dense_attention(run: dict[str, Any], ratio: str, batch: str) -> None:
    result = run["dense"][f"{ratio} {batch}"]
    assert result["error"] < 0.01
    assert result["kernels"] == KERNELS[batch]
    assert result["like_stock"]


@pytest.mark.parametrize(("tokens", "kernel"), [("15", "decode"), ("70", "prefill")])
def test_dspark_draft_block_is_that_of_dense_attention(
    run: dict[str, Any], tokens: str, kernel: str
) -> None:
    deviation, calls = run["draft"][tokens]
    assert deviation < 0.01
    assert [call["kernel"] for call in calls] == [kernel]


# --- what the runner is given -------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 64, 65])
@pytest.mark.parametrize(("heads", "padded"), [(12, 16), (32, 32), (64, 64)])
@pytest.mark.parametrize("ratio", RATIOS)
def test_arguments(run: dict[str, Any], ratio: str, heads: int, padded: int, tokens: int) -> None:
    call = run["arguments"][f"{ratio} {heads} {tokens}"]
    width = {"1": 0, "4": 512, "128": 128}[ratio]
    page = {"1": 0, "4": 64, "128": 2}[ratio]
    splits = 2 + width // 64
    expected: dict[str, tuple[list[int], str]] = {
        "q": ([tokens, padded, 512], "bfloat16"),
        "output": ([tokens, padded, 512], "bfloat16"),
        "indices": ([tokens, 128], "int32"),
        "topk_length": ([tokens], "int32"),
        "attn_sink": ([padded], "float32"),
        "out_lse": ([tokens, padded], "float32"),
    }
    if width:
        expected["extra_indices"] = ([tokens, width], "int32")
        expected["extra_topk_length"] = ([tokens], "int32")
    if tokens <= 64:
        expected["mid_out"] = ([tokens, padded, splits, 512], "bfloat16")
        expected["mid_lse"] = ([tokens, padded, splits], "float32")
    for name, (shape, dtype) in expected.items():
        assert (call[name]["shape"], call[name]["dtype"]) == (shape, dtype), name
        assert call[name]["contiguous"], name
    for name in ("out_lse", "mid_out", "mid_lse"):
        assert name not in expected or call[name]["reserved"], name
    for name, size, address in zip(
        ("kv_cache", "extra_kv_cache"), (64, page), call["caches"], strict=True
    ):
        if size == 0:
            continue
        assert call[name]["shape"][1:] == [size, 584]
        assert call[name]["dtype"] == "uint8"
        assert call[name]["address"] == address
    assert call["sm_scale"] == 512**-0.5
    assert call["created"] == {"device": "cpu"}
    # All else is left out or None.
    given = {name for name, value in call.items() if value is not None}
    both = {"kv_cache", "sm_scale", "created", "caches"}
    assert given == set(expected) | both | ({"extra_kv_cache"} if width else set())


def test_no_tokens_no_call(run: dict[str, Any]) -> None:
    assert run["zero_tokens"] == {"calls": 0, "allocated": 0}


@pytest.mark.parametrize(
    "name", ["query", "out", "swa_indices", "swa_lens", "extra_indices", "extra_lens"]
)
def test_not_contiguous_is_refused(run: dict[str, Any], name: str) -> None:
    """FlashInfer's decode kernel would read or write elsewhere, and say nothing."""
    assert run["strided"]["none"] == "nothing raised"
    assert run["strided"][name] != "nothing raised"


# --- scratch ------------------------------------------------------------------------------------


SCRATCH = {"splits": 130, "in_workspace": False}


def test_upstream_allocates_scratch_on_each_call(before: dict[str, Any]) -> None:
    """What the patch is for: a million tokens of context are more than the workspace holds, and
    the LSE is new on each call in any case."""
    assert before["stock_scratch"] == {**SCRATCH, "moved": [True] * 3}


def test_stock_class_does_as_before(run: dict[str, Any]) -> None:
    assert run["stock_scratch"] == {**SCRATCH, "moved": [True] * 3}


def test_scratch_does_not_move(run: dict[str, Any]) -> None:
    assert run["jit_scratch"] == {**SCRATCH, "moved": [False] * 3}


@pytest.mark.parametrize("first", ["swa", "c4a", "c128a", "draft"])
def test_first_dummy_run_reserves_for_all_layers(run: dict[str, Any], first: str) -> None:
    result = run["reserve"][first]
    # 32 heads; 128 window and 1024 compressed indices of 131072 tokens make 2 + 16 splits
    assert result["allocations"] == [
        {"num_heads": "32", "num_splits": "18", "max_num_tokens": "256", "device": "cuda:0"}
    ]
    rows = 64 * 32 * 18
    assert result["elements"] == {"mid_out": rows * 512, "mid_lse": rows, "out_lse": 256 * 32}
    assert result["dtypes"] == {
        "mid_out": "torch.bfloat16", "mid_lse": "torch.float32", "out_lse": "torch.float32",
    }  # fmt: skip
    assert result["before"]
    assert result["shared"]
    assert result["zeroed"]
    # Decode and prefill in each layer, under capture, always in the same three buffers
    assert result["calls"] == 8
    assert result["addresses"] == 3


def test_scratch_is_not_made_during_capture(run: dict[str, Any]) -> None:
    result = run["reserve_late"]
    assert "before CUDA graphs are captured" in result["capturing"]
    assert result["later"] < 0.01


def test_scratch_of_a_captured_layer_is_never_replaced(run: dict[str, Any]) -> None:
    assert run["reserve_late"]["new_layer_keeps_old"]


def test_scratch_does_not_grow(run: dict[str, Any]) -> None:
    result = run["too_small"]
    assert "mid_out was reserved for 2097152 elements" in result["wide"]
    assert "(64, 16, 18, 512) is needed" in result["wide"]
    assert "out_lse was reserved for 4096 elements" in result["many"]
    assert result["calls"] == []


def test_reserved_width_is_that_of_the_metadata(run: dict[str, Any], stack_name: str) -> None:
    """DSpark's as DeepseekSparseSWAMetadataBuilder computes it; C128A's as the sizes of its buffer
    in DeepseekV4FlashMLAMetadataBuilder: one in 128 tokens, rounded up to 128."""
    for heads in (16, 32, 64):
        for k in range(1, 33):
            # The smallest that FlashInfer has; from vLLM 0.28 on the next multiple of 64.
            width = {"0.26.0": 512, "0.28.0": 192}[stack_name]
            assert run["widths"][f"{heads} {k}"] == [width, width]
    for length, width in (
        (1, 128), (128, 128), (16384, 128), (16385, 256), (131072, 1024), (1 << 20, 8192),
    ):  # fmt: skip
        assert run["widths"][f"c128a {length}"] == width


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("decode width", ["decode", "5 tokens", "16 heads", "top-k 320", "page size 64"]),
        ("decode page", ["decode", "16 heads", "top-k 128", "page size 32"]),
        ("decode heads", ["decode", "48 heads", "top-k 128", "page size 64"]),
        ("prefill width", ["prefill", "65 tokens", "16 heads", "top-k 320", "page size 64"]),
        ("prefill page", ["prefill", "16 heads", "top-k 128", "page size 32"]),
        ("prefill heads", ["prefill", "24 heads", "top-k 128"]),
        ("prefill extra width", ["prefill", "top-k 512", "compressed cache: top-k 512"]),
        ("prefill extra page", ["compressed cache: top-k 512, page size 128"]),
    ],
)
def test_shape_without_a_kernel(run: dict[str, Any], name: str, parts: list[str]) -> None:
    message = run["undispatchable"][name]
    assert "FlashInfer has no SM120" in message
    assert not [part for part in parts if part not in message], message


@pytest.mark.parametrize(
    "name",
    ["decode 8 heads", "decode extra page", "prefill 512", "prefill extra", "prefill extra page 2"],
)
def test_shape_with_a_kernel(run: dict[str, Any], name: str) -> None:
    assert run["undispatchable"][name] == "nothing raised"


def test_layer_that_can_not_run_is_not_made(run: dict[str, Any], stack_name: str) -> None:
    """From vLLM 0.28 on it is the stock class that refuses, by the next multiple of 64."""
    result = run["at_start"]
    assert [result[f"k {k}"] for k in (5, 384, 896)] == ["nothing raised"] * 3
    between, above, heads = {
        "0.26.0": ("nothing raised", "DSpark needs 1025", "16 heads, top-k 128, page size 64"),
        "0.28.0": (
            "(num_q_heads=16, top_k=576)",
            "(num_q_heads=16, top_k=1088)",
            "(num_q_heads=16, top_k=128)",
        ),
    }[stack_name]
    assert between in result["k 385"]
    assert above in result["k 897"]
    assert heads in result["heads"]


def test_only_sm12x(run: dict[str, Any]) -> None:
    result = run["not_sm12x"]
    assert result["sm120"] == result["sm121"] == "nothing raised"
    for name in ("sm90", "sm100", "gfx12"):
        assert f"{GATE}=1 needs an SM12x GPU" in result[name]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("argument renamed", "_SparseMLAPagedAttentionRunner.run is (self, q, "),
        ("argument added", "_SparseMLAPagedAttentionRunner.run is (self, q, "),
        ("keyword made positional", "sm_scale, topk_length, attn_sink"),
        ("class gone", "_SparseMLAPagedAttentionRunner.run is missing"),
        ("predicate gone", "_decode_dsv4_dispatchable is missing"),
        ("tile of 32", "_BI is 32 instead of 64"),
        ("limit of 128", "_DECODE_MAX_TOKENS is 128 instead of 64"),
    ],
)
def test_other_flashinfer_is_refused(
    run: dict[str, Any], stack: Stack, change: str, part: str
) -> None:
    message = run["other_runner"][change]
    assert part in message
    assert "FlashInfer 0.7.0" in message
    known = Version(stack.family["flashinfer-python"].version).base_version
    assert f"install FlashInfer {known}." in message


def test_flashinfer_without_the_module_is_refused(run: dict[str, Any]) -> None:
    assert "needs flashinfer.mla._sparse_mla_sm120" in run["other_runner"]["module gone"]


def test_annotations_of_the_runner_do_not_matter(run: dict[str, Any]) -> None:
    assert run["other_runner"]["annotation and default"] == "nothing raised"
