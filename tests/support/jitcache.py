"""A stack that lists FlashInfer modules, as data."""

from __future__ import annotations

from typing import Any

from support.stacks import minimal


def module(name: str, function: str = "run") -> dict[str, Any]:
    return {
        "generator": f"flashinfer.jit.{name}:gen_{name}_module",
        "functions": [function],
        "reason": f"what {name} is for",
        "source": "where it was read",
    }


def listing() -> dict[str, Any]:
    """A minimal stack with one module listed and one left out; profiles smoke and kernels."""
    data = minimal()
    data["family"] |= {
        "flashinfer-python": {"version": "0.6.17", "reason": "needed"},
        "apache-tvm-ffi": {"version": "0.1.9", "reason": "needed"},
    }
    data["jit-cache"] = {
        "imports": ["numpy"],
        "memory-per-job-gib": 2,
        "modules": {"attention": module("attention", "decode")},
        "left-out": {"moe": module("moe")},
    }
    data["profiles"]["kernels"] = data["profiles"]["smoke"] | {"jit-cache": True}
    return data
