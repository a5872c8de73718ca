"""Experts, router, FP8 linear layers behind DeepGEMM, and the MTP layer's norms."""

from __future__ import annotations

from typing import Any

import torch
from calls import bf16, f32, i32, i64, meta, recipe


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
