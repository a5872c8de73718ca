"""Make this process believe that it runs on a GB10, so that vLLM's launch code takes that path.

Only answers to questions are changed (platform, capability, properties, Triton's target). No
kernel is launched: catch.py stops each one after it was compiled.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from typing import Any

# NVIDIA's CUDA C++ programming guide, technical specifications of 12.x, and GB10's 48 SMs.
PROPERTIES = {
    "name": "NVIDIA GB10", "major": 12, "minor": 1, "multi_processor_count": 48, "warp_size": 32,
    "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 101376,
    "shared_memory_per_multiprocessor": 102400, "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 1536, "total_memory": 128 << 30, "L2_cache_size": 24 << 20,
    "is_integrated": 1,
}  # fmt: skip


def environment(arch: str) -> None:
    """Set what must be set before torch, Triton, CuTeDSL and vLLM are imported. arch: '12.1a'."""
    os.environ["CUTE_DSL_ARCH"] = "sm_" + arch.replace(".", "")
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    os.environ["VLLM_USE_DEEP_GEMM"] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def gb10() -> Any:
    """Import torch and Triton and change their answers; returns torch."""
    import torch

    properties = types.SimpleNamespace(**PROPERTIES)
    stream = types.SimpleNamespace(cuda_stream=0)
    cuda: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (12, 1),
        "get_device_name": lambda device=None: PROPERTIES["name"],
        "get_device_properties": lambda device=None: properties,
        "current_stream": lambda device=None: stream, "synchronize": lambda device=None: None,
        "device": lambda device: contextlib.nullcontext(), "get_arch_list": lambda: ["sm_121a"],
        "is_current_stream_capturing": lambda: False, "mem_get_info": lambda device=None: (1 << 36, 1 << 37),
    }  # fmt: skip
    for name, answer in cuda.items():
        setattr(torch.cuda, name, answer)
    _triton()
    return torch


def _triton() -> None:
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Driver:
        """What Triton asks of a driver before it launches."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 121, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return (12, 1)

        def get_active_torch_device(self) -> str:
            return "meta"

    for name, backend in backends.items():
        active = name == "nvidia"
        backend.driver.is_active = staticmethod(lambda active=active: active)
    driver.set_active(Driver())


def platform() -> Any:
    """Set vLLM's platform to CUDA without NVML; returns it."""
    import vllm.platforms as platforms

    # The compiled extensions are not looked at here: the tree is Python only.
    for name in (
        "_C",
        "_C_stable_libtorch",
        "_moe_C_stable_libtorch",
        "vllm_flash_attn._vllm_fa2_C",
    ):
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    _questions_to_extensions()
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms.current_platform = NonNvmlCudaPlatform()
    platforms._current_platform = platforms.current_platform
    return platforms.current_platform


def _questions_to_extensions() -> None:
    """vLLM's compiled extensions say at import what they support; on GB10 they say yes."""
    import torch

    class Namespace:
        def __getattr__(self, name: str) -> Any:
            if "supports" in name:
                return lambda *arguments: True
            raise AttributeError(name)

    for name in ("_C", "_moe_C"):
        setattr(torch.ops, name, Namespace())
