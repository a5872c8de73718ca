"""Run recipes in the environment under test, in child processes, and read what they told.

A compiler may crash or hang. Each recipe has its time; a child that dies is replaced, and the
next one goes on behind the recipe that killed it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sm121 import proc
from sm121.files import remove_tree, write_atomic
from sm121.toolkit.machine import host_compilers

INSIDE = Path(__file__).with_name("inside")
Mode = Literal["triton", "cutedsl", "tilelang", "deepgemm", "flashinfer"]
_IMPORTS = "imports"
# A compiler that hangs outlives the Python that gave it up, and holds the pipe that we read. So what
# is left of the group ends with it (sh's status of a signal: 128 and its number).
_GUARD = ("sh", "-c", '"$@"; code=$?; trap "" TERM; kill -TERM 0; exit $code', "sh")
# What stands for the driver, and for the runtime of a module whose own host code is run.
_STAND_INS: Mapping[str, tuple[str, ...]] = {
    "deepgemm": ("gb10.c",), "flashinfer": ("gb10.c", "gb10_runtime.c"),
}  # fmt: skip
_CACHES = ("triton", "tilelang", "deepgemm", "flashinfer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where recipes run. tree: holds vllm/; python: the environment's; work: for cubins and logs;
    seconds: for one recipe; toolkit: CUDA_HOME as a node has it; modules:
    FlashInfer's, by recipe; arch: e.g. '12.1a'."""

    tree: Path
    python: Path
    toolkit: Path
    work: Path
    log: Path
    seconds: int
    shapes: Mapping[str, Any]
    modules: Mapping[str, Any]
    arch: str = "12.1a"


@dataclass(kw_only=True, slots=True)
class Told:
    """What one recipe told. error: why it did not end well, '' if it did."""

    records: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


def run_recipes(
    bench: Bench, mode: Mode, names: Sequence[str], on_begin: Callable[[str], None]
) -> dict[str, Told]:
    """Run these recipes; by name, what each told."""
    told = {name: Told() for name in names}
    left = list(names)
    while left:
        ended, error = _child(bench, mode, left, told, on_begin)
        if error:  # before any recipe: the imports
            for name in left:
                told[name].error = error
            break
        left = [name for name in left if name not in ended]
    return told


def _child(
    bench: Bench,
    mode: Mode,
    names: Sequence[str],
    told: dict[str, Told],
    on_begin: Callable[[str], None],
) -> tuple[set[str], str]:
    """One process. Returns the recipes that are done with, and why none could begin."""
    bench.work.mkdir(parents=True, exist_ok=True)
    out, job = bench.work / f"{mode}.jsonl", bench.work / f"{mode}.json"
    out.write_text("")
    cubins = bench.work / "cubins"
    facts = {
        "tree": str(bench.tree), "mode": mode, "recipes": list(names), "shapes": dict(bench.shapes),
        "out": str(out), "cubins": str(cubins), "seconds": bench.seconds,
        "arch": bench.arch, "modules": {n: dict(m) for n, m in bench.modules.items()},
    }  # fmt: skip
    write_atomic(job, json.dumps(facts))
    finished = proc.run(
        [*_GUARD, bench.python, "-W", "ignore", INSIDE / "work.py", job],
        cwd=bench.work, env=environment(bench, mode), log=bench.log, check=False, on_line=lambda line: None,
    )  # fmt: skip
    for leftover in (*cubins.glob("dump-*"), *(cubins / family for family in _CACHES)):
        remove_tree(leftover)
    ended: set[str] = set()
    begun = ""
    for line in out.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if "begin" in event:
            begun = event["begin"]
            on_begin(begun)
        elif "end" in event:
            if event["end"] == _IMPORTS:
                if event["error"]:
                    return ended, f"{event['error']}\n{event.get('trace', '')}"
            else:
                ended.add(event["end"])
                told[event["end"]].error = event["error"]
            begun = ""
        elif "kernel" in event:
            told[event["recipe"]].records.append(event)
        else:  # the launches of what was compiled before
            for record in told[event["recipe"]].records:
                record["launches"] = event["launches"]
    if begun:
        why = death(finished.returncode, bench)
        if begun == _IMPORTS:
            return ended, why
        told[begun].error = why
        ended.add(begun)
    elif set(names) - ended:
        return ended, death(finished.returncode, bench)
    return ended, ""


def death(code: int, bench: Bench) -> str:
    """Why a child did not tell its end, in words, with the last of what it said."""
    text = bench.log.read_text(encoding="utf-8", errors="replace")
    # Of this child alone: the one before may have timed out.
    tail = text.rpartition("\n$ ")[2].splitlines()[1:][-30:]
    said = "\n".join(line for line in tail if not line.startswith("# exit"))
    code = 128 - code if code > 128 else code
    if "Timeout (" in said:
        return f"timed out after {bench.seconds} s\n{said}"
    if code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)})\n{said}"
    return f"ended with status {code}\n{said}"


def environment(bench: Bench, mode: Mode) -> dict[str, str]:
    """A node's environment: nothing of the caller's that compilers or vLLM read."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(
            ("VLLM_", "TRITON_", "CUTE_DSL_", "TILELANG_", "FLASHINFER_", "DG_", "CUDA_", "PYTHON",
             "NVCC_", "TVM_", "LD_")
        )
    }  # fmt: skip
    kept["CUDA_HOME"] = str(bench.toolkit)
    kept["PATH"] = f"{bench.toolkit / 'bin'}:{bench.python.parent}:{kept.get('PATH', '')}"
    if mode in _STAND_INS:
        stand_in = make_stand_in(bench, mode)
        kept["LD_PRELOAD"], kept["LD_LIBRARY_PATH"] = str(stand_in), str(stand_in.parent)
    return kept


def make_stand_in(bench: Bench, mode: Mode) -> Path:
    """Compile the mode's stand-ins, as the library to preload and, beside it, as the driver's name.

    Raises CompilerMissing or ToolFailed.
    """
    folder = bench.work / f"gb10-{mode}"
    folder.mkdir(parents=True, exist_ok=True)
    library, driver = folder / "libgb10.so", folder / "libcuda.so.1"
    proc.run(
        [
            host_compilers().cc, "-shared", "-fPIC", "-O1",
            f"-I{bench.toolkit / 'include'}", "-o", library,
            *(INSIDE / name for name in _STAND_INS[mode]),
        ],
        log=bench.log,
    )  # fmt: skip
    driver.unlink(missing_ok=True)
    driver.symlink_to(library.name)
    return library
