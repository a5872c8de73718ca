"""The steps that prove a wheelhouse on a machine of its target's kind: the one list.

Both ways follow it: `Dockerfile.verify` runs the verb inside a container, `nox -s verify-target`
enters a root of the target by itself. In this order, and nothing of the wheelhouse is imported
before `checksums` has passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """kind: who does it (`run.py`); 'check' is a function of checks.py, in a process of its own.

    needs: distributions without which it can't be made; whole: all that vllm requires too.
    limit: seconds until it has failed, emulated (a tenth natively). brief: in the quick list.
    """

    name: str
    kind: Literal["checksums", "binaries", "install", "extensions", "check"]
    about: str
    needs: tuple[str, ...] = ()
    whole: bool = False
    limit: float = 0.0
    brief: bool = False


STEPS = (
    Step(name="checksums", kind="checksums", about="every file is the one of SHA256SUMS", brief=True),
    Step(name="binaries", kind="binaries", about="verify-abi, static", brief=True),
    Step(name="install", kind="install", about="install.py, with no network", brief=True),
    Step(
        name="extensions", kind="extensions", needs=("torch",), brief=True,
        about="verify-abi, dynamic: every extension of the target's is imported",
    ),
    Step(name="torch", kind="check", needs=("torch",), limit=900,
         about="a CUDA build, that computes, with the NCCL that is installed"),
    Step(name="torchvision", kind="check", needs=("torch", "torchvision"), limit=900, brief=True,
         about="its operators for CPU and CUDA; nms compared with a hand computation"),
    Step(name="torchaudio", kind="check", needs=("torch", "torchaudio"), limit=900,
         about="its operators; mu-law compared with a hand computation"),
    Step(name="tvm-ffi", kind="check", needs=("torch", "apache-tvm-ffi"), limit=900,
         about="a tensor goes to it and back without a copy"),
    Step(name="cutedsl", kind="check", needs=("nvidia-cutlass-dsl",), limit=1800,
         about="components of one version, none mixed, and a kernel compiles for sm_121a"),
    Step(name="tilelang", kind="check", needs=("torch", "tilelang"), limit=1800,
         about="imports beside the installed tvm-ffi"),
    Step(name="flashinfer", kind="check", needs=("torch", "flashinfer-python"), limit=1800,
         about="imports, and finds the kernels compiled ahead of time"),
    Step(name="vllm", kind="check", needs=("torch", "vllm"), whole=True, limit=3600,
         about="imports; `vllm --version` says what the wheel is"),
    Step(name="gates", kind="check", needs=("torch", "vllm"), whole=True, limit=3600,
         about="the patched modules import, and the patches' switches are seen"),
)  # fmt: skip
