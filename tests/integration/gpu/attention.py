"""`shape-dispatch`: the draft's index list at 256, as upstream pads it, and wider."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import HEAD_DIM, MLA, PAGE, CannotRunError, Report, cut

WIDTHS = (256, 512, 1024)  # upstream's for k <= 128; the patch's on SM12x; the next in FlashInfer


def draft_batch(lengths: list[int], k: int) -> Any:
    """A DSpark draft step: k queries a request, which see the window and each other."""
    import torch

    torch.manual_seed(k)
    pages = [-(-length // PAGE) for length in lengths]
    free = torch.randperm(sum(pages)).int().split(pages)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, own in enumerate(free):
        table[row, : len(own)] = own
    tokens = len(lengths) * k
    valid = torch.ones(tokens + 2, dtype=torch.bool)
    valid[-2:] = False  # two tokens that pad a graph
    return SimpleNamespace(
        k=k,
        pages=sum(pages),
        tokens=tokens + 2,
        starts=torch.arange(len(lengths) + 1, dtype=torch.int32).mul(k).cuda(),
        lengths=torch.tensor(lengths, dtype=torch.int32).cuda(),
        requests=torch.arange(len(lengths)).repeat_interleave(k).int().cuda(),
        valid=valid.cuda(),
        table=table.cuda(),
    )


def draft_indices(tree: Path, batch: Any, width: int) -> tuple[Any, Any]:
    """What the tree's kernel makes of it: indices[tokens, width], lengths[tokens]."""
    import torch

    name = "_compute_dspark_noncausal_swa_indices_kernel"
    indices = torch.zeros(batch.tokens, 1, width, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch.tokens,), -7, dtype=torch.int32, device="cuda")
    requests = torch.nn.functional.pad(batch.requests, (0, 2))
    getattr(cut(tree, f"{MLA}/sparse_swa.py", name), name)[(batch.tokens,)](
        indices, indices.stride(0), lengths, 128, width, batch.starts, batch.lengths, requests,
        batch.valid, batch.table, batch.table.stride(0), PAGE, token_offset=0,
        TRITON_BLOCK_SIZE=1024,
    )  # fmt: skip
    return indices, lengths


def flash_mla(wheel: Path | None) -> Callable[..., Any]:
    """flash_mla_with_kvcache and get_mla_metadata of an unpacked vLLM wheel."""
    import torch

    if wheel is None:
        raise CannotRunError("no --wheel, so no FlashMLA: attention at these widths was not run")
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        raise CannotRunError("FlashMLA is for compute capability 9.0 and 10.x")
    torch.ops.load_library(str(wheel / "vllm/_flashmla_C.abi3.so"))
    for name in ("vllm", "vllm._flashmla_C"):
        sys.modules.setdefault(name, types.ModuleType(name))
    path = wheel / "vllm/third_party/flashmla/flash_mla_interface.py"
    spec = importlib.util.spec_from_file_location("flash_mla_interface", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(q: Any, cache: Any, indices: Any, lengths: Any, sinks: Any) -> Any:
        out, _ = module.flash_mla_with_kvcache(
            q=q.unsqueeze(1), k_cache=cache.unsqueeze(-2), block_table=None, cache_seqlens=None,
            head_dim_v=HEAD_DIM, tile_scheduler_metadata=module.get_mla_metadata()[0],
            is_fp8_kvcache=True, indices=indices, topk_length=lengths,
            softmax_scale=HEAD_DIM**-0.5, attn_sink=sinks,
        )  # fmt: skip
        return out.squeeze(1)

    return run


def filled_cache(pages: int) -> tuple[Any, Any]:
    """A packed fp8 cache on the GPU, its unused bytes NaN, and its rows as float32."""
    import torch
    from dsv4_sm120 import new_cache, read_cache, write_cache

    cache = new_cache(pages, PAGE)
    slots = torch.arange(pages * PAGE)
    write_cache(cache, slots, torch.randn(pages * PAGE, HEAD_DIM))
    pool = cache.as_strided((pages, cache.stride(0)), (cache.stride(0), 1)).cuda()
    return pool.as_strided(cache.shape, cache.stride()), read_cache(cache, slots).cuda()


def dense(q: Any, rows: Any, indices: Any, lengths: Any, sinks: Any) -> Any:
    """The attention in float64 over exactly the listed slots."""
    import torch

    out = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
    for token, count in enumerate(lengths.tolist()):
        keys = rows[indices[token, 0, :count].long()].double()
        logits = q[token].double() @ keys.T * HEAD_DIM**-0.5
        every = torch.cat([logits, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
        out[token] = every @ keys
    return out


def widths(trees: dict[str, Path], wheel: Path | None) -> Report:
    """The same indices at 256, as upstream pads them, and wider, as SM12x needs them."""
    import torch

    try:
        attention = flash_mla(wheel)
    except CannotRunError as error:
        attention = None
        yield {"case": "attention", "skipped": str(error)}
    lengths = [5, 70, 133, 200, 1000, 4097]
    for k in (5, 32):
        batch = draft_batch([max(length, k) for length in lengths], k)
        narrow, narrow_lens = draft_indices(trees["pristine"], batch, WIDTHS[0])
        real = batch.tokens - 2
        for width in WIDTHS[1:]:
            wide, wide_lens = draft_indices(trees["patched"], batch, width)
            tail = wide[:real, :, WIDTHS[0] :]
            counts = {
                "index of the 256 differs": int((narrow != wide[..., : WIDTHS[0]]).sum()),
                "length differs": int((narrow_lens != wide_lens).sum()),
                "of the rest is not -1": int((tail != -1).sum()),
            }
            yield {
                "case": f"indices, k = {k}, 256 and {width}",
                "in": {
                    "sequence lengths": batch.lengths.tolist(),
                    "longest list": int(wide_lens.max()),
                },
                "out": counts,
                "ok": not any(counts.values()) and wide_lens[real:].tolist() == [0, 0],
            }
        if attention is None:
            continue
        cache, rows = filled_cache(batch.pages)
        q = torch.randn(real, 64, HEAD_DIM, device="cuda").bfloat16()
        sinks = torch.randn(64, device="cuda")
        wanted = dense(q, rows, narrow, narrow_lens[:real], sinks)
        results = []
        for width in WIDTHS:
            tree = trees["pristine" if width == WIDTHS[0] else "patched"]
            indices, lens = draft_indices(tree, batch, width)
            results.append(attention(q, cache, indices[:real], lens[:real], sinks).double())
        errors = [float((r - wanted).abs().max()) for r in results]
        apart = [float((r - results[0]).abs().max()) for r in results[1:]]
        yield {
            "case": f"FlashMLA, k = {k}, {real} tokens, 64 heads",
            "in": {"widths": WIDTHS, "largest value": float(wanted.abs().max())},
            "out": {"from dense attention": errors, "from width 256": apart},
            "ok": max(errors) < 0.02 * float(wanted.abs().max()) and max(apart) < 0.01,
        }
