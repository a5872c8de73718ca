"""What is checked by importing: run by the environment's own Python, each check in a process of
its own.

    python -I checks.py NAME

Standard library and what is checked; it does not import sm121. Prints one line per fact and, last,
the sentence that says what was found. A check that fails raises.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

MARK = "sm121-check "
ARCH = "sm_121a"


class Wrong(Exception):
    """What was imported is not what it has to be."""


def fact(name: str, value: object) -> None:
    say("fact", name, str(value))


def say(*words: str) -> None:
    print(MARK + json.dumps(words), flush=True)


def need(condition: object, text: str) -> None:
    if not condition:
        raise Wrong(text)


def own(name: str) -> ModuleType:
    """The module, of this environment and of nowhere else."""
    module = importlib.import_module(name)
    place = getattr(module, "__file__", None) or ""
    need(
        place.startswith(sys.prefix),
        f"{name} came from {place or 'nowhere'}, not from {sys.prefix}",
    )
    return module


def torch() -> str:
    torch = own("torch")
    version = importlib.import_module("torch.version")
    fact("torch", torch.__version__)
    fact("CUDA of torch", version.cuda)
    need(version.cuda, f"torch {torch.__version__} is a CPU build")
    made = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) @ torch.tensor([[5.0], [6.0]])
    need(made.tolist() == [[17.0], [39.0]], f"a 2x2 product gives {made.tolist()}")
    loaded = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(loaded))
    major, rest = divmod(loaded.value, 10000)
    nccl = f"{major}.{rest // 100}.{rest % 100}"
    fact("NCCL", nccl)
    wanted = metadata.version("nvidia-nccl-cu13")
    need(nccl == wanted, f"the NCCL that was loaded is {nccl}, installed is {wanted}")
    return f"torch {torch.__version__}, CUDA {version.cuda}, NCCL {nccl}"


def kernels(space: str, operators: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Each operator has a kernel for each dispatch key: a CPU build imports and has no CUDA one."""
    torch = importlib.import_module("torch")
    for operator in operators:
        name = f"{space}::{operator}"
        missing = [
            key for key in keys
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        ]  # fmt: skip
        need(not missing, f"{name} has no kernel for {' and '.join(missing)}")


VISION = ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


def torchvision() -> str:
    torch, vision = importlib.import_module("torch"), own("torchvision")
    fact("torchvision", vision.__version__)
    for operator in VISION:
        need(hasattr(torch.ops.torchvision, operator), f"torchvision::{operator} does not exist")
    kernels("torchvision", VISION, ("CPU", "CUDA"))
    # Of the first two boxes 9*9 = 81 is common and 100 + 100 - 81 = 119 covered: IoU 0.68.
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30]])
    scores = torch.tensor([0.7, 0.9, 0.8])
    for threshold, kept in ((0.68, [1, 2]), (0.69, [1, 2, 0])):
        found = vision.ops.nms(boxes, scores, threshold).tolist()
        need(found == kept, f"nms at IoU {threshold} keeps {found}, by hand it is {kept}")
    number = vision.version.cuda  # 13000, as cudart has it; None in a CPU build
    cuda = f"{number // 1000}.{number % 1000 // 10}" if number else number
    fact("CUDA of torchvision", cuda)
    need(
        cuda == torch.version.cuda,
        f"torchvision is for CUDA {cuda}, torch for {torch.version.cuda}",
    )
    return (
        f"torchvision {vision.__version__}: {len(VISION)} operators for CPU and CUDA, nms is right"
    )


def torchaudio() -> str:
    torch, audio = importlib.import_module("torch"), own("torchaudio")
    fact("torchaudio", audio.__version__)
    importlib.import_module("torchaudio.functional")
    kernels("torchaudio", ("forced_align",), ("CPU", "CUDA"))
    # (x + 1) / 2 * 255 + 0.5, of which the whole part counts; both ends are exact.
    coded = audio.functional.mu_law_encoding(torch.tensor([-1.0, 0.0, 1.0]), 256).tolist()
    need(coded == [0, 128, 255], f"mu-law of -1, 0, 1 gives {coded}")
    return f"torchaudio {audio.__version__}: forced_align for CPU and CUDA, mu-law is right"


