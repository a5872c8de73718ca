"""Calls of vLLM that launch kernels of FlashInfer's modules, by the module's name: at jit.toml's sizes,
so a node may launch others too. Their host code reads sizes and pointers, so tensors lie in
(untouched) memory.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

LAUNCHES: dict[str, Callable[[Any], None]] = {}


def launches(call: Callable[[Any], None]) -> Callable[[Any], None]:
    """Register under the function's name: a module of stack.toml, [jit-cache]."""
    LAUNCHES[call.__name__] = call
    return call


def _rows(s: Any, pages: int, tokens: int) -> torch.Tensor:
    """An fp8_ds_mla cache as the layer hands it over: pages padded to 576 bytes, one KV head."""
    page = -(-tokens * s.row_bytes // 576) * 576
    return torch.empty_strided(
        (pages, tokens, 1, s.row_bytes), (page, s.row_bytes, s.row_bytes, 1), dtype=torch.uint8
    )


@launches
def sparse_mla_sm120(s: Any) -> None:  # nvidia/flashinfer_sparse.py, _run_sparse_mla
    from vllm.models.deepseek_v4.nvidia.flashinfer_sparse import DeepseekV4FlashInferSM120Attention

    workspace = torch.empty(128 << 20, dtype=torch.uint8)
    # Layers with the window alone, then C4A's and C128A's; DSpark's draft has a wider window
    # (v1/attention/backends/mla/sparse_swa.py, _smallest_dispatchable_width).
    compressed = [(max(s.pages) // 4, s.index_topk), (max(s.pages) // 128, s.c128_topk)]
    layers = [(s.window, None), *((s.window, extra) for extra in compressed), (s.index_topk, None)]
    for heads in s.heads_per_rank:
        layer = types.SimpleNamespace(
            scale=s.head_dim**-0.5, attn_sink=torch.empty(heads),
            _get_workspace=lambda device: workspace,
        )  # fmt: skip
        for n in s.gemm_tokens:  # a decode step, a prefill

            def indices(width: int, n: int = n) -> torch.Tensor:
                return torch.empty(n, 1, width, dtype=torch.int32)

            def vectors(heads: int = heads, n: int = n) -> torch.Tensor:
                return torch.empty(n, heads, s.head_dim, dtype=torch.bfloat16)

            for width, extra in layers:
                DeepseekV4FlashInferSM120Attention._run_sparse_mla(
                    layer, query=vectors(), swa_kv_cache=_rows(s, 4, min(s.pages)),
                    swa_indices=indices(width), swa_lens=torch.empty(n, dtype=torch.int32),
                    extra_kv_cache=extra and _rows(s, 4, extra[0]),
                    extra_indices=extra and indices(extra[1]),
                    extra_lens=torch.empty(n, dtype=torch.int32) if extra else None, out=vectors(),
                )  # fmt: skip


@launches
def sampling(s: Any) -> None:  # v1/sample/ops/topk_topp_sampler.py
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sample

    for rows in (1, s.requests):
        k, p = torch.full((rows,), 40, dtype=torch.int32), torch.full((rows,), 0.9)
        for one, other in ((None, p), (k, None), (k, p)):
            flashinfer_sample(torch.zeros(rows, s.vocab_size), one, other)
