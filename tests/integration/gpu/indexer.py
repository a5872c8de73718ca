"""`ragged-indexer`: lengths of padding rows, what top-k does with them, and packed weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import MLA, CannotRunError, Report, cut

# --- ragged-indexer: lengths of flattened decode rows ---------------------------------------------


def flatten(trees: dict[str, Path], wheel: Path | None) -> Report:
    """Lengths that `_prepare_uniform_decode_kernel` gives each row, for requests that only pad."""
    import torch

    name = "_prepare_uniform_decode_kernel"
    for query in (2, 4):
        lengths = torch.tensor([100, 7, query, 0, 0], dtype=torch.int32, device="cuda")
        table = torch.arange(5 * 16, dtype=torch.int32, device="cuda").view(5, 16)
        rows = len(lengths) * query
        steps = torch.arange(query, device="cuda") - query + 1
        plain = (lengths[:, None] + steps).flatten()
        for state, tree in trees.items():
            out = torch.full((rows,), 12345, dtype=torch.int32, device="cuda")
            tables = torch.zeros(rows, 16, dtype=torch.int32, device="cuda")
            ones = torch.zeros(rows, dtype=torch.int32, device="cuda")
            getattr(cut(tree, f"{MLA}/indexer.py", name), name)[(rows,)](
                lengths, out, table, 16, tables, 16, ones, query, BLOCK_SIZE=1024
            )
            wanted = plain if state == "pristine" else plain.clamp(min=0)
            same = torch.equal(tables, table.repeat_interleave(query, 0)) and bool(
                (ones == 1).all()
            )
            yield {
                "case": f"{state}, {query} tokens a request",
                "in": {"seq_lens": lengths.tolist()},
                "out": {"lengths": out.tolist(), "block tables": "as put in" if same else "other"},
                "ok": torch.equal(out, wanted.int()) and same,
            }


# --- ragged-indexer: what the top-k kernel does with such a length --------------------------------

BINDING = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
void persistent_topk(const torch::stable::Tensor& logits, const torch::stable::Tensor& lengths,
                     torch::stable::Tensor& output, torch::stable::Tensor& workspace, int64_t k,
                     int64_t max_seq_len);
STABLE_TORCH_LIBRARY(sm121_topk, m) {
  m.def("persistent_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, "
        "int max_seq_len) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sm121_topk, CUDA, m) {
  m.impl("persistent_topk", TORCH_BOX(&persistent_topk));
}
"""


def build_topk(tree: Path, folder: Path) -> Path:
    """vLLM's own topk.cu, which the series leaves alone, and a binding, as a library."""
    from torch.utils import cpp_extension

    if shutil.which("nvcc") is None and cpp_extension.CUDA_HOME is None:
        raise CannotRunError("no nvcc")
    binding = folder / "binding.cpp"
    binding.write_text(BINDING)
    source = tree / "csrc/libtorch_stable"
    cpp_extension.load(
        name="sm121_topk",
        sources=[str(binding), str(source / "topk.cu")],
        extra_include_paths=[str(source), str(tree / "csrc")],
        extra_cflags=["-O2", "-std=c++20", "-DTORCH_TARGET_VERSION=0x020B000000000000ULL"],
        extra_cuda_cflags=["-O2", "-std=c++20", "-DTORCH_TARGET_VERSION=0x020B000000000000ULL",
                           "-DUSE_CUDA"],
        build_directory=str(folder),
        is_python_module=False,
    )  # fmt: skip
    return folder / "sm121_topk.so"


TOPK_S = 40  # a process that only loads torch and this kernel takes a few seconds
NEVER = f"did not end in {TOPK_S} s"


def topk_once(library: str, width: int, last: int) -> dict[str, Any]:
    """Top 512 of two rows, one with 100 candidates and one with `last`."""
    import torch

    torch.ops.load_library(library)
    torch.manual_seed(0)
    logits = torch.randn(2, width, device="cuda")
    lengths = torch.tensor([100, last], dtype=torch.int32, device="cuda")
    out = torch.full((2, 512), -7, dtype=torch.int32, device="cuda")
    scratch = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    torch.ops.sm121_topk.persistent_topk(logits, lengths, out, scratch, 512, width)
    torch.cuda.synchronize()
    return {"indices": (out >= 0).sum(1).tolist(), "not written": int((out == -7).sum())}


def topk(trees: dict[str, Path], wheel: Path | None) -> Report:
    """The kernel itself, with the length of a padding row before and after. In a process each,
    since a barrier that is never passed ends only with it."""
    with tempfile.TemporaryDirectory() as scratch:
        library = build_topk(trees["pristine"], Path(scratch))
        for width in (32768, 4096):
            for state, last in (("pristine", -1), ("patched", 0)):
                command = [sys.executable, __file__, str(library), str(width), str(last)]
                try:
                    done = subprocess.run(
                        command, capture_output=True, text=True, timeout=TOPK_S, check=False
                    )
                    out: Any = (
                        json.loads(done.stdout) if done.returncode == 0 else done.stderr[-300:]
                    )
                except subprocess.TimeoutExpired:
                    out = NEVER
                if state == "patched":
                    ok = out == {"indices": [100, 0], "not written": 0}
                elif width == 32768:
                    ok = out == NEVER
                else:
                    ok = isinstance(out, dict) and out["indices"][1] > 0
                yield {
                    "case": f"{state}, width {width}",
                    "in": {"lengths": [100, last], "k": 512},
                    "out": out,
                    "ok": ok,
                }


# --- ragged-indexer: weights packed like the queries ----------------------------------------------


def packing(trees: dict[str, Path], wheel: Path | None) -> Report:
    """`pack_seq_triton` on what the patched decode step gives it: the indexer's weights."""
    import torch

    module = cut(
        trees["patched"], "vllm/v1/attention/ops/common.py", "_pack_seq_kernel", "pack_seq_triton"
    )
    torch.manual_seed(0)
    for heads in (1, 32, 64):
        counts = torch.tensor([3, 1, 4, 0], dtype=torch.int32, device="cuda")
        weights = torch.randn(8, heads, device="cuda")
        packed = module.pack_seq_triton(weights, counts, pad_value=0).flatten(0, 1)
        wanted = torch.zeros(4, 4, heads, device="cuda")
        token = 0
        for row, count in enumerate(counts.tolist()):
            wanted[row, :count] = weights[token : token + count]
            token += count
        yield {
            "case": f"{heads} heads",
            "in": {"decode_lens": counts.tolist()},
            "out": {"rows": list(packed.shape)},
            "ok": torch.equal(packed, wanted.flatten(0, 1)),
        }


if __name__ == "__main__":
    found = topk_once(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(json.dumps(found))
