"""`cutedsl-switch`: the compressor's Triton fallback and CuTeDSL on the same state."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import HEAD_DIM, CannotRunError, Report


def compressors(tree: Path) -> tuple[Callable[..., None], Callable[..., None]]:
    """The tree's own modules, with vLLM's packages as empty shells around them."""
    import triton

    if importlib.util.find_spec("cutlass") is None:
        raise CannotRunError("no CuTeDSL: `import cutlass` finds nothing")
    base = "vllm.models.deepseek_v4"
    for name in ("vllm", "vllm.models", base, f"{base}.common", f"{base}.common.ops",
                 f"{base}.nvidia", f"{base}.nvidia.ops"):  # fmt: skip
        package = types.ModuleType(name)
        package.__path__ = [str(tree / name.replace(".", "/"))]
        sys.modules[name] = package
    shells: dict[str, dict[str, Any]] = {
        "vllm.triton_utils": {"triton": triton, "tl": importlib.import_module("triton.language")},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda=lambda: True)},
        "vllm.utils": {},
        "vllm.utils.import_utils": {"has_cutedsl": lambda: True},
    }
    for name, content in shells.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
    fallback = importlib.import_module(f"{base}.common.ops.fused_compress_quant_cache")
    cutedsl = importlib.import_module(f"{base}.nvidia.ops.sparse_attn_compress_cutedsl")
    return fallback.compress_norm_rope_store_triton, cutedsl.compress_norm_rope_store_cutedsl


def compress_reference(case: Any, tokens: Any) -> Any:
    """Compressed rows in float64, not quantized: softmax over the window, RMSNorm, RoPE."""
    import torch

    ratio, overlap = case.compress_ratio, case.overlap
    span = (1 + overlap) * ratio
    head = torch.arange(HEAD_DIM, device="cuda")
    rows = []
    for token in tokens:
        position = int(case.positions[token])
        window = torch.arange(position - span + 1, position + 1, device="cuda")
        shift = (torch.arange(span, device="cuda") >= ratio).long() * HEAD_DIM * int(overlap)
        keep = window >= 0
        window, shift = window[keep], shift[keep]
        page = case.block_table[int(case.token_to_req_indices[token]), window // case.block_size]
        state = case.state_cache[page.long(), window % case.block_size].double()
        kv = state.gather(1, shift[:, None] + head)
        score = state.gather(1, case.state_width + shift[:, None] + head).softmax(0)
        row = (kv * score).sum(0)
        row = row * (row.square().mean() + 1e-6).rsqrt() * case.rms_norm_weight.double()
        angle = case.cos_sin_cache[position // ratio * ratio].double()
        even, odd = row[448::2].clone(), row[449::2].clone()
        row[448::2] = even * angle[:32] - odd * angle[32:]
        row[449::2] = odd * angle[:32] + even * angle[32:]
        rows.append(row)
    return torch.stack(rows)


def compressor_case(ratio: int) -> tuple[Any, Any]:
    """The arguments of both kernels, and the cache to fill. Three requests: a start, a middle and a long one, tokens that pad, and NaN where nothing is."""
    import torch
    from dsv4_sm120 import new_cache

    torch.manual_seed(ratio)
    overlap = ratio == 4
    size, width = (4, 1024) if overlap else (8, 512)
    chunks = [(0, 3000), (1000, 30), (4090, 1400)]  # first position, tokens
    longest = max(first + count for first, count in chunks)
    blocks = -(-longest // size)
    positions = torch.cat([torch.arange(first, first + count) for first, count in chunks])
    requests = torch.arange(3).repeat_interleave(torch.tensor([count for _, count in chunks]))
    table = torch.randperm(3 * blocks).int().view(3, blocks)
    pages, page = 3 * (-(-longest // ratio // (256 // ratio)) + 1), 256 // ratio
    slot = requests * (pages // 3) * page + positions // ratio
    slot = torch.where((positions + 1) % ratio == 0, slot, -1)
    pad = torch.full((7,), -1)
    cache = new_cache(pages, page)
    case = SimpleNamespace(
        state_cache=torch.randn(3 * blocks, size, 2 * width),
        num_actual=len(positions) + 7,
        token_to_req_indices=torch.cat([requests, pad.clamp(min=0)]).int(),
        positions=torch.cat([positions, pad.clamp(min=0)]),
        slot_mapping=torch.cat([positions, pad]),
        block_table=table,
        block_size=size,
        state_width=width,
        cos_sin_cache=torch.cat([f(torch.rand(8192, 32) * 6) for f in (torch.cos, torch.sin)], 1),
        k_cache_metadata=SimpleNamespace(slot_mapping=torch.cat([slot, pad]).cuda()),
        pdl_kwargs={"launch_pdl": False},
        head_dim=HEAD_DIM,
        rope_head_dim=64,
        compress_ratio=ratio,
        overlap=overlap,
        use_fp4_cache=False,
        rms_norm_weight=(1 + 0.1 * torch.randn(HEAD_DIM)).bfloat16(),
        rms_norm_eps=1e-6,
        quant_block=64,
        token_stride=576,
        scale_dim=8,
    )
    for name, value in vars(case).items():
        if isinstance(value, torch.Tensor):
            setattr(case, name, value.cuda())
    return case, cache


def compressor(trees: dict[str, Path], wheel: Path | None) -> Report:
    """Both kernels on the same state: the bytes that they leave in the packed cache."""
    import torch
    from dsv4_sm120 import read_cache

    fallback, cutedsl = compressors(trees["patched"])
    for ratio in (4, 128):
        case, empty = compressor_case(ratio)
        span = empty.stride(0)
        caches = []
        for run in (fallback, cutedsl):
            pool = empty.as_strided((empty.shape[0], span), (span, 1)).cuda()
            run(**vars(case), kv_cache=pool.as_strided(empty.shape, empty.stride()))
            torch.cuda.synchronize()
            caches.append(pool.cpu().as_strided(empty.shape, empty.stride()))
        slots = case.k_cache_metadata.slot_mapping
        written = (slots >= 0).nonzero().flatten()
        wanted = compress_reference(case, written.tolist()).cpu()
        raw = [c.as_strided((c.shape[0], span), (span, 1)) for c in caches]
        poison = empty.as_strided((empty.shape[0], span), (span, 1))
        rows = [read_cache(c, slots[written].cpu()).double() for c in caches]
        # e4m3 has 3 bits of mantissa: half a step is 1/16 of a value; bf16's is 1/256.
        off = [float(((r - wanted).abs() / wanted.abs().clamp(min=0.05)).max()) for r in rows]
        yield {
            "case": f"ratio {ratio}",
            "in": {"tokens": case.num_actual, "rows written": len(written)},
            "out": {
                "bytes in the cache": raw[0].numel(),
                "bytes written by Triton": int((raw[0] != poison).sum()),
                "bytes that differ": int((raw[0] != raw[1]).sum()),
                "values that differ, fp8 and bf16": [
                    int((rows[0] != rows[1])[:, part].sum())
                    for part in (slice(0, 448), slice(448, HEAD_DIM))
                ],
                "largest difference": float((rows[0] - rows[1]).abs().max()),
                "relative error of Triton, CuTeDSL": off,
                "largest value": float(wanted.abs().max()),
            },
            "ok": max(off) < 0.08 and int((raw[0] != raw[1]).sum()) < 1e-4 * rows[0].numel(),
        }
