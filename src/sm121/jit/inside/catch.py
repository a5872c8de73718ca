"""Stop each kernel of a JIT family between "compiled" and "launched", and report it.

Every catcher replaces the one function of its family that compiles and launches. It does what
that function does as far as the cubin, gives a record to `report` and launches nothing.

A record: family, kernel ("module:name"), variant (what distinguishes it: constexprs, warps),
seconds, and either cubin (path), ptxas (what the assembler said; may be empty) or error. What a
launch asks for: threads and dynamic_shared (bytes per block), or launches, which has both for each
of the cubin's kernels that is launched, by its name there.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Report = Callable[[dict[str, Any]], None]


class Outputs:
    """Where cubins and PTX go, named by content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, content: bytes, suffix: str) -> str:
        path = self.folder / (hashlib.sha256(content).hexdigest()[:24] + suffix)
        path.write_bytes(content)
        return str(path)


@contextlib.contextmanager
def recorded(report: Report, record: dict[str, Any]) -> Iterator[None]:
    """Time the block; a failure becomes the record's error, and the launch code goes on."""
    started = time.monotonic()
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    except Exception as error:
        told = "".join(traceback.format_exception_only(error)).strip()
        context = error.__cause__ or error.__context__
        if context is not None:
            told += "\n" + "".join(traceback.format_exception_only(context)).strip()
        record["error"] = f"{told}\n{said.getvalue()}"
        record["trace"] = "".join(traceback.format_exception(error)[-12:])
    record["seconds"] = round(time.monotonic() - started, 3)
    if "ptxas" not in record:
        record["ptxas"] = said.getvalue()
    report(record)


