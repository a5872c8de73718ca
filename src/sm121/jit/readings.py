"""What a failure means, and whether what was compiled can be launched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sm121.jit.recipes import Limits, ReadingRule
from sm121.jit.report import Meaning, Variant

_UNKNOWN = Meaning(
    kind="unknown",
    says="no rule of jit.toml knows this message",
    next="read it; if it will be seen again, add a [[readings]] entry",
)


def read_failure(message: str, rules: Iterable[ReadingRule]) -> Meaning:
    """The first rule that fits decides."""
    for rule in rules:
        if re.search(rule.pattern, message):
            return Meaning(kind=rule.kind, says=rule.says, next=rule.next)
    return _UNKNOWN


def over_limits(variants: Sequence[Variant], limits: Limits) -> list[str]:
    """What makes a launch impossible, in words; [] if nothing does.

    A block's registers are allocated per warp in units of 256 (8 per thread), as NVIDIA's
    occupancy calculator has it.
    """
    faults = []
    for one in variants:
        shared = one.shared_static + max(one.shared_dynamic, 0)
        rounded = -(-one.registers // 8) * 8
        if shared > limits.shared_per_block:
            faults.append(
                f"{shared:,} bytes of shared memory per block; the GPU has {limits.shared_per_block:,}"
            )
        if one.registers > limits.registers_per_thread:
            faults.append(
                f"{one.registers} registers per thread; the GPU has {limits.registers_per_thread}"
            )
        if rounded * one.threads > limits.registers_per_block:
            faults.append(
                f"{one.threads} threads of {rounded} registers; a block has {limits.registers_per_block:,}"
            )
        if one.threads > limits.threads_per_block:
            faults.append(
                f"{one.threads} threads per block; the GPU has {limits.threads_per_block:,}"
            )
    return list(dict.fromkeys(faults))