def tvm_ffi() -> str:
    torch, ffi = importlib.import_module("torch"), own("tvm_ffi")
    fact("tvm-ffi", metadata.version("apache-tvm-ffi"))
    there = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    back = torch.from_dlpack(ffi.from_dlpack(there))
    need(back.shape == there.shape and torch.equal(back, there), "a tensor came back changed")
    need(back.data_ptr() == there.data_ptr(), "a tensor was copied on the way")
    return f"tvm-ffi {metadata.version('apache-tvm-ffi')}: a torch tensor went there and back"


def cutedsl() -> str:
    names = sorted(
        name for one in metadata.distributions()
        if (name := one.metadata["Name"].lower().replace("_", "-")).startswith("nvidia-cutlass-dsl")
    )  # fmt: skip
    versions = {name: metadata.version(name) for name in names}
    fact("CuTeDSL", " ".join(f"{n} {v}" for n, v in versions.items()))
    need(len(set(versions.values())) == 1, f"components of several versions: {versions}")
    # The packages own common files; of those the cu13 ones must be there (docs/verify-abi.md).
    owner = next((n for n in names if n.endswith("-cu13")), "")
    mixed = differing(owner) if owner else []
    need(not mixed, f"{len(mixed)} files are not {owner}'s: {', '.join(mixed[:3])}")
    with tempfile.TemporaryDirectory() as folder:
        kept = {"CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_KEEP_CUBIN": "1", "CUTE_DSL_DUMP_DIR": folder}
        os.environ.update(kept, CUTE_DSL_ARCH=ARCH, CUTE_DSL_CACHE_DIR=folder)
        os.chdir(folder)
        compile_kernel(Path(folder))
        text = [f.read_text() for f in Path(folder).rglob("*.ptx")]
        cubins = [f.stat().st_size for f in Path(folder).rglob("*.cubin")]
    need(text and all(f".target {ARCH}" in one for one in text), f"there is no PTX for {ARCH}")
    need(cubins and min(cubins) > 0, "there is no cubin")
    fact("cubin", f"{cubins[0]} bytes")
    return f"{len(names)} packages {versions[names[0]]}, unmixed; a kernel compiled for {ARCH}"


# CuTeDSL reads a kernel's source, so it has to be in a file.
KERNEL = """
import cutlass
import cutlass.cute as cute

@cute.kernel
def fill(destination: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    destination[thread] = cutlass.Float32(1.0)

@cute.jit
def launch(destination: cute.Tensor):
    fill(destination).launch(grid=[1, 1, 1], block=[32, 1, 1])

def compile():
    from cutlass.cute.runtime import make_fake_compact_tensor
    return cute.compile(launch, make_fake_compact_tensor(cutlass.Float32, (32,)))
"""


def compile_kernel(folder: Path) -> None:
    (folder / "sm121_kernel.py").write_text(KERNEL)
    sys.path.insert(0, str(folder))
    own("cutlass")
    importlib.import_module("sm121_kernel").compile()


def differing(distribution: str) -> list[str]:
    """Files of a distribution's RECORD that are missing or have another content."""
    wrong = []
    for file in metadata.distribution(distribution).files or []:
        if file.hash is None:
            continue
        try:
            digest = hashlib.new(file.hash.mode, Path(str(file.locate())).read_bytes()).digest()
        except OSError:
            digest = b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            wrong.append(str(file))
    return wrong


def tilelang() -> str:
    module = own("tilelang")
    fact("tilelang", module.__version__)
    return (
        f"tilelang {module.__version__} imports, with tvm-ffi {metadata.version('apache-tvm-ffi')}"
    )


