"""Attention: projections, KV cache, indices, compressor, indexer."""

from __future__ import annotations

import types
from typing import Any

import torch
from calls import bf16, f32, i32, i64, meta, paged, recipe, u8


@recipe
def q_kv_rmsnorm(s: Any) -> None:  # attention.py, after wq_a and wkv
    from vllm.models.deepseek_v4.common.ops import fused_q_kv_rmsnorm

    fused_q_kv_rmsnorm(
        bf16(s.tokens, s.q_lora_rank), bf16(s.tokens, s.head_dim), bf16(s.q_lora_rank),
        bf16(s.head_dim), s.rms_norm_eps,
    )  # fmt: skip


@recipe
def inverse_rope_quant(s: Any) -> None:  # nvidia/ops/o_proj.py
    from vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant import (
        _fused_inv_rope_fp8_quant_kernel_impl as launch,
    )
    from vllm.models.deepseek_v4.nvidia.ops.o_proj import compute_fp8_einsum_recipe
    from vllm.utils.deep_gemm import get_tma_aligned_size

    _, aligned = compute_fp8_einsum_recipe()
    for heads in s.heads_per_rank:
        groups = s.o_groups * heads // s.num_attention_heads
        per_group = heads // groups
        d = per_group * s.head_dim
        blocks = d // 128
        launch(
            bf16(s.tokens, heads, s.head_dim), i64(s.tokens), f32(s.positions, s.rope_dim),
            per_group, 128, s.head_dim // 128, s.nope_dim % 128, s.rope_dim // 2, aligned, 448.0,
            get_tma_aligned_size(s.tokens, 4), s.tokens, groups, d,
            (blocks + 3) // 4 if aligned else blocks,
        )  # fmt: skip


@recipe
def insert_k(s: Any) -> None:  # cache_utils.py
    from vllm.models.deepseek_v4.common.ops import quantize_and_insert_k_cache

    for page in s.pages:
        quantize_and_insert_k_cache(
            bf16(s.tokens, s.head_dim), paged(64, page, s.row_bytes), i64(s.tokens), page
        )


@recipe
def gather_k(s: Any) -> None:  # nvidia/flashinfer_sparse.py, prefill
    from vllm.models.deepseek_v4.common.ops import dequantize_and_gather_k_cache

    for page in s.pages:
        for lens in (i32(s.requests), None):
            dequantize_and_gather_k_cache(
                bf16(s.requests, 2048, s.head_dim), paged(64, page, s.row_bytes), i32(s.requests),
                lens, i32(s.requests, 64), page, 0,
            )  # fmt: skip


@recipe
def global_topk(s: Any) -> None:
    from vllm.models.deepseek_v4.common.ops import compute_global_topk_indices_and_lens

    for page in s.pages:
        compute_global_topk_indices_and_lens(
            i32(s.tokens, s.index_topk), i32(s.tokens), i32(s.requests, 64), page,
            meta(torch.bool, s.tokens),
        )  # fmt: skip


@recipe
def combine_topk(s: Any) -> None:
    from vllm.models.deepseek_v4.common.ops import combine_topk_swa_indices

    for ratio, topk in ((4, s.index_topk), (128, s.c128_topk), (1, 0)):
        combine_topk_swa_indices(
            i32(s.tokens, max(topk, 1)), i32(s.requests + 1), i32(s.requests), i32(s.requests),
            s.window, ratio, topk, 4096, 2048,
        )  # fmt: skip


@recipe
def mixed_indices(s: Any) -> None:  # nvidia/flashinfer_sparse.py:388
    from vllm.models.deepseek_v4.common.ops import build_flashinfer_mixed_sparse_indices

    for ratio, topk in ((4, s.index_topk), (128, s.c128_topk)):
        page = max(s.pages) // ratio or 1
        build_flashinfer_mixed_sparse_indices(
            i32(8, s.window), i32(8, topk), i32(8), i32(s.tokens, topk), i32(s.requests + 1),
            i32(s.requests), i32(s.tokens + 8), i32(s.requests, 64), 64, i32(s.requests, 64), page,
            s.window, ratio, topk, True, meta(torch.bool, 8),
        )  # fmt: skip


