"""A link-time stand-in for libcuda.so.1, which no wheel has: it belongs to the GPU's driver.

It must export the driver's real names: with an empty stub the link succeeds, `--as-needed`
drops NEEDED libcuda.so.1, and cumem_allocator fails at import (undefined cuMemRelease).
The names come from the toolkit's own cuda.h.
"""

from __future__ import annotations

import re
from pathlib import Path

from sm121 import proc
from sm121.errors import CheckFailed
from sm121.toolkit.machine import Compilers

_DECLARED = re.compile(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(")
# cuda.h maps each API name to its current version: #define cuMemAlloc cuMemAlloc_v2
_VERSIONED = re.compile(r"^\s*#\s*define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*)\s*$", re.MULTILINE)
_MACRO = re.compile(r"__CUDA_API_(?:PTDS|PTSZ)\((cu[A-Z]\w*)\)")
_CUDA_ERROR_STUB_LIBRARY = 34  # cuda.h, enum cudaError_enum


def exported_names(cuda_h: str) -> list[str]:
    """Every driver function that code compiled against this cuda.h can refer to."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", cuda_h, flags=re.DOTALL)
    names = {*_DECLARED.findall(text), *_VERSIONED.findall(text), *_MACRO.findall(text)}
    if len(names) < 100:
        raise CheckFailed(
            f"cuda.h declares only {len(names)} driver functions.",
            cause="the header is not what it was, and a stub without names breaks NEEDED",
        )
    return sorted(names)


def build_stub(cuda_h: Path, output: Path, compilers: Compilers, *, log: Path) -> list[str]:
    """Compile the stub (SONAME libcuda.so.1); returns the names it exports."""
    names = exported_names(cuda_h.read_text(encoding="utf-8"))
    source = output.with_suffix(".c")
    output.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(
        "/* Every function answers CUDA_ERROR_STUB_LIBRARY. */\n"
        + "".join(f"int {name}(void) {{ return {_CUDA_ERROR_STUB_LIBRARY}; }}\n" for name in names)
    )
    proc.run(
        [
            compilers.cc, "-shared", "-fPIC", "-O1", "-nostdlib", "-Wl,-soname,libcuda.so.1",
            "-Wl,--build-id=none", "-o", output, source,
        ],
        log=log,
    )  # fmt: skip
    source.unlink()
    return names
