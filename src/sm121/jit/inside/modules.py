"""FlashInfer's JIT modules: its own ninja file says how, nvcc makes a cubin of each source.

What a node would do at the first call, without the link: the object files' device code is the
same, and the cubin alone says what was asked.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of nvcc's command line: what belongs to the object file.
_OUTPUTS = ("-o", "--dependency-output", "-MF", "-MT")
_DROPPED = ("-c", "--generate-dependencies-with-compile", "-MD", "-MMD")


def compile_module(
    module: dict[str, Any], kernel: str, report: Callable[[dict[str, Any]], None], outputs: Any
) -> None:
    """Compile one module's CUDA sources; a record for each."""
    spec = _spec(module)
    spec.write_ninja()
    ninja = Path(spec.ninja_path)
    listed = subprocess.run(
        [str(Path(sys.executable).with_name("ninja")), "-f", ninja.name, "-t", "commands"],
        cwd=ninja.parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line for line in listed.stdout.splitlines() if re.search(r"\.cu\b", line)]
    if not lines:
        raise RuntimeError(f"{ninja} compiles no CUDA source")
    for line in lines:
        _compile(shlex.split(line), ninja.parent, kernel, report, outputs)


def _spec(module: dict[str, Any]) -> Any:
    package, _, function = module["generator"].partition(":")
    torch = importlib.import_module("torch")
    arguments = {
        name: getattr(torch, value.removeprefix("torch."))
        if isinstance(value, str) and value.startswith("torch.")
        else value
        for name, value in module["arguments"].items()
    }
    return getattr(importlib.import_module(package), function)(**arguments)


def _compile(
    words: list[str],
    folder: Path,
    kernel: str,
    report: Callable[[dict[str, Any]], None],
    outputs: Any,
) -> None:
    source = next(word for word in words if word.endswith(".cu"))
    cubin = folder / (Path(source).stem + ".cubin")
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word in _DROPPED:
            skip = False
        elif word in _OUTPUTS:
            skip = True
        else:
            kept.append(word)
    target = re.search(r"code=(sm_\w+)", " ".join(kept))
    record: dict[str, Any] = {
        "family": "flashinfer", "kernel": kernel, "variant": {"source": Path(source).name},
        "target": target[1] if target else "",
    }  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(
        [*kept, "-cubin", "-Xptxas=-v", "-o", str(cubin)], cwd=folder, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    record["seconds"] = round(time.monotonic() - started, 3)
    record["ptxas"] = done.stdout
    if done.returncode:
        record["error"] = f"nvcc ended with status {done.returncode}\n{done.stdout}"
    else:
        record["cubin"] = outputs.put(cubin.read_bytes(), ".cubin")
    report(record)