# --- compressor -----------------------------------------------------------------------------


def _compressor(s: Any, head: int, ratio: int, *, fp4: bool = False) -> dict[str, Any]:
    """What DeepseekCompressor.forward passes on (models/deepseek_v4/compressor.py)."""
    coff = 1 + (ratio == 4)
    block = 4 if ratio == 4 else 8
    if head == 512:
        quant, stride, scale = 64, s.nope_dim + s.rope_dim * 2, s.nope_dim // 64 + 1
        cache = paged(64, max(s.pages) // ratio or 1, s.row_bytes)
    elif fp4:
        quant, stride, scale = 32, head // 2, head // 32
        cache = u8(64, max(s.pages) // ratio, stride + scale)
    else:
        quant, stride, scale = 128, head, 4
        cache = u8(64, max(s.pages) // ratio, stride + scale)
    state = f32(64, block, 2 * coff * head)
    return {
        "state_cache": state, "num_actual": s.tokens, "token_to_req_indices": i32(s.tokens),
        "positions": i64(s.tokens), "slot_mapping": i64(s.tokens), "block_table": i32(s.requests, 64),
        "block_size": block, "state_width": state.shape[-1] // 2,
        "cos_sin_cache": f32(s.positions, s.rope_dim), "kv_cache": cache,
        "k_cache_metadata": types.SimpleNamespace(slot_mapping=i64(s.tokens)),
        "pdl_kwargs": {"launch_pdl": False}, "head_dim": head, "rope_head_dim": s.rope_dim,
        "compress_ratio": ratio, "overlap": ratio == 4, "use_fp4_cache": fp4,
        "rms_norm_weight": bf16(head), "rms_norm_eps": s.rms_norm_eps, "quant_block": quant,
        "token_stride": stride, "scale_dim": scale,
    }  # fmt: skip


@recipe
def partial_states(s: Any) -> None:  # compressor.py forward
    from vllm.models.deepseek_v4.common.ops import save_partial_states

    for head, ratio in ((512, 4), (512, 128), (128, 4)):
        coff, block = 1 + (ratio == 4), 4 if ratio == 4 else 8
        kv, score = bf16(s.tokens, 2 * coff * head).split([coff * head, coff * head], dim=-1)
        save_partial_states(
            kv=kv, score=score, ape=f32(ratio, coff * head), positions=i64(s.tokens),
            state_cache=f32(64, block, 2 * coff * head), slot_mapping=i64(s.tokens),
            block_size=block, state_width=coff * head, compress_ratio=ratio,
            pdl_kwargs={"launch_pdl": False},
        )  # fmt: skip


@recipe
def compress_main(s: Any) -> None:  # compressor.py, head 512
    from vllm.utils.import_utils import has_cutedsl

    if has_cutedsl():
        from vllm.models.deepseek_v4.nvidia.ops import sparse_attn_compress_cutedsl as cutedsl

        store = cutedsl.compress_norm_rope_store_cutedsl
    else:
        from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache as triton

        store = triton.compress_norm_rope_store_triton
    for ratio in (4, 128):
        store(**_compressor(s, s.head_dim, ratio))


@recipe
def compress_indexer(s: Any) -> None:  # compressor.py, head 128
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import (
        compress_norm_rope_store_triton,
    )

    for fp4 in (False, True):
        compress_norm_rope_store_triton(**_compressor(s, s.index_head_dim, 4, fp4=fp4))


# --- indexer --------------------------------------------------------------------------------


@recipe
def indexer_q(s: Any) -> None:  # attention.py:788
    from vllm.models.deepseek_v4.common.ops import fused_indexer_q_rope_quant

    for fp4 in (False, True):
        fused_indexer_q_rope_quant(
            i64(s.tokens), bf16(s.tokens, s.index_n_heads, s.index_head_dim),
            f32(s.positions, s.rope_dim), bf16(s.tokens, s.index_n_heads), 0.1, 0.1, use_fp4=fp4,
        )  # fmt: skip


@recipe
def uniform_decode(s: Any) -> None:  # v1/attention/backends/mla/indexer.py:444
    from vllm.v1.attention.backends.mla.indexer import _prepare_uniform_decode_kernel as kernel

    table, wide = i32(s.requests, 64), i32(s.tokens, 64)
    kernel[(s.requests * (1 + s.k),)](
        i32(s.requests), i32(s.tokens), table, table.stride(0), wide, wide.stride(0),
        i32(s.tokens), 1 + s.k, BLOCK_SIZE=1024,
    )  # fmt: skip


@recipe
def prefill_chunk(s: Any) -> None:  # v1/attention/backends/mla/indexer.py:849
    from vllm.v1.attention.backends.mla.indexer import (
        _build_prefill_chunk_metadata_kernel as kernel,
    )

    n = s.requests
    kernel[(n,)](
        i32(n + 1), i32(n), i32(n + 1), i32(n + 1), i32(s.tokens), i32(s.tokens), i32(s.tokens),
        0, s.tokens, 0, 1, 1, BLOCK_SIZE=1024, COMPRESS_RATIO=4,
    )  # fmt: skip


@recipe
def slot_mapping(s: Any) -> None:
    from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping

    for ratio in (4, 128):
        get_compressed_slot_mapping(
            s.tokens, i32(s.requests + 1), i32(s.requests), i32(s.requests, 64),
            max(s.pages) // ratio, ratio, i64(s.tokens),
        )  # fmt: skip


@recipe
def c128_metadata(s: Any) -> None:
    from vllm.models.deepseek_v4.sparse_mla import build_c128a_topk_metadata

    build_c128a_topk_metadata(
        i64(s.tokens), 128, 8, i32(s.tokens), i32(s.requests, 64), max(s.pages) // 128,
        i64(s.tokens), i32(s.tokens, s.c128_topk), i32(s.tokens), i32(s.tokens, s.c128_topk),
    )  # fmt: skip


@recipe
def swa(s: Any) -> None:  # v1/attention/backends/mla/sparse_swa.py, build()
    from vllm.v1.attention.backends.mla import sparse_swa as module

    table, n = i32(s.requests, 64), s.tokens
    tail = (
        i32(s.requests + 1), i32(s.requests), i32(n), meta(torch.bool, n), table, table.stride(0),
    )  # fmt: skip
    for page in s.pages:
        module._compute_swa_indices_and_lens_kernel[(n,)](
            i32(n, 1, s.window), s.window, i32(n), s.window, *tail, page, token_offset=0,
            TRITON_BLOCK_SIZE=1024,
        )  # fmt: skip
        module._compute_dspark_noncausal_swa_indices_kernel[(n,)](
            i32(n, 1, s.index_topk), s.index_topk, i32(n), s.window, s.index_topk, *tail, page,
            token_offset=0, TRITON_BLOCK_SIZE=1024,
        )  # fmt: skip
    module._compute_prefill_metadata_kernel[(1,)](
        i32(4), i32(s.requests), i32(s.requests + 1), 4, 4, s.window, BLOCK_SIZE=4
    )


@recipe
def pack_seq(s: Any) -> None:  # sparse_attn_indexer.py, requires_padding
    from vllm.v1.attention.ops.common import pack_seq_triton, unpack_seq_triton

    # Lengths are read on the host, so these have values.
    lens = torch.full((4,), 1 + s.k, dtype=torch.int32)
    n = 4 * (1 + s.k)
    pack_seq_triton(meta(torch.float8_e4m3fn, n, s.index_n_heads, s.index_head_dim), lens)
    pack_seq_triton(f32(n, s.index_n_heads), lens, pad_value=0)
    pack_seq_triton(u8(n, s.index_n_heads, s.index_head_dim // 2), lens, pad_value=0)
    unpack_seq_triton(i32(4, 1 + s.k, s.index_topk), lens)