def flashinfer() -> str:
    module = own("flashinfer")
    fact("flashinfer", module.__version__)
    try:
        metadata.version("flashinfer-jit-cache")
    except metadata.PackageNotFoundError:
        return f"flashinfer {module.__version__}; kernels ahead of time: not in this wheelhouse"
    cache = own("flashinfer_jit_cache")
    folder = Path(cache.get_jit_cache_dir())
    found = sorted(f.parent.name for f in folder.glob("*/*.so"))
    fact("kernels ahead of time", len(found))
    need(found, f"flashinfer_jit_cache names {folder}, which holds no module")
    environment = importlib.import_module("flashinfer.jit.env")
    need(
        Path(environment.FLASHINFER_AOT_DIR) == folder,
        f"flashinfer looks in {environment.FLASHINFER_AOT_DIR}, not in {folder}",
    )
    ffi = own("tvm_ffi")
    for name in found:
        ffi.load_module(str(folder / name / f"{name}.so"))
    return f"flashinfer {module.__version__}; {len(found)} modules ahead of time load: {', '.join(found)}"


def has_gpu() -> bool:
    return bool(importlib.import_module("torch").cuda.is_available())


def vllm() -> str:
    module = own("vllm")
    version = metadata.version("vllm")
    fact("vllm", version)
    need(module.__version__ == version, f"vllm says {module.__version__}, its metadata {version}")
    done = subprocess.run(
        [sys.executable, "-I", str(Path(sys.prefix, "bin", "vllm")), "--version"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = (done.stdout.splitlines() or [""])[-1], (done.stderr.splitlines() or [""])[-1]
    # Its command line wants to know the device before it answers, even this.
    if "Failed to infer device type" in done.stderr and not has_gpu():
        fact("vllm --version", "needs a GPU")
        return f"vllm {version} imports; `vllm --version` was not proved: it fails without a GPU"
    need(done.returncode == 0, f"`vllm --version` exits with {done.returncode}: {lines[1]}")
    need(lines[0].strip() == version, f"`vllm --version` says {lines[0]!r}")
    return f"vllm {version} imports, and `vllm --version` says so"


# What switches a patch off or on, and what is read when nothing is set, and when this is.
SWITCHES = {
    "VLLM_DISABLE_CUTEDSL": (False, "1", True),
    "VLLM_DSV4_SM120_JIT_ATTN": (False, "1", True),
    "VLLM_NCCL_GRAPH_GUARD": ("error", "eager", "eager"),
}


def gates() -> str:
    """The patches' switches are what they are by themselves, and are seen when set."""
    envs = own("vllm.envs")
    for name, (unset, value, wanted) in SWITCHES.items():
        read: Callable[[], Any] | None = envs.environment_variables.get(name)
        need(read, f"vllm.envs does not know {name}")
        assert read is not None
        os.environ.pop(name, None)
        need(read() == unset, f"{name} is {read()!r} by itself, not {unset!r}")
        os.environ[name] = value
        need(read() == wanted, f"{name}={value} is read as {read()!r}")
        del os.environ[name]
    os.environ["VLLM_DISABLE_CUTEDSL"] = "1"
    need(
        not own("vllm.utils.import_utils").has_cutedsl(), "CuTeDSL is used although it is disabled"
    )
    del os.environ["VLLM_DISABLE_CUTEDSL"]
    guard = own("vllm.utils.nccl")
    need(hasattr(guard, "allow_cross_node_cudagraphs"), "vllm.utils.nccl has no NCCL guard")
    modules = json.loads(sys.argv[2]) if len(sys.argv) > 2 else []
    for name in modules:
        own(name)
    fact("patched modules", len(modules))
    return f"{len(SWITCHES)} switches and the NCCL guard are there; {len(modules)} patched modules import"


CHECKS: dict[str, Callable[[], str]] = {
    "torch": torch, "torchvision": torchvision, "torchaudio": torchaudio, "tvm-ffi": tvm_ffi,
    "cutedsl": cutedsl, "tilelang": tilelang, "flashinfer": flashinfer, "vllm": vllm, "gates": gates,
}  # fmt: skip


def main() -> int:
    name = sys.argv[1]
    try:
        say("pass", CHECKS[name]())
    except Wrong as error:
        say("fail", str(error))
        return 1
    except BaseException as error:
        say("fail", f"{type(error).__name__}: {error}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
