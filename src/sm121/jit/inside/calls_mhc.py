"""Hyper-connections (mHC), by TileLang."""

from __future__ import annotations

from typing import Any

from calls import bf16, f32, recipe


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
