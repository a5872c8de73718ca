"""What vLLM's kernels do on a real GPU, before and after the patches.

    python tests/integration/gpu/kernels.py PRISTINE PATCHED [--wheel DIR] [--only PART ...]

PRISTINE and PATCHED are vLLM's source tree without and with the series: after `nox -s patch`,
`git -C build/source/vllm.git archive REF | tar -x -C DIR` with refs/sm121/base/0.26.0 and
refs/sm121/patched/0.26.0. --wheel: an unpacked vLLM wheel of the same release, for FlashMLA.

Needs a Python with torch and Triton on a machine with an NVIDIA GPU; `topk` needs nvcc of torch's
CUDA release as well, `compressor` CuTeDSL (nvidia-cutlass-dsl, quack-kernels, apache-tvm-ffi) and
`widths` --wheel for its second half. vLLM itself must not be installed: each kernel is run from its
tree. A part that can't run says why. Prints one JSON object a line: part, case, what was put in and
what came out, `ok`. Exit status: 0 all as expected, 1 something else came out, 3 nothing could run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from attention import widths
from common import CannotRunError
from compressor import compressor
from indexer import flatten, packing, topk

PARTS = {
    "flatten": flatten, "topk": topk, "packing": packing, "widths": widths, "compressor": compressor,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("pristine", type=Path)
    parser.add_argument("patched", type=Path)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    trees = {"pristine": arguments.pristine.resolve(), "patched": arguments.patched.resolve()}

    def show(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    try:
        import torch
        import triton
    except ImportError as error:
        show({"skipped": f"no {error.name} in this Python"})
        return 3
    if not torch.cuda.is_available():
        show({"skipped": "torch sees no GPU"})
        return 3
    show({
        "GPU": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    })  # fmt: skip
    failed = False
    for part in arguments.only:
        try:
            for line in PARTS[part](trees, arguments.wheel):
                failed |= not line.get("ok", True)
                show({"part": part, **line})
        except CannotRunError as error:
            show({"part": part, "skipped": str(error)})
        except Exception as error:
            failed = True
            show({"part": part, "ok": False, "error": f"{type(error).__name__}: {error}"[:2000]})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
