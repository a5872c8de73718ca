"""The types of pins/<release>/jit.toml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from sm121.pins.load import read_model
from sm121.pins.model import Model

FILE = "jit.toml"
Reading = Literal["toolchain", "pin", "unsupported", "over-limit", "ours"]


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from error
    return value


class Shapes(Model):
    """Sizes of the model and of its deployment; meanings in jit.toml and inside/calls.py."""

    # Spelt as in the model's config.
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=None)

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
    tensor_parallel: tuple[int, ...]
    k: int
    pages: tuple[int, ...]
    row_bytes: int
    c128_topk: int
    tokens: int
    requests: int
    positions: int
    mhc_tokens: tuple[int, ...]
    gemm_tokens: tuple[int, ...]


class Limits(Model):
    """What one block may have on the GPU; registers are 32 bits, shared memory is in bytes."""

    registers_per_thread: int
    registers_per_block: int
    shared_per_block: int
    threads_per_block: int


class Avoid(Model):
    patterns: tuple[str, ...]
    reason: str


class LeftOut(Model):
    kernels: tuple[str, ...]
    reason: str


class Release(Model):
    folders: tuple[str, ...]


class ReadingRule(Model):
    """pattern: searched in the family's own message. says: our reading. next: what to do."""

    pattern: Annotated[str, AfterValidator(_pattern)]
    kind: Reading
    says: str
    next: str


class Recipe(Model):
    """What a function of inside/calls.py must reach; see jit.toml."""

    triton: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    cutedsl: tuple[str, ...] = ()
    tilelang: tuple[str, ...] = ()
    deepgemm: tuple[str, ...] = ()
    flashinfer: tuple[str, ...] = ()

    def wanted(self, mode: str) -> tuple[str, ...]:
        """Kernels that a run in this mode must compile; () when there is nothing to run."""
        more = self.fallback if mode == "triton" else ()
        return (*getattr(self, mode), *more)


class Recipes(Model):
    """A whole jit.toml."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    package: str
    shapes: Shapes
    limits: Limits
    release: Release
    recipes: dict[str, Recipe]
    avoid: tuple[Avoid, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    readings: tuple[ReadingRule, ...] = ()

    def avoided(self) -> list[str]:
        return [pattern for avoid in self.avoid for pattern in avoid.patterns]

    def reasons(self) -> dict[str, str]:
        """Why each left-out kernel is left out, by its name."""
        return {name: one.reason for one in self.left_out for name in one.kernels}


def has_recipes(pins: Path, stack: str) -> bool:
    """Whether the stack has a jit.toml; verify-jit can do nothing for one that has none."""
    return (pins / stack / FILE).is_file()


def load_recipes(pins: Path, stack: str) -> Recipes:
    """Read and validate. Raises PinsFault with every fault and its place."""
    return read_model(pins / stack / FILE, Recipes, remedy="docs/jit.md describes its keys.")
