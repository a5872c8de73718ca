"""A module's own host code that fails or dies: what was compiled is told all the same.

Everything around inside/modules.py and launches.py is made up here (ninja's commands, nvcc, FlashInfer,
tvm-ffi), so that no environment is needed; the module's host code is C, loaded and run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm121.jit.drive import INSIDE

# Compiles as C, and leaves what stands for a cubin.
NVCC = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in -o) made=$2; shift;; --keep-dir) kept=$2; shift;; *.cu) source=$1;; esac; shift
done
echo "of $source" > "$kept/k.cubin"
exec cc -x c -fPIC -c "$source" -o "$made"
"""
# One launch, as gb10_runtime.c notes it; then what the test asks for.
HOST = """
#include <stdio.h>
#include <stdlib.h>
void launch(void) {
  FILE *file = fopen(getenv("GB10_LAUNCHES"), "a");
  fprintf(file, "128 4096 kernel\\n");
  fclose(file);
  fprintf(stderr, "said by the host code\\n");
  %s
}
"""
PACKAGES = {
    "torch.py": "class Tensor: ...",
    "tvm_ffi.py": "import ctypes\nload_module = ctypes.CDLL",
    "flashinfer/__init__.py": "", "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/core.py": "class JitSpecNvcc: ...",
    "flashinfer/decode.py": "", "flashinfer/sampling.py": "",
    "generator.py": """
from pathlib import Path
from flashinfer.jit.core import JitSpecNvcc
class Spec(JitSpecNvcc):
    name, ninja_path = "made_up", Path(__file__).with_name("build.ninja")
    def write_ninja(self): self.ninja_path.write_text("")
def make(): return Spec()
""",
    "calls_flashinfer.py": """
from generator import Spec
def made_up(shapes):
    if shapes == "raise": raise ValueError("no such shape")
    Spec().build_and_load().launch()
LAUNCHES = {"made_up": made_up}
""",
    "main.py": """
import json, sys
from catch import Outputs
from modules import compile_module
from pathlib import Path
def report(record): print(json.dumps(record), flush=True)
try:
    module = {"generator": "generator:make", "arguments": {}, "kernel": "flashinfer.made:up"}
    compile_module("made_up", module, sys.argv[1], report, Outputs(Path("cubins").resolve()))
    report({"end": ""})
except Exception as problem:
    report({"end": f"{type(problem).__name__}: {problem}"})
""",
}  # fmt: skip


def told(folder: Path, *, host: str = "", shapes: str = "") -> list[dict[str, Any]]:
    """The events of one module of two sources, of which the first has the host code."""
    for name, text in PACKAGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "host.cu").write_text(HOST % host)
    (folder / "other.cu").write_text("int other;")
    commands = "\n".join(
        f"{folder / 'nvcc'} -gencode=arch=compute_121a,code=sm_121a -c {folder / name}.cu -o {name}.o"
        for name in ("host", "other")
    )
    for name, text in (("nvcc", NVCC), ("bin/ninja", f"#!/bin/sh\necho '{commands}'\n")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    python = folder / "bin/python"  # ninja is looked for beside it
    python.symlink_to(sys.executable)
    done = subprocess.run(
        [python, "-c", f"import sys; sys.path[:0] = [{str(folder)!r}, {str(INSIDE)!r}]; import main", shapes],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_launches_are_told_behind_the_records(tmp_path: Path) -> None:
    first, second, launches, end = told(tmp_path)
    assert [one["variant"]["source"] for one in (first, second)] == ["host.cu", "other.cu"]
    assert all(Path(one["cubin"]).is_file() for one in (first, second))
    assert launches == {"launches": {"kernel": {"threads": 128, "dynamic_shared": 4096}}}
    assert end == {"end": ""}


@pytest.mark.parametrize(
    ("host", "shapes", "how"),
    [
        ("*(volatile int *)0 = 1;", "", "was killed by signal 11 (Segmentation fault)"),
        ("abort();", "", "was killed by signal 6 (Aborted)"),
        ("_Exit(3);", "", "ended with status 3"),
        ("", "raise", "failed: ValueError: no such shape"),
    ],
)
def test_what_was_compiled_outlives_its_host_code(
    tmp_path: Path, host: str, shapes: str, how: str
) -> None:
    first, second, end = told(tmp_path, host=host, shapes=shapes)
    assert all("error" not in one and Path(one["cubin"]).is_file() for one in (first, second))
    lines = end["end"].splitlines()
    assert lines[0] == f"RuntimeError: made_up.so: its host code {how}"
    assert lines[1:] == (["said by the host code"] if host else [])
