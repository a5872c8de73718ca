"""FlashInfer's JIT modules: its own ninja file says how, nvcc compiles each source.

What a node does at the first call: the cubin of each object file is kept and read, the objects are
linked, and the module's own host code is run with the driver stood in (launches.py), since only
that knows with how much shared memory it launches.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def compile_module(
    name: str,
    module: dict[str, Any],
    shapes: Any,
    report: Callable[[dict[str, Any]], None],
    outputs: Any,
) -> None:
    """Compile one module's CUDA sources, a record for each; then see what vLLM launches of them
    (calls_flashinfer.py), reported after the records: {"launches": ...} of all of them, as in catch.py.

    Raises RuntimeError if there is nothing to compile, if the objects can't be linked, if nothing
    is launched, or if the launch code raises or dies.
    """
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
    objects = [ninja.parent / f"{number}.o" for number in range(len(lines))]
    failed = False
    for line, made in zip(lines, objects, strict=True):
        record = _compile(shlex.split(line), made, module["kernel"], outputs)
        failed |= "error" in record
        report(record)
    calls = importlib.import_module("calls_flashinfer").LAUNCHES.get(name)
    if calls and not failed:
        library = ninja.parent / f"{spec.name}.so"
        _link(objects, library)
        launches = importlib.import_module("launches")
        report({"launches": launches.launches_apart(library, lambda: calls(shapes))})


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


def _compile(words: list[str], made: Path, kernel: str, outputs: Any) -> dict[str, Any]:
    """Run ninja's command as it is, but for the object's place; its intermediate files are kept
    until the cubin was read."""
    source = next(word for word in words if word.endswith(".cu"))
    words[words.index("-o") + 1] = str(made)
    kept = made.with_suffix("")
    kept.mkdir()
    target = re.search(r"code=(sm_\w+)", " ".join(words))
    record: dict[str, Any] = {
        "family": "flashinfer", "kernel": kernel, "variant": {"source": Path(source).name},
        "target": target[1] if target else "",
    }  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(
        [*words, "-Xptxas=-v", "--keep", "--keep-dir", str(kept)], cwd=made.parent, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    record["seconds"] = round(time.monotonic() - started, 3)
    record["ptxas"] = done.stdout
    cubins = list(kept.glob("*.cubin"))
    if done.returncode:
        record["error"] = f"nvcc ended with status {done.returncode}\n{done.stdout}"
    elif len(cubins) != 1:
        record["error"] = f"nvcc kept {len(cubins)} cubins of one target\n{done.stdout}"
    else:
        record["cubin"] = outputs.put(cubins[0].read_bytes(), ".cubin")
    shutil.rmtree(kept)
    return record


def _link(objects: list[Path], library: Path) -> None:
    """Without the libraries of CUDA: what they have is found when it is called, first in the
    stand-ins (gb10_runtime.c says where else)."""
    done = subprocess.run(
        [os.environ.get("CXX", "c++"), "-shared", "-o", str(library), *map(str, objects)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{library.name} can't be linked\n{done.stdout}")
