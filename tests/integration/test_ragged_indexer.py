"""The patch `ragged-indexer`: decode metadata of DeepSeek's sparse indexer under padding.

vLLM is not imported (it wants a GPU build and half of PyPI). `scenarios` cuts the real
metadata builder, the real Triton kernel and the real decode step out of a tree and runs
them, in a Python that has torch, with stand-ins for DeepGEMM and the top-k kernel that
refuse what the real ones refuse. It runs once a tree; the tests judge what it prints.
"""

import ast
import inspect
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.patch("ragged-indexer")
DEEP_GEMM_ASSERTIONS = {"weights", "block_table", "context_lens", "schedule_meta"}


def scenarios(tree: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run in another Python, so everything that it needs is inside."""
    import ast
    import dataclasses
    import functools
    import importlib
    import pathlib
    import re
    import types

    torch: Any = importlib.import_module("torch")
    indexer_file = "vllm/v1/attention/backends/mla/indexer.py"
    layer_file = "vllm/model_executor/layers/sparse_attn_indexer.py"
    rocm_file = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"
    TOPK = 512
    NS = types.SimpleNamespace

    def text(name: str) -> str:
        return (pathlib.Path(tree) / name).read_text(encoding="utf-8")

    is_0_28 = "block_table_width: int" in text(indexer_file)

    @functools.cache
    def compiled(name: str, wanted: frozenset[str]) -> Any:
        nodes = [
            node
            for node in ast.parse(text(name)).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted
        ]
        assert {node.name for node in nodes} == wanted, "the source has moved"
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                decorators = node.decorator_list
                node.decorator_list = [d for d in decorators if "triton" in ast.unparse(d)]
        return to_code(name, nodes)

    def to_code(name: str, nodes: list[Any]) -> Any:
        module = ast.Module(body=nodes, type_ignores=[])
        flags = importlib.import_module("__future__").annotations.compiler_flag
        return compile(module, name, "exec", flags, dont_inherit=True)

    def load(name: str, wanted: set[str], namespace: dict[str, Any]) -> dict[str, Any]:
        exec(compiled(name, frozenset(wanted)), namespace)
        return namespace

    # --- Triton, as far as `_prepare_uniform_decode_kernel` goes ----------------------

    class Pointer:
        def __init__(self, memory: Any, offset: Any) -> None:
            self.memory, self.offset = memory, offset

        def __add__(self, other: Any) -> "Pointer":
            return Pointer(self.memory, self.offset + other)

    def pointer(tensor: Any) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return Pointer(tensor.as_strided((size,), (1,), 0), tensor.storage_offset())

    class Language:
        constexpr = int
        program = 0

        def program_id(self, axis: int) -> int:
            assert axis == 0
            return self.program

        def load(self, where: Pointer, mask: Any = None) -> Any:
            if mask is None:
                return int(where.memory[where.offset])
            return where.memory[torch.where(mask, where.offset, 0)]

        def store(self, where: Pointer, value: Any, mask: Any = None) -> None:
            if mask is None:
                where.memory[where.offset] = value
            else:
                where.memory[where.offset[mask]] = value[mask]

        def maximum(self, a: int, b: int) -> int:
            return max(a, b)

        def range(self, *args: int) -> Any:
            return range(*args)

        def arange(self, start: int, end: int) -> Any:
            return torch.arange(start, end)

    tl = Language()

    class Jit:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*args: Any, **meta: Any) -> None:
                args = tuple(pointer(a) if isinstance(a, torch.Tensor) else a for a in args)
                for tl.program in range(grid[0]):
                    self.function(*args, **meta)

            return launch

    # --- what the decode step calls ---------------------------------------------------

    def pack(x: Any, lengths: Any, pad_value: float = -float("inf")) -> Any:
        out = torch.full((len(lengths), int(lengths.max()), *x.shape[1:]), pad_value, dtype=x.dtype)
        start = 0
        for row, length in enumerate(lengths.tolist()):
            out[row, :length] = x[start : start + length]
            start += length
        return out

    def unpack(packed: Any, lengths: Any) -> Any:
        return torch.cat([packed[row, :n] for row, n in enumerate(lengths.tolist())])

    def schedule(context_lens: Any, block_kv: int, num_sms: int, indices: Any = None) -> Any:
        assert context_lens.dim() == 2, "metadata"
        assert context_lens.is_contiguous(), "metadata"
        assert context_lens.dtype == torch.int32, "metadata"
        assert min(context_lens.shape) > 0, "metadata"
        out = torch.zeros((num_sms + 1, 2), dtype=torch.int32)
        out[num_sms, 0] = context_lens.shape[0]  # where the last SM ends
        return out

    # `const uint32_t seq_len = params.lengths[row_idx]`, and above the threshold all CTAs
    # of a row wait for each other, though all but one have left by `max_seq_len`. A row
    # has several CTAs if it does not fit into the shared memory of one. From 0.28 on the
    # kernel clamps what it reads.
    top_k_source = text("csrc/libtorch_stable/persistent_topk.cuh")
    clamped = "const int32_t raw_len = params.lengths[row_idx];" in top_k_source
    assert clamped != ("const uint32_t seq_len = params.lengths[row_idx];" in top_k_source)
    assert "max_seq_len <= RADIX_THRESHOLD) return;" in top_k_source
    threshold = int(re.findall(r"RADIX_THRESHOLD = (\d+);", top_k_source)[0])
    shared = int(re.findall(r"// (\d+)\nconstexpr uint32_t RADIX_THRESHOLD", top_k_source)[0])
    one_cta = (shared - ((256 + 256 + 5) * 4 + 12)) // 4  # up to 4 rows; see topk.cu

    class Run:
        """One decode step."""

        def __init__(self, case: dict[str, Any]) -> None:
            self.case = case
            self.requests: list[tuple[int, int]] = case["requests"]
            self.seen: dict[str, Any] = {"rows": None, "q_shape": None}

        def builder(self) -> Any:
            case = self.case
            family = 100 if case["fp4"] else 120

            class Base:
                def __init__(self, **kwargs: Any) -> None:
                    vars(self).update(kwargs)

            spec = NS(block_size=256, storage_block_size=64, compress_ratio=case["ratio"])
            namespace = load(
                "vllm/v1/attention/backends/utils.py", {"split_decodes_and_prefills"}, {}
            )
            namespace |= {
                "torch": torch,
                "dataclass": dataclasses.dataclass,
                "tl": tl,
                "triton": NS(jit=Jit),
                "AttentionMetadataBuilder": Base,
                "MLAAttentionSpec": NS,
                "logger": NS(info_once=lambda *args: None),
                "num_compute_units": lambda index: 4,
                "get_kv_cache_shard_count": lambda: 1,
                "get_max_prefill_buffer_size": lambda config: 0,
                "cdiv": lambda a, b: -(-a // b),
                "has_deep_gemm": lambda: True,
                "get_paged_mqa_logits_metadata": schedule,
                # From 0.28 on:
                "DSA_INDEXER_KV_DTYPES": ("fp8", "mxfp4"),
                "native_next_n_supported": lambda n: n in (1, 2),
                "get_compressed_slot_mapping": lambda *args, out: out[: args[0]],
                "current_platform": NS(
                    is_cuda=lambda: True,
                    is_device_capability_family=lambda f: f == family,
                ),
            }
            wanted = {
                "_prepare_uniform_decode_kernel",
                "DeepSeekV32IndexerDecodeMetadata",
                "DeepseekV32IndexerMetadata",
                "DeepseekV32IndexerMetadataBuilder",
            }
            width = {}
            if is_0_28:
                wanted |= {
                    "dsa_indexer_uses_fp4",
                    "_supports_native_decode",
                    "_supports_varlen_paged_mqa_logits",
                }
                width = {"block_table_width": 4}
            load(indexer_file, wanted, namespace)
            speculative = NS(num_speculative_tokens=case["next_n"] - 1)
            config = NS(
                scheduler_config=NS(max_num_batched_tokens=64, max_num_seqs=64),
                parallel_config=NS(
                    decode_context_parallel_size=1,
                    prefill_context_parallel_size=1,
                    cp_kv_cache_interleave_size=1,
                ),
                speculative_config=speculative if case["next_n"] > 1 else None,
                model_config=NS(max_model_len=1024),
                attention_config=NS(
                    use_fp4_indexer_cache=case["fp4"],
                    resolve_indexer_kv_dtype=lambda default: "mxfp4" if case["fp4"] else default,
                ),
            )
            builder = namespace["DeepseekV32IndexerMetadataBuilder"](
                vllm_config=config, kv_cache_spec=spec, device=torch.device("cpu"), **width
            )
            # What earlier, larger steps left in the persistent buffers.
            builder.decode_seq_lens_buffer.fill_(77)
            builder.expanded_block_table_buffer.fill_(99)
            if case["ratio"] > 1:
                builder.expanded_seq_lens_buffer.fill_(77)
            return builder

        def metadata(self) -> Any:
            lens = [query for query, _ in self.requests]
            starts = torch.tensor([0, *lens]).cumsum(0).int()
            common = NS(
                num_reqs=len(lens),
                num_actual_tokens=self.case["tokens"],
                max_query_len=max(lens),
                max_seq_len=1024,
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=torch.tensor([seq for _, seq in self.requests], dtype=torch.int32),
                slot_mapping=torch.zeros(self.case["tokens"], dtype=torch.int64),
                block_table_tensor=torch.tensor(
                    [[row + 1 if query else 0] * 4 for row, query in enumerate(lens)],
                    dtype=torch.int32,
                ),
                dcp_local_seq_lens=None,
                is_prefilling=None,
                seq_lens_cpu_upper_bound=None,
            )
            return self.builder().build(0, common)

        def logits(
            self, qs: Any, kv: Any, weights: Any, lens: Any, table: Any, plan: Any, **rest: Any
        ) -> Any:
            """`fp8_fp4_paged_mqa_logits` in csrc/apis/attention.hpp of DeepGEMM."""
            q, q_scale = qs
            batch, next_n = q.shape[:2]
            self.seen["q_shape"] = [batch, next_n]
            assert q_scale is None or q_scale.shape == q.shape, "q_scale"
            assert q_scale is None or (q_scale == q).all(), "q_scale"
            assert weights.shape[0] == batch * next_n, "weights"
            assert table.shape[0] == batch, "block_table"
            assert lens.shape == (batch, next_n), "context_lens"
            assert lens.is_contiguous(), "context_lens"
            assert int(plan[-1, 0]) == batch, "schedule_meta"  # else it reads past lens
            self.seen["rows"] = [
                [
                    None if q[b, i].isinf().any() else int(q[b, i].flatten()[0]),
                    int(weights[b * next_n + i, 0]),
                    int(lens[b, i]),
                    int(table[b, 0]),
                ]
                for b in range(batch)
                for i in range(next_n)
            ]
            return torch.zeros(batch * next_n, self.case.get("width", 1024))

        def top_k(self, logits: Any, lens: Any, out: Any, *rest: Any) -> None:
            lens = lens.flatten().tolist()
            if clamped:
                lens = [min(max(length, 0), logits.shape[1]) for length in lens]
            assert len(lens) == len(out) == len(logits), "top-k"
            for row, length in enumerate(lens):
                unsigned = length % 2**32
                width = logits.shape[1]
                assert unsigned <= threshold or not one_cta < width <= threshold, "hang"
                assert unsigned <= width, "garbage"
                assert unsigned <= TOPK, "the test keeps to short rows"
                out[row] = torch.where(torch.arange(TOPK) < unsigned, torch.arange(TOPK), -1).int()

        def step(self) -> dict[str, Any]:
            rocm = self.case.get("rocm", False)
            metadata = self.metadata()
            self.seen["seq_lens"] = metadata.decode.seq_lens.tolist()
            rows = max(self.case["tokens"], 1)  # a model runs at least one
            ids = torch.arange(rows, dtype=torch.float32)
            buffer = torch.full((64, TOPK), 55, dtype=torch.int32)
            torch_c = NS(
                persistent_topk=self.top_k,
                top_k_per_row_decode=lambda logits, next_n, lens, out, *rest: self.top_k(
                    logits, lens, out
                ),
            )

            class Torch:
                ops = NS(_C=torch_c)

                def __getattr__(self, name: str) -> Any:
                    return getattr(torch, name)

            platform = NS(
                is_cuda=lambda: not rocm,
                is_xpu=lambda: False,
                fp8_dtype=lambda: torch.float32,
                has_device_capability=lambda _: True,
                is_device_capability_family=lambda family: family == 120,
            )
            workspace = NS(get_simultaneous=lambda *specs: [None] * len(specs))
            namespace = {
                "torch": Torch(),
                "current_platform": platform,
                "get_forward_context": lambda: NS(
                    attn_metadata={"indexer": metadata}, cudagraph_runtime_mode="none"
                ),
                "CUDAGraphMode": NS(FULL="full"),
                "_resolve_layer_name": lambda name: name,
                "DeepseekV32IndexerMetadata": type(metadata),
                "pack_seq_triton": pack,
                "unpack_seq_triton": unpack,
                "current_workspace_manager": lambda: workspace,
                "RADIX_TOPK_WORKSPACE_SIZE": 1,
                "MXFP4_BLOCK_SIZE": 32,
                "fp8_fp4_paged_mqa_logits": self.logits,
                "rocm_fp8_paged_mqa_logits": lambda q, *args, **rest: self.logits(
                    (q, None), *args, **rest
                ),
                "ops": NS(indexer_k_quant_and_cache=lambda *args: None),
            }
            arguments = {
                "hidden_states": torch.zeros(rows, 1),
                "k_cache_prefix": "indexer",
                "kv_cache": torch.zeros(1, 64, 132, dtype=torch.uint8),
                "k": torch.zeros(rows, 1),
                "weights": ids.unsqueeze(1),
                "quant_block_size": 128,
                "scale_fmt": "ue8m0",
                "topk_tokens": TOPK,
                "head_dim": 128,
                "max_model_len": 1024,
                "total_seq_lens": 1,
                "topk_indices_buffer": buffer,
                "skip_k_cache_insert": True,
            }
            fp4 = self.case["fp4"]
            q = ids.view(rows, 1, 1).to(torch.uint8 if fp4 else torch.float32)
            if rocm:
                exec(rocm_decode(), namespace)
                namespace["rocm_aiter_sparse_attn_indexer"](q_fp8=q, **arguments)
            else:
                load(layer_file, {"sparse_attn_indexer", "kv_cache_as_quant_view"}, namespace)
                if is_0_28:
                    arguments["dense_mha_metadata_layer_name"] = ""
                namespace["sparse_attn_indexer"](
                    q_quant=q,
                    q_scale=q if fp4 else None,
                    use_pcp=False,
                    use_fp4_cache=fp4,
                    **arguments,
                )
            # How many indices each token got; they are 0 ... n-1.
            self.seen["counts"] = (buffer[:rows] >= 0).sum(1).tolist()
            return self.seen

    @functools.cache
    def rocm_decode() -> Any:
        """Only the decode half: the rest imports and writes the cache."""
        (function,) = (
            node
            for node in ast.parse(text(rocm_file)).body
            if getattr(node, "name", "") == "rocm_aiter_sparse_attn_indexer"
        )
        assert isinstance(function, ast.FunctionDef)
        (decode,) = (
            node
            for node in function.body
            if isinstance(node, ast.If) and ast.unparse(node.test) == "has_decode"
        )
        function.decorator_list = []
        function.body = [
            *ast.parse(
                "layer_attn_metadata = get_forward_context().attn_metadata[k_cache_prefix]\n"
                "num_decode_tokens = layer_attn_metadata.num_decode_tokens\n"
                "topk_indices_buffer[: hidden_states.shape[0]] = -1\n"
            ).body,
            *decode.body,
        ]
        return to_code(rocm_file, [function])

    results = []
    for case in cases:
        run = Run(case)
        error = None
        try:
            run.step()
        except AssertionError as e:
            error = f"assertion: {e}"
        except (RuntimeError, IndexError) as e:
            error = f"{type(e).__name__}: {e}"
        results.append(run.seen | {"error": error})
    return results


# --- cases ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A decode batch. Requests are (query length, sequence length)."""

    requests: tuple[tuple[int, int], ...]
    tokens: int  # after padding
    next_n: int  # 1 + speculative tokens; SM12x flattens unless it is 1 or 2
    ratio: int = 4
    width: int = 1024  # of the logits: the largest context, compressed
    rocm: bool = False
    fp4: bool = False  # the SM100 cache, never flattened

    def expected(self) -> list[list[int]]:
        """(token, token, visible KV, block) for each real token."""
        rows = []
        for index, (query, seq) in enumerate(self.requests):
            for j in range(query):
                token = len(rows)
                visible = max(seq - query + j + 1, 0) // self.ratio
                rows.append([token, token, visible, index + 1])
        return rows


def even(count: int, query: int, seq: int = 400) -> tuple[tuple[int, int], ...]:
    return tuple((query, seq + index) for index in range(count))


PAD = (0, 0)  # a request that only pads the batch

CASES = {
    # More tokens than the requests have: `num_reqs` is capped by max_num_seqs.
    "6 of 1 token to 8, flattened": Case(requests=even(6, 1), tokens=8, next_n=4),
    "6 of 1 token to 8, uncompressed": Case(requests=even(6, 1), tokens=8, next_n=4, ratio=1),
    "6 of 1 token to 8, no drafts": Case(requests=even(6, 1), tokens=8, next_n=1),
    "4 of 1 token to 8": Case(requests=even(4, 1), tokens=8, next_n=4),
    "4 of 1 token to 8, uncompressed": Case(requests=even(4, 1), tokens=8, next_n=4, ratio=1),
    "6 of 4 tokens to 32": Case(requests=even(6, 4), tokens=32, next_n=4),
    "2 of 4 tokens to 16": Case(requests=even(2, 4), tokens=16, next_n=4),
    "3 of 2 tokens to 8, native": Case(requests=even(3, 2), tokens=8, next_n=2),
    "4 of 2 tokens to 16, native": Case(requests=even(4, 2), tokens=16, next_n=2),
    "3 of 4 tokens to 16, fp4": Case(requests=even(3, 4), tokens=16, next_n=4, fp4=True),
    "4 of 4 tokens to 32, fp4": Case(requests=even(4, 4), tokens=32, next_n=4, fp4=True),
    # Requests that only pad.
    "1 of 2 tokens and 1 pad": Case(
        requests=(*even(1, 2), PAD), tokens=4, next_n=2, width=128 * 1024 // 4
    ),
    "3 of 2 tokens and 1 pad": Case(requests=(*even(3, 2), PAD), tokens=8, next_n=2),
    "2 of 2 tokens and 6 pads": Case(requests=(*even(2, 2), *[PAD] * 6), tokens=8, next_n=2),
    # Fewer KV than the formula subtracts.
    "short, uniform": Case(requests=((4, 2), (4, 1)), tokens=8, next_n=4, ratio=1),
    "short, mixed": Case(requests=((4, 2), (1, 0), PAD), tokens=8, next_n=4, ratio=1),
    # No token at all: the dummy row.
    "no tokens, flattened": Case(requests=((0, 40),), tokens=0, next_n=4),
    "no tokens, native": Case(requests=((0, 40),), tokens=0, next_n=2),
}
FINE_BEFORE = {
    "8 of 1 token": Case(requests=even(8, 1), tokens=8, next_n=4),
    "6 of 1 token and 2 pads": Case(requests=(*even(6, 1), PAD, PAD), tokens=8, next_n=4),
    "2 of 4 tokens and 2 pads": Case(requests=(*even(2, 4), PAD, PAD), tokens=16, next_n=4),
    "2 of 4 tokens": Case(requests=even(2, 4), tokens=8, next_n=4),
    "4 of 2 tokens": Case(requests=even(4, 2), tokens=8, next_n=2),
    "mixed": Case(requests=((3, 10), (1, 7), (4, 12), PAD), tokens=8, next_n=4, ratio=1),
    "mixed to 16": Case(requests=((3, 90), (1, 77), (4, 120), PAD), tokens=16, next_n=4),
}
# ROCm has its own decode step on the same metadata.
ROCM = {
    "rocm, 6 of 1 token to 8": Case(requests=even(6, 1), tokens=8, next_n=4, rocm=True),
    "rocm, 4 of 1 token to 8": Case(requests=even(4, 1), tokens=8, next_n=4, ratio=1, rocm=True),
    "rocm, 2 of 4 tokens to 16": Case(requests=even(2, 4), tokens=16, next_n=4, rocm=True),
    "rocm, 3 of 2 tokens to 8": Case(requests=even(3, 2), tokens=8, next_n=2, rocm=True),
}
# What upstream has fixed by then: padding where it flattens (a length of 0 for each padding
# token), lengths of uniform batches, and the top-k kernel's own clamp.
FIXED_UPSTREAM: dict[str, set[str]] = {
    "0.26.0": set(),
    "0.28.0": {
        *(f"6 of 1 token to 8, {kind}" for kind in ("flattened", "uncompressed")),
        *("4 of 1 token to 8", "4 of 1 token to 8, uncompressed"),
        *("6 of 4 tokens to 32", "2 of 4 tokens to 16"),
        *("3 of 4 tokens to 16, fp4", "4 of 4 tokens to 32, fp4"),
        *("1 of 2 tokens and 1 pad", "3 of 2 tokens and 1 pad", "short, uniform"),
        *("rocm, 6 of 1 token to 8", "rocm, 4 of 1 token to 8", "rocm, 2 of 4 tokens to 16"),
    },
}
# Every count of equal requests, padded by 0 ... 9 tokens, then ragged ones.
SWEEP = {
    f"sweep {count} of {query} of {next_n} to +{extra}": Case(
        requests=even(count, query), tokens=count * query + extra, next_n=next_n
    )
    for next_n in (1, 2, 4)
    for query in range(1, next_n + 1)
    for count in (1, 2, 3, 5, 8)
    for extra in range(10)
    # Equal length is what the native path asks for.
} | {
    f"sweep {lens} to +{extra}": Case(
        requests=tuple((n, 100 + 30 * i) for i, n in enumerate(lens)),
        tokens=sum(lens) + extra,
        next_n=4,
    )
    for lens in ((4, 1), (1, 4), (1, 2, 3, 4), (4, 4, 3), (2, 2, 2, 1, 1), (3, 1, 4, 2))
    for extra in range(5)
}
ALL = CASES | FINE_BEFORE | ROCM | SWEEP


def run_in(python: Path, tree: Path) -> dict[str, dict[str, Any]]:
    cases = [
        {name: getattr(case, name) for name in ("requests", "tokens", "next_n", "ratio")}
        | {"width": case.width, "rocm": case.rocm, "fp4": case.fp4}
        for case in ALL.values()
    ]
    program = (
        "from __future__ import annotations\nimport json, sys\nfrom typing import Any\n"
        f"{inspect.getsource(scenarios)}\n"
        "print(json.dumps(scenarios(sys.argv[1], json.load(sys.stdin))))\n"
    )
    done = subprocess.run(
        [python, "-c", program, tree],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(ALL, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="module")
def patched(torch_python: Path, patched_tree: Path) -> dict[str, dict[str, Any]]:
    return run_in(torch_python, patched_tree)


@pytest.fixture(scope="module")
def pristine(torch_python: Path, pristine_tree: Path) -> dict[str, dict[str, Any]]:
    return run_in(torch_python, pristine_tree)


def faults(case: Case, seen: dict[str, Any]) -> list[str]:
    """All that is wrong with a step, judged token by token."""
    if seen["error"]:
        return [seen["error"]]
    expected = case.expected()
    found = []
    if min(length for row in seen["seq_lens"] for length in row) < 0:
        found.append(f"negative lengths: {seen['seq_lens']}")
    # Token t's row, wherever it is: its own query, weights, length and blocks.
    by_token = {row[0]: row for row in reversed(seen["rows"]) if row[0] is not None}
    for token, want in enumerate(expected):
        if by_token.get(token) != want:
            found.append(f"token {token}: {by_token.get(token)} instead of {want}")
    counts = [min(want[2], 512) for want in expected]
    padding = [0] * (case.tokens - len(expected))
    if case.tokens and seen["counts"] != counts + padding:
        found.append(f"indices {seen['counts']} instead of {counts + padding}")
    return found


# --- tests ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALL if name not in SWEEP])
def test_patched(patched: dict[str, Any], name: str) -> None:
    assert faults(ALL[name], patched[name]) == []


def test_patched_sweep(patched: dict[str, Any]) -> None:
    assert {name: f for name in SWEEP if (f := faults(SWEEP[name], patched[name]))} == {}


@pytest.mark.parametrize("name", CASES)
def test_pristine_fails(pristine: dict[str, Any], stack_name: str, name: str) -> None:
    fixed = name in FIXED_UPSTREAM[stack_name]
    assert (faults(CASES[name], pristine[name]) == []) is fixed


@pytest.mark.parametrize("name", FINE_BEFORE)
def test_unpadded_and_mixed_were_fine(
    pristine: dict[str, Any], patched: dict[str, Any], name: str
) -> None:
    assert faults(FINE_BEFORE[name], pristine[name]) == []

    def without_weights_of_padding(seen: dict[str, Any]) -> dict[str, Any]:
        rows = [row if row[0] is not None else [None, *row[2:]] for row in seen["rows"]]
        return seen | {"rows": rows}

    assert without_weights_of_padding(patched[name]) == without_weights_of_padding(pristine[name])


@pytest.mark.parametrize(
    "name",
    [
        "6 of 1 token to 8, flattened",
        "6 of 1 token to 8, no drafts",
        "6 of 4 tokens to 32",
        "3 of 2 tokens to 8, native",
        "rocm, 6 of 1 token to 8",
        "rocm, 3 of 2 tokens to 8",
    ],
)
def test_pristine_cannot_reshape(pristine: dict[str, Any], stack_name: str, name: str) -> None:
    if name in FIXED_UPSTREAM[stack_name]:
        assert faults(ALL[name], pristine[name]) == []
    else:
        assert pristine[name]["error"].startswith("RuntimeError: shape '[")
        assert "is invalid for input of size" in pristine[name]["error"]


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("4 of 1 token to 8", [4, 2], [4, 1]),
        ("2 of 4 tokens to 16", [8, 2], [8, 1]),
        ("4 of 2 tokens to 16, native", [4, 4], [4, 2]),
        ("rocm, 4 of 1 token to 8", [4, 2], [4, 1]),
        ("rocm, 2 of 4 tokens to 16", [8, 2], [8, 1]),
    ],
)
def test_next_n(
    pristine: dict[str, Any], patched: dict[str, Any], stack_name: str, name: str,
    wrong: list[int], right: list[int],
) -> None:  # fmt: skip
    """The decode step itself says nothing; only a kernel that checks can notice."""
    if name in FIXED_UPSTREAM[stack_name]:
        assert pristine[name] == patched[name]
        return
    assert pristine[name]["q_shape"] == wrong
    assert pristine[name]["error"] in {f"assertion: {a}" for a in DEEP_GEMM_ASSERTIONS}
    assert patched[name]["q_shape"] == right


