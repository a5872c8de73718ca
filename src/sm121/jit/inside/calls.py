"""The calls that the DeepSeek-V4 path makes, with tensors that have shape and no memory.

The recipes are in the modules beside this one; here is what they share. Each function calls vLLM's own launch code as the model does (the caller is named), so that
constexprs, warps and dtypes are vLLM's; what differs between deployments comes from `Shapes`
(pins/<release>/jit.toml). Where launch code lies in a method of a large class, its launch is
repeated here, and a changed signature then fails as "the pin's API changed".

pins/<release>/jit.toml names the kernels that each recipe must reach: one that it does not reach
is a fault.
"""

from __future__ import annotations

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
    vocab_size: int
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