def _ptx_target(ptx: str) -> str:
    """'sm_121a' of `.target sm_121a`."""
    found = re.search(r"^\s*\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    return found[1] if found else ""


def _short(value: Any) -> str:
    return str(getattr(value, "value", value))


def catch_triton(report: Report, outputs: Outputs) -> None:
    """Triton: JITFunction.run, called by every `kernel[grid](...)`."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    knobs.nvidia.dump_ptxas_log = True
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        constants = [p.name for p in self.params if p.is_constexpr]
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        options = ("num_warps", "num_stages", "num_ctas", "launch_pdl", "maxnreg")
        variant = {n: _short(given[n]) for n in (*constants, *options) if n in given}
        record: dict[str, Any] = {
            "family": "triton", "kernel": f"{self.module}:{self.fn.__name__}", "variant": variant,
        }  # fmt: skip
        with recorded(report, record):
            kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
            kernel = kernel.result() if hasattr(kernel, "result") else kernel
            record["cubin"] = outputs.put(kernel.asm["cubin"], ".cubin")
            record["threads"] = 32 * int(kernel.metadata.num_warps)
            record["dynamic_shared"] = int(kernel.metadata.shared)
            record["target"] = _ptx_target(kernel.asm["ptx"])
        return None

    JITFunction.run = run


def catch_cutedsl(report: Report, outputs: Outputs, dump: Path) -> None:
    """CuTeDSL: cutlass.cute.compile, which vLLM calls with fake tensors."""
    import cutlass.cute as cute

    original = cute.compile
    shared: list[int] = []
    for owner in vars(sys.modules["cutlass.cutlass_dsl.cutlass"]).values():
        if isinstance(owner, type) and "_get_smem_usage" in vars(owner):
            _watch(owner, shared)

    class Compile:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getitem__(self, options: Any) -> Any:
            return Compile(self.inner[options])

        def __call__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            owner = kernel if hasattr(kernel, "__qualname__") else type(kernel)
            facts = {
                n: str(v) for n, v in sorted(vars(kernel).items())
                if isinstance(v, bool | int | float | str) and not n.startswith("_")
            } if owner is not kernel else {}  # fmt: skip
            record: dict[str, Any] = {
                "family": "cutedsl", "kernel": f"{owner.__module__}:{owner.__qualname__}",
                "variant": facts,
            }  # fmt: skip
            before = set(dump.iterdir())
            shared.clear()
            with recorded(report, record):
                self.inner(kernel, *args, **kwargs)
                new = sorted(set(dump.iterdir()) - before)
                cubins = [f for f in new if f.suffix == ".cubin"]
                if not cubins:
                    raise RuntimeError(f"CuTeDSL compiled and left no cubin (it left {new})")
                record["cubins"] = [outputs.put(f.read_bytes(), ".cubin") for f in cubins]
                texts = [f.read_text() for f in new if f.suffix == ".ptx"]
                record["target"] = next((_ptx_target(text) for text in texts), "")
                record["dynamic_shared"] = max(shared, default=0)
            for file in set(dump.iterdir()) - before:
                file.unlink()
            return lambda *a, **k: None

    cute.compile = Compile(original)


def _watch(dsl: type, shared: list[int]) -> None:
    """Note what each launch takes of dynamic shared memory (it is in no cubin)."""
    original = dsl._get_smem_usage  # type: ignore[attr-defined]

    def usage(self: Any) -> Any:
        size = original(self)
        if isinstance(size, int):
            shared.append(size)
        return size

    dsl._get_smem_usage = usage  # type: ignore[attr-defined]


def catch_tilelang(report: Report, outputs: Outputs) -> None:
    """TileLang: the call of a `@tilelang.jit` function, and the nvcc run behind it."""
    from tilelang.contrib import nvcc
    from tilelang.jit import JITImpl

    current: dict[str, Any] = {}
    original = nvcc.compile_cuda

    def compile_cuda(code: str, *args: Any, **kwargs: Any) -> Any:
        options = list(kwargs.get("options") or [])
        kwargs["options"] = [*options, "-Xptxas=-v"]
        kwargs["verbose"] = True
        cubin = original(code, *args, **kwargs)
        current["cubin"] = outputs.put(bytes(cubin), ".cubin")
        given = kwargs.get("arch") or (args[1] if len(args) > 1 else "")
        found = re.search(r"sm_\d+[af]?", str(given))
        current["target"] = found[0] if found else str(given)
        return cubin

    nvcc.compile_cuda = compile_cuda

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        function = getattr(self.func, "orig_func", self.func)
        # Not bind(): TileLang ignores a keyword that the function lacks, and vLLM gives one.
        bound = dict(zip(inspect.signature(function).parameters, args, strict=False)) | kwargs
        variant = {n: str(v) for n, v in bound.items() if not isinstance(v, torch.Tensor)}
        record: dict[str, Any] = {
            "family": "tilelang", "kernel": f"{function.__module__}:{function.__name__}",
            "variant": variant,
        }  # fmt: skip
        if self.mode == "auto":
            self.mode = self._infer_jit_mode(*args, **kwargs)
            self.func.set_mode(self.mode)
        # As in the original: what was compiled is not compiled again.
        key, _ = self.func.parse_args(*args, **kwargs)
        if key in self._kernel_cache:
            return None
        current.clear()
        with recorded(report, record):
            made = self.compile(*args, **kwargs)
            if "cubin" not in current:
                raise RuntimeError("TileLang compiled and nvcc was not run")
            record.update(current)
            record["launches"] = dict(
                map(_tilelang_launch, made.artifact.device_mod.functions.values())
            )
        self._kernel_cache[key] = None
        return None

    JITImpl.__call__ = call


def _tilelang_launch(function: Any) -> tuple[str, dict[str, int]]:
    """A lowered device function's name and what its host code launches it with. Its grid may depend
    on arguments; its block does not."""
    attributes = function.attrs
    threads = 1
    for tag, extent in attributes["thread_extent"].items():
        threads *= int(extent) if "threadIdx" in str(tag) else 1
    # The host code passes a size only for this tag (tir's LowerDeviceKernelLaunch).
    asks = "tir.use_dyn_shared_memory" in map(str, attributes["tir.kernel_launch_params"])
    shared = int(attributes["dyn_shared_memory_buf"]) if asks else 0
    return str(attributes["global_symbol"]), {"threads": threads, "dynamic_shared": shared}


def catch_deepgemm(report: Report, outputs: Outputs, folder: Path) -> None:
    """DeepGEMM: vLLM's wrappers; its own host library makes the source and runs nvcc, gb10.c
    stands for the driver. One record per kernel that a wrapper launches."""
    import vllm.utils.deep_gemm as deep_gemm

    launches, said = folder / "launches", folder / "said"
    os.environ["GB10_LAUNCHES"] = str(launches)
    known: set[str] = set()

    def wrapped(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            record: dict[str, Any] = {
                "family": "deepgemm", "kernel": f"vllm.utils.deep_gemm:{name}", "variant": {},
            }  # fmt: skip
            launches.write_text("")
            started = time.monotonic()
            result, error = None, ""
            with _descriptors(said):
                try:
                    result = original(*args, **kwargs)
                except Exception as problem:
                    error = f"{type(problem).__name__}: {problem}"
            seconds = round(time.monotonic() - started, 3)
            told = said.read_text(errors="replace")
            if error:
                report({**record, "error": f"{error}\n{told}", "ptxas": told, "seconds": seconds})
                raise DeepGemmFailed(name)
            lines = [line.split(" ", 2) for line in launches.read_text().splitlines()]
            new = [line for line in lines if line[2] not in known]
            for threads, shared, cubin in lines:
                program = Path(cubin).parent.name.split(".")[1]
                fresh = cubin not in known
                known.add(cubin)
                report({
                    **record, "variant": {"program": program, **_template(Path(cubin))},
                    "threads": int(threads), "dynamic_shared": int(shared), "ptxas": told if fresh else "",
                    "cubin": outputs.put(Path(cubin).read_bytes(), ".cubin"),
                    "target": _target_of(told) or "sm_120f",
                    "seconds": round(seconds / len(new), 3) if fresh else 0.0,
                })  # fmt: skip
            return result

        return call

    for name in vars(deep_gemm).copy():
        original = getattr(deep_gemm, name)
        if inspect.isfunction(original) and "_impl(" in inspect.getsource(original):
            setattr(deep_gemm, name, wrapped(name, original))


class DeepGemmFailed(Exception):
    """A wrapper failed; that is reported already."""


def _template(cubin: Path) -> dict[str, str]:
    """The template arguments of the generated source: what makes one kernel another."""
    text = (cubin.parent / "kernel.cu").read_text()
    found = re.search(r"&\s*\w+<(.*?)>\s*\)", text, re.DOTALL)
    return {"arguments": " ".join(found[1].split())} if found else {}


def _target_of(told: str) -> str:
    found = re.search(r"for '(sm_\w+)'", told)
    return found[1] if found else ""


@contextlib.contextmanager
def _descriptors(path: Path) -> Iterator[None]:
    """Let what C++ and its children print go to a file."""
    sys.stdout.flush()
    kept = os.dup(1)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
