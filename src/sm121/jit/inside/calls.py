"""The calls that the DeepSeek-V4 path makes, with tensors that have shape and no memory.

Each function calls vLLM's own launch code as the model does (the caller is named), so that
constexprs, warps and dtypes are vLLM's; what differs between deployments comes from `Shapes`
(pins/<release>/jit.toml). Where launch code lies in a method of a large class, its launch is
repeated here, and a changed signature then fails as "the pin's API changed".

pins/<release>/jit.toml names the kernels that each recipe must reach: one that it does not reach
is a fault.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

RECIPES: dict[str, Callable[[Any], None]] = {}


def recipe(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """Register a recipe under its function's name; jit.toml says what it must reach."""
    RECIPES[run.__name__] = run
    return run


def meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bf16(*shape: int) -> torch.Tensor:
    return meta(torch.bfloat16, *shape)


def f32(*shape: int) -> torch.Tensor:
    return meta(torch.float32, *shape)


def i32(*shape: int) -> torch.Tensor:
    return meta(torch.int32, *shape)


def i64(*shape: int) -> torch.Tensor:
    return meta(torch.int64, *shape)


def u8(*shape: int) -> torch.Tensor:
    return meta(torch.uint8, *shape)


def paged(pages: int, tokens: int, width: int) -> torch.Tensor:
    """An fp8_ds_mla cache: `tokens` rows of `width` bytes in pages padded to 576 bytes."""
    page = -(-tokens * width // 576) * 576
    return torch.empty_strided(
        (pages, tokens, width), (page, width, 1), dtype=torch.uint8, device="meta"
    )


# --- attention: projections, KV cache, indices ----------------------------------------------


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


# --- MoE and MTP ----------------------------------------------------------------------------


@recipe
def router_topk(s: Any) -> None:  # fused_topk_bias_router.py:198
    from vllm.model_executor.layers.fused_moe.router.dsv4_topk import dsv4_topk

    for dtype in (torch.int32, torch.int64):
        dsv4_topk(f32(s.tokens, s.n_routed_experts), f32(s.n_routed_experts), dtype, 1.5)


@recipe
def deepgemm_experts(s: Any) -> None:  # experts/deep_gemm_moe.py, DeepGemmFP4Experts
    from vllm.model_executor.layers.fused_moe import deep_gemm_utils as module
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    module.get_mk_alignment_for_contiguous_layout = lambda: [128, 128]
    module.get_theoretical_mk_alignment_for_contiguous_layout = lambda *a, **k: 128
    h, top = s.hidden_size, s.num_experts_per_tok
    for ranks in s.tensor_parallel:
        inner, experts, ids = (
            s.moe_intermediate_size // ranks,
            s.n_routed_experts,
            i32(s.tokens, top),
        )
        module.deepgemm_moe_permute(
            meta(torch.float8_e4m3fn, s.tokens, h),
            f32(s.tokens, h // 128),
            ids,
            experts,
            None,
            None,
        )
        rows = s.tokens * top + experts * 128
        module.deepgemm_unpermute_and_reduce(
            bf16(rows, h), ids, f32(s.tokens, top), i32(s.tokens, top), None, bf16(s.tokens, h)
        )
        for count in (128, rows):
            fp8_utils.silu_mul_quant_fp8_packed_triton(
                bf16(count, 2 * inner), 128, clamp_limit=s.swiglu_limit
            )
        fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor(
            bf16(rows, 2 * inner), use_ue8m0=True, clamp_limit=s.swiglu_limit
        )


@recipe
def swiglu_limit(s: Any) -> None:  # fused_moe/activation.py, experts that take a limit
    from vllm.model_executor.layers.fused_moe.utils import swiglu_limit_func

    for ranks in s.tensor_parallel:
        rows, inner = s.tokens * s.num_experts_per_tok, s.moe_intermediate_size // ranks
        swiglu_limit_func(bf16(rows, inner), bf16(rows, 2 * inner), s.swiglu_limit, i32(rows))


@recipe
def fp8_linear_fallback(s: Any) -> None:  # kernels/linear, behind DeepGEMM, CUTLASS and Marlin
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    # What is not contiguous goes to Triton, all else to a compiled kernel.
    wide = bf16(s.tokens, 2 * s.hidden_size)[:, : s.hidden_size]
    for column_major in (False, True):
        fp8_utils.per_token_group_quant_fp8(
            wide, 128, column_major_scales=column_major, use_ue8m0=True
        )
    e4m3, h = torch.float8_e4m3fn, s.hidden_size
    for heads in s.heads_per_rank:
        for n, k in ((s.q_lora_rank + s.head_dim, h), (heads * s.head_dim, s.q_lora_rank)):
            fp8_utils.w8a8_triton_block_scaled_mm(
                meta(e4m3, s.tokens, k), meta(e4m3, n, k), f32(s.tokens, k // 128),
                f32(n // 128, k // 128), [128, 128], torch.bfloat16,
            )  # fmt: skip


@recipe
def mtp_norms(s: Any) -> None:  # nvidia/mtp.py
    from vllm.models.deepseek_v4.common.ops import (
        fused_mtp_input_rmsnorm,
        mtp_shared_head_rmsnorm,
    )

    h = s.hidden_size
    fused_mtp_input_rmsnorm(
        bf16(s.tokens, h), i64(s.tokens), bf16(s.tokens, s.hc_mult, h), bf16(h), bf16(h),
        s.rms_norm_eps, s.hc_mult,
    )  # fmt: skip
    mtp_shared_head_rmsnorm(bf16(s.tokens, h), bf16(h), s.rms_norm_eps)


# --- mHC ------------------------------------------------------------------------------------


def _mhc(s: Any, tokens: int) -> dict[str, Any]:
    """Tensors of one mHC block (nvidia/model.py, DeepseekV4DecoderLayer)."""
    h, m = s.hidden_size, s.hc_mult
    mixes = m * (2 + m)
    return {
        "x": bf16(tokens, h), "residual": bf16(tokens, m, h), "norm": bf16(h),
        "mix": (f32(tokens, m, 1), f32(tokens, m, m)),
        "weights": (
            f32(mixes, m * h), f32(3), f32(mixes), s.rms_norm_eps, s.hc_eps, s.hc_eps, 2.0,
            s.hc_sinkhorn_iters,
        ),
    }  # fmt: skip


def _deepgemm_is(supported: bool) -> None:
    """With DeepGEMM (whose kernels have recipes of their own), or without it."""
    import vllm.utils.deep_gemm as deep_gemm

    deep_gemm.tf32_hc_prenorm_gemm = lambda *a, **k: None
    deep_gemm.is_deep_gemm_supported = lambda: supported


@recipe
def mhc_layers(s: Any) -> None:  # nvidia/model.py, each layer
    from vllm.model_executor.kernels.mhc import tilelang as module

    _deepgemm_is(True)
    for tokens in s.mhc_tokens:
        t = _mhc(s, tokens)
        module.mhc_fused_post_pre_tilelang(
            t["x"], t["residual"], *t["mix"], *t["weights"], norm_weight=t["norm"]
        )


@recipe
def mhc_ends(s: Any) -> None:  # nvidia/model.py and mtp.py: first layer, head, MTP
    from vllm.model_executor.kernels.mhc import tilelang as module

    _deepgemm_is(True)
    h, m = s.hidden_size, s.hc_mult
    t = _mhc(s, s.tokens)
    module.mhc_pre_tilelang(t["residual"], *t["weights"], norm_weight=None)
    module.mhc_pre_broadcast_tilelang(
        t["x"], *t["weights"], norm_weight=t["norm"], fn_broadcast=f32(m * (2 + m), h)
    )
    module.mhc_post_tilelang(t["x"], t["residual"], *t["mix"])
    module.hc_head_fused_kernel_tilelang(
        t["residual"], f32(m, m * h), f32(1), f32(m), s.rms_norm_eps, s.hc_eps
    )


@recipe
def mhc_without_deepgemm(s: Any) -> None:  # VLLM_USE_DEEP_GEMM=0
    from vllm.model_executor.kernels.mhc import tilelang as module

    _deepgemm_is(False)
    for tokens in s.mhc_tokens:
        if tokens > 16:
            t = _mhc(s, tokens)
            module.mhc_pre_tilelang(t["residual"], *t["weights"], norm_weight=t["norm"])


# --- DeepGEMM -------------------------------------------------------------------------------
# Mode deepgemm: its host library reads sizes and pointers, so these lie in (untouched) memory.


def cpu(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def packed(rows: int, k: int, block: int = 128) -> torch.Tensor:
    """UE8M0 scales of `rows` x k, four to an int32, rows first (as the quantisation kernels do)."""
    columns, aligned = -(-k // block // 4), -(-rows // 4) * 4
    return torch.empty_strided((rows, columns), (1, aligned), dtype=torch.int32)


E4M3 = torch.float8_e4m3fn


def _linear(s: Any) -> list[tuple[int, int]]:
    """(N, K) of the FP8 linear layers of a rank (models/deepseek_v4/attention.py, model.py)."""
    h, shapes = s.hidden_size, []
    for ranks in s.tensor_parallel:
        inner = s.moe_intermediate_size // ranks
        shapes += [
            (s.q_lora_rank + s.head_dim, h),
            (s.num_attention_heads * s.head_dim // ranks, s.q_lora_rank),
            (h, s.o_groups * s.o_lora_rank // ranks),
            (s.index_n_heads * s.index_head_dim, s.q_lora_rank),
            (2 * inner, h),
            (h, inner),
        ]
    return list(dict.fromkeys(shapes))


@recipe
def gemm_linear(s: Any) -> None:  # kernels/linear/scaled_mm/deep_gemm.py
    from vllm.utils.deep_gemm import fp8_gemm_nt, transform_sf_into_required_layout

    for n, k in _linear(s):
        scale = transform_sf_into_required_layout(
            sf=cpu(torch.float32, 1, n // 128, k // 128), mn=n, k=k, recipe=(1, 128, 128),
            num_groups=1, is_sfa=False,
        ).squeeze(0)  # fmt: skip
        for m in s.gemm_tokens:
            fp8_gemm_nt(
                (cpu(E4M3, m, k), packed(m, k)), (cpu(E4M3, n, k), scale),
                cpu(torch.bfloat16, m, n), is_deep_gemm_e8m0_used=True,
            )  # fmt: skip


@recipe
def gemm_output(s: Any) -> None:  # nvidia/ops/o_proj.py
    from vllm.models.deepseek_v4.nvidia.ops.o_proj import compute_fp8_einsum_recipe
    from vllm.utils.deep_gemm import (
        fp8_einsum,
        get_tma_aligned_size,
        transform_sf_into_required_layout,
    )

    how, _ = compute_fp8_einsum_recipe()
    d = s.num_attention_heads // s.o_groups * s.head_dim
    for ranks in s.tensor_parallel:
        g, r = s.o_groups // ranks, s.o_lora_rank
        scale = transform_sf_into_required_layout(
            sf=cpu(torch.float32, g, r // 128, d // 128), mn=r, k=d, recipe=(1, 128, 128),
            num_groups=g, is_sfa=False,
        )  # fmt: skip
        for m in s.gemm_tokens:
            inner, rows = -(-d // 128 // 4), get_tma_aligned_size(m, 4)
            o_scale = torch.empty(g * inner * rows, dtype=torch.int32).as_strided(
                (g, m, inner), (inner * rows, 1, rows)
            )
            fp8_einsum(
                "bhr,hdr->bhd",
                (cpu(E4M3, g, m, d).transpose(0, 1), o_scale.transpose(0, 1)),
                (cpu(E4M3, g, r, d), scale), cpu(torch.bfloat16, m, g, r), recipe=how,
            )  # fmt: skip


@recipe
def gemm_experts(s: Any) -> None:  # experts/deep_gemm_moe.py, DeepGemmFP4Experts.apply
    from vllm.utils.deep_gemm import (
        get_mk_alignment_for_contiguous_layout,
        m_grouped_fp8_fp4_gemm_nt_contiguous,
        transform_sf_into_required_layout,
    )

    experts, align = s.n_routed_experts, get_mk_alignment_for_contiguous_layout()[0]
    for ranks in s.tensor_parallel:
        inner = s.moe_intermediate_size // ranks
        for n, k in ((2 * inner, s.hidden_size), (s.hidden_size, inner)):
            scale = transform_sf_into_required_layout(
                sf=cpu(torch.float32, experts, n, k // 32), mn=n, k=k, recipe=(1, 1, 32),
                num_groups=experts, is_sfa=False,
            )  # fmt: skip
            rows = -(-s.tokens * s.num_experts_per_tok // align) * align + experts * align
            m_grouped_fp8_fp4_gemm_nt_contiguous(
                (cpu(E4M3, rows, k), packed(rows, k)), (cpu(torch.int8, experts, n, k // 2), scale),
                cpu(torch.bfloat16, rows, n), cpu(torch.int32, rows), recipe_a=(1, 128),
                recipe_b=(1, 32),
            )  # fmt: skip


@recipe
def gemm_indexer(s: Any) -> None:  # sparse_attn_indexer.py, mla/indexer.py
    from vllm.utils.deep_gemm import (
        fp8_fp4_mqa_logits,
        fp8_fp4_paged_mqa_logits,
        get_paged_mqa_logits_metadata,
    )

    heads, dim, page = s.index_n_heads, s.index_head_dim, max(s.pages) // 4
    m, i32_, f32_ = s.tokens, torch.int32, torch.float32
    for fp4 in (False, True):
        if fp4:
            q = (cpu(torch.int8, m, heads, dim // 2), cpu(i32_, m, heads))
            kv = (cpu(torch.int8, 4096, dim // 2), cpu(i32_, 4096))
            width = dim // 2 + 4
        else:
            q, kv, width = (
                (cpu(E4M3, m, heads, dim), None),
                (cpu(E4M3, 4096, dim), cpu(f32_, 4096)),
                dim + 4,
            )
        fp8_fp4_mqa_logits(
            q, kv, cpu(f32_, m, heads), cpu(i32_, m), cpu(i32_, m), clean_logits=False
        )
        for next_n in (1, 2, 1 + s.k):
            lens = cpu(i32_, s.requests, next_n)
            plan = get_paged_mqa_logits_metadata(lens, page, 48)
            if fp4:
                q = (
                    cpu(torch.int8, s.requests, next_n, heads, dim // 2),
                    cpu(i32_, s.requests, next_n, heads),
                )
            else:
                q = (cpu(E4M3, s.requests, next_n, heads, dim), None)
            fp8_fp4_paged_mqa_logits(
                q, cpu(torch.uint8, 64, page, 1, width), cpu(f32_, s.requests * next_n, heads),
                lens, cpu(i32_, s.requests, 64), plan, max_model_len=4096, clean_logits=False,
            )  # fmt: skip


@recipe
def gemm_mhc(s: Any) -> None:  # kernels/mhc/tilelang.py
    from vllm.model_executor.kernels.mhc.tilelang_kernels import compute_num_split
    from vllm.utils.deep_gemm import tf32_hc_prenorm_gemm

    n = s.hc_mult * (2 + s.hc_mult)
    for k in (s.hc_mult * s.hidden_size, s.hidden_size):
        for m in s.mhc_tokens:
            splits = compute_num_split(64, k, -(-m // 64))
            tf32_hc_prenorm_gemm(
                cpu(torch.bfloat16, m, k), cpu(torch.float32, n, k),
                cpu(torch.float32, splits, m, n), cpu(torch.float32, splits, m), splits,
            )  # fmt: skip


@dataclass(frozen=True)
class Shapes:
    """See pins/<release>/jit.toml. Unknown names there are an error."""

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    window: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    swiglu_limit: float
    tensor_parallel: list[int]
    k: int
    pages: list[int]
    row_bytes: int
    c128_topk: int
    tokens: int
    requests: int
    positions: int
    mhc_tokens: list[int]
    gemm_tokens: list[int]

    @property
    def nope_dim(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def heads_per_rank(self) -> list[int]:
        return [self.num_attention_heads // ranks for ranks in self.tensor_parallel]
