"""Run a FlashInfer module's own host code, to see what it launches its kernels with.

The linked library's runtime and driver are gb10.c and gb10_runtime.c, preloaded. vLLM's launch
code and FlashInfer's Python run as on a node; tensors lie in (untouched) host memory, and are
shown to the library as a GPU's.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CUDA = 2  # kDLCUDA, in dlpack.h


def launches_apart(library: Path, call: Callable[[], None]) -> dict[str, dict[str, int]]:
    """launches_of in a child process: the host code is another project's and may crash, and what was
    compiled stays.

    Raises RuntimeError with what the child raised, or how it died, and what it wrote to its standard
    error.
    """
    told, said = library.with_suffix(".told"), library.with_suffix(".said")
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        # Never back into the caller: it goes on in the parent.
        code = 1
        try:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            try:
                answer: dict[str, Any] = {"found": launches_of(library, call)}
            except Exception as problem:
                answer = {"error": f"{type(problem).__name__}: {problem}"}
            told.write_text(json.dumps(answer))
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    words = said.read_text(errors="replace") if said.exists() else ""
    if code < 0:
        how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
    elif code:
        how = f"ended with status {code}"
    else:
        answer = json.loads(told.read_text())
        if "found" in answer:
            sys.stderr.write(words)
            return dict(answer["found"])
        how = f"failed: {answer['error']}"
    raise RuntimeError(f"{library.name}: its host code {how}\n{words}")


def launches_of(library: Path, call: Callable[[], None]) -> dict[str, dict[str, int]]:
    """What `call` launches of this library, by the kernel's name as in its cubin: the most threads
    and the most dynamic shared memory (bytes) of a block.

    Raises what `call` raises, and RuntimeError if nothing is launched.
    """
    told = library.with_suffix(".launches")
    told.write_text("")
    os.environ["GB10_LAUNCHES"] = str(told)
    _answers(library)
    call()
    found: dict[str, dict[str, int]] = {}
    for line in told.read_text().splitlines():
        threads, shared, name = line.split(" ")
        most = found.setdefault(name, {"threads": 0, "dynamic_shared": 0})
        most["threads"] = max(most["threads"], int(threads))
        most["dynamic_shared"] = max(most["dynamic_shared"], int(shared))
    if not found:
        raise RuntimeError(f"{library.name}: its host code was called and launched nothing")
    return found


def _answers(library: Path) -> None:
    """Load this library instead of building one; the GPU's questions that FlashInfer asks itself."""
    core = importlib.import_module("flashinfer.jit.core")
    for name in ("flashinfer.decode", "flashinfer.sampling"):
        importlib.import_module(name)
    ffi = importlib.import_module("tvm_ffi")

    def load(spec: Any) -> Any:
        if spec.name != library.stem:
            raise RuntimeError(f"FlashInfer asks for module {spec.name}, not for {library.stem}")
        return Shown(ffi.load_module(str(library)))

    core.JitSpecNvcc.build_and_load = load
    # Both are imported by name. The second reads a GPU's random generator.
    _replace("get_compute_capability", lambda device: (12, 1))
    _replace("get_seed_and_offset", lambda increment, generator=None, device=None: (0, 0))


def _replace(name: str, answer: Any) -> None:
    for module, content in list(sys.modules.items()):
        if module.startswith("flashinfer") and name in vars(content):
            setattr(content, name, answer)


class Shown:
    """A loaded module that is shown tensors of the host as a GPU's."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        ffi, torch = sys.modules["tvm_ffi"], sys.modules["torch"]
        function = getattr(self._module, name)

        def call(*arguments: Any) -> Any:
            return function(
                *(
                    ffi.from_dlpack(_OnGpu(value)) if isinstance(value, torch.Tensor) else value
                    for value in arguments
                )
            )

        return call


class _OnGpu:
    """A tensor for DLPack's exchange, with its device replaced."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, 0)

    def __dlpack__(self, **options: Any) -> Any:
        capsule = sys.modules["torch"].utils.dlpack.to_dlpack(self._tensor)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLManagedTensor begins with a DLTensor: void *data; {int32 device_type, device_id}.
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = _CUDA
        return capsule
