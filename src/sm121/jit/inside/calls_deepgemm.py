"""DeepGEMM, through vLLM's wrappers. Its host library reads sizes and pointers, so tensors lie in
(untouched) memory.
"""

from __future__ import annotations

from typing import Any

import torch
from calls import recipe


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
        transform_sf_into_required_layout,
    )

    # As a node does when it loads weights. Without, DeepGEMM a6b593d2 looks for sm121_…cuh, which
    # it does not have: it knows the name's sm120 only once its compiler was looked at.
    transform_sf_into_required_layout(
        sf=cpu(torch.float32, 1, 8, 8), mn=1024, k=1024, recipe=(1, 128, 128), num_groups=1,
        is_sfa=False,
    )  # fmt: skip
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