@pytest.mark.parametrize(
    ("name", "error"),
    [("1 of 2 tokens and 1 pad", "hang"), ("3 of 2 tokens and 1 pad", "garbage")],
)
def test_padding_requests_hang_top_k(
    pristine: dict[str, Any], patched: dict[str, Any], stack_name: str, name: str, error: str
) -> None:
    """Compressed by 4, -1 is still -1, and -1 as uint32 is above the radix threshold."""
    assert patched[name]["seq_lens"][-1] == [0, 0]
    if name in FIXED_UPSTREAM[stack_name]:
        assert faults(ALL[name], pristine[name]) == []
        assert pristine[name]["seq_lens"][-1] == [0, 0]
    else:
        assert pristine[name]["seq_lens"][-1] == [-1, 0]
        assert pristine[name]["error"] == f"assertion: {error}"


def test_packed_queries_have_packed_weights(
    pristine: dict[str, Any], patched: dict[str, Any]
) -> None:
    name = "2 of 2 tokens and 6 pads"
    assert pristine[name]["error"] == "assertion: weights"
    assert len(patched[name]["rows"]) == 16


@pytest.mark.parametrize("name", ["flattened", "native"])
def test_no_tokens(pristine: dict[str, Any], patched: dict[str, Any], name: str) -> None:
    """The decode step runs one dummy row, which needs a length."""
    assert pristine[f"no tokens, {name}"]["error"] == "assertion: metadata"
    assert patched[f"no tokens, {name}"]["seq_lens"] == [[10]]


def test_rows_agree(patched: dict[str, Any], stack_name: str) -> None:
    """The metadata has one row a request, never one a padding token; flattened, from 0.28 on, one
    a token, with no length for padding."""
    flattened = patched["6 of 1 token to 8, flattened"]["seq_lens"]
    assert [len(row) for row in flattened] == [1] * {"0.26.0": 6, "0.28.0": 8}[stack_name]
    assert all(row == [0] for row in flattened[6:])
    native = patched["6 of 1 token to 8, no drafts"]["seq_lens"]
    assert [len(row) for row in native] == [1] * 6


def test_decode_steps_ask_for_the_metadatas_next_n(patched_tree: Path) -> None:
    """No decode step may infer next_n from a padded number of tokens again."""
    for name in (
        "vllm/model_executor/layers/sparse_attn_indexer.py",
        "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py",
    ):
        source = (patched_tree / name).read_text(encoding="utf-8")
        calls = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "reshape"
            and ast.unparse(node.func.value).startswith(("q_quant[:", "q_fp8[:", "q_scale[:"))
        ]
        assert calls
        assert not [call for call in calls if "-1" in call]
