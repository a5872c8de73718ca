"""What the tests of the SM12x attention patches run: python dsv4_scenarios.py TREE WHEEL NAME...

Prints one JSON object, a key for each scenario: what it returned, or the exception that ended it.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from dsv4_sm120 import (
    HEAD_DIM,
    Platform,
    World,
    attend,
    config,
    dspark,
    error,
    make_batch,
)

SCENARIOS: dict[str, Callable[[Path, Path], Any]] = {}


def scenario(function: Callable[[Path, Path], Any]) -> Callable[[Path, Path], Any]:
    SCENARIOS[function.__name__] = function
    return function


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing raised"


# --- the stock class: empty chunks --------------------------------------------------------------

EMPTY = {
    # (sequence length, query length) of each request, and how many of them are decodes
    "none": ([(70, 1), (90, 70), (200, 5), (300, 20)], 1),
    "behind": ([(70, 1), (90, 70), (9, 0), (9, 0), (9, 0), *[(9, 0)] * 4], 1),
    "between": ([(90, 70), (9, 0), (9, 0), (9, 0), *[(9, 0)] * 4, (80, 6), (40, 3)], 0),
    "decodes": ([(9, 0), (9, 0), (90, 70), (40, 3)], 2),
}


def _empty(tree: Path, wheel: Path, kind: str) -> dict[str, Any]:
    results = {}
    for ratio in (1, 4, 128):
        world = World(tree, wheel)
        layer = world.layer(world.stock_cls, config(), ratio)
        requests, decodes = EMPTY[kind]
        batch = make_batch(layer, requests, decodes)
        try:
            results[str(ratio)] = error(attend(world, layer, batch), batch.expected)
        except Exception as e:
            results[str(ratio)] = f"{type(e).__name__}: {e}"
    return results


for _kind in EMPTY:
    SCENARIOS[f"empty_{_kind}"] = lambda tree, wheel, kind=_kind: _empty(tree, wheel, kind)


# --- the stock class: scratch -------------------------------------------------------------------


def _addresses(world: World) -> list[dict[str, Any]]:
    """Record what the kernels get as scratch."""
    seen = []
    paged = world.runner_module._sparse_mla_sm120_paged_attention

    def record(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(paged).bind(*args, **kwargs).arguments
        seen.append({name: bound.get(name) for name in ("mid_out", "mid_lse", "out_lse")})
        paged(*args, **kwargs)

    world.runner_module._sparse_mla_sm120_paged_attention = record
    return seen


def _long_context(world: World, cls: Any) -> dict[str, Any]:
    """Decode of 32 tokens in a C128A layer of a model with a million tokens of context, twice:
    is the scratch where it was?"""
    conf = config(heads=64, max_model_len=1 << 20)
    layer = world.layer(cls, conf, 128)
    world.stock._get_flashinfer_dsv4_workspace = lambda device: workspace
    workspace = torch.zeros(128 << 20, dtype=torch.uint8)
    if cls is not world.stock_cls:
        world.dummy_run(layer)
    seen = _addresses(world)
    batch = make_batch(layer, [(256, 1)] * 32, 32, extra_width=8192, values=False)
    attend(world, layer, batch)
    kept = list(seen[0].values())  # keep it, so that its address is not given again
    attend(world, layer, batch)
    end = workspace.data_ptr() + workspace.numel()
    return {
        "splits": seen[0]["mid_out"].shape[2],
        "in_workspace": workspace.data_ptr() <= seen[0]["mid_out"].data_ptr() < end,
        "moved": [
            a.data_ptr() != b.data_ptr() for a, b in zip(kept, seen[1].values(), strict=True)
        ],
    }


@scenario
def stock_scratch(tree: Path, wheel: Path) -> Any:
    world = World(tree, wheel, compute=False)
    return _long_context(world, world.stock_cls)


@scenario
def jit_scratch(tree: Path, wheel: Path) -> Any:
    world = World(tree, wheel, compute=False)
    return _long_context(world, world.jit_cls)


# --- the JIT class: results ---------------------------------------------------------------------

BATCHES = {
    "decodes": ([(1, 1), (64, 1), (129, 1), (300, 1), (1200, 3)], 5),
    "prefill 64": ([(64, 64)], 0),
    "prefill 65": ([(65, 65)], 0),
    "decode 64": ([(100 + i, 1) for i in range(64)], 64),
    "decode 65": ([(100 + i, 1) for i in range(65)], 65),
    "mixed": ([(300, 1), (150, 2), (500, 70), (40, 40), (9, 0), (9, 0), (260, 30)], 2),
}


@scenario
def dense(tree: Path, wheel: Path) -> Any:
    """The JIT class against dense attention and against the stock class."""
    results = {}
    for ratio in (1, 4, 128):
        for name, (requests, decodes) in BATCHES.items():
            world = World(tree, wheel)
            conf = config()
            layer = world.layer(world.jit_cls, conf, ratio)
            world.dummy_run(layer)
            batch = make_batch(layer, requests, decodes)
            output = attend(world, layer, batch)
            calls = list(world.kernels.calls)
            world.kernels.calls.clear()
            stock = world.layer(world.stock_cls, conf, ratio)
            same = make_batch(stock, requests, decodes)
            stock_output = attend(world, stock, same)
            results[f"{ratio} {name}"] = {
                "error": error(output, batch.expected),
                "like_stock": torch.equal(output, stock_output) and calls == world.kernels.calls,
                "kernels": [(c["kernel"], c["tokens"]) for c in calls],
            }
    return results


@scenario
def draft(tree: Path, wheel: Path) -> Any:
    """DSpark's non-causal draft block: its indices are wider than the window + k that are there."""
    results = {}
    for requests in ([(133, 5), (40, 5), (700, 5)], [(300 + i, 5) for i in range(14)]):
        world = World(tree, wheel)
        conf = config(speculative_config=dspark(5))
        layer = world.layer(world.jit_cls, conf, 1)
        world.dummy_run(layer)
        width = world.builder_width(layer.n_local_heads, 5)
        batch = make_batch(layer, requests, len(requests), swa_width=width)
        output = attend(world, layer, batch)
        results[str(batch.tokens)] = [error(output, batch.expected), world.kernels.calls]
    return results


# --- the JIT class: what it gives the runner ----------------------------------------------------


class FakeRunner:
    calls: ClassVar[list[dict[str, Any]]]
    signature: ClassVar[inspect.Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.created = kwargs

    def run(self, *args: Any, **kwargs: Any) -> None:
        bound = self.signature.bind(self, *args, **kwargs).arguments
        call: dict[str, Any] = {"created": {k: str(v) for k, v in self.created.items()}}
        for name, value in bound.items():
            if isinstance(value, torch.Tensor):
                call[name] = {
                    "shape": list(value.shape),
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "contiguous": value.is_contiguous(),
                    "address": value.data_ptr(),
                    "storage": value.untyped_storage().data_ptr(),
                    "parameter": isinstance(value, torch.nn.Parameter),
                }
            elif name != "self":
                call[name] = value
        self.calls.append(call)


def _with_fake_runner(world: World) -> list[dict[str, Any]]:
    real = world.runner_module._SparseMLAPagedAttentionRunner
    world.jit._load_flashinfer_sm120()  # checks the real one, and remembers the module
    FakeRunner.signature = inspect.signature(real.run)
    FakeRunner.calls = []
    world.runner_module._SparseMLAPagedAttentionRunner = FakeRunner
    return FakeRunner.calls


@scenario
def arguments(tree: Path, wheel: Path) -> Any:
    results = {}
    for ratio in (1, 4, 128):
        for heads in (12, 32, 64):
            for tokens in (1, 64, 65):
                world = World(tree, wheel)
                calls = _with_fake_runner(world)
                layer = world.layer(world.jit_cls, config(heads=heads), ratio)
                world.dummy_run(layer)
                batch = make_batch(layer, [(300, 1)] * tokens, tokens, values=False)
                attend(world, layer, batch)
                scratch = layer._scratch
                (call,) = calls
                for name, buffer in scratch._asdict().items():
                    if call[name] is not None:
                        call[name]["reserved"] = call[name]["address"] == buffer.data_ptr()
                call["caches"] = [layer.swa_cache_layer.kv_cache, layer.kv_cache]
                call["caches"] = [cache.data_ptr() for cache in call["caches"]]
                results[f"{ratio} {heads} {tokens}"] = call
    return results


@scenario
def zero_tokens(tree: Path, wheel: Path) -> Any:
    world = World(tree, wheel)
    calls = _with_fake_runner(world)
    layer = world.layer(world.jit_cls, config(), 4)
    none = torch.zeros(0, 16, HEAD_DIM, dtype=torch.bfloat16)
    cache = torch.zeros(2, 64, 1, 584, dtype=torch.uint8)
    layer._run_sparse_mla(
        query=none, swa_kv_cache=cache, swa_indices=torch.zeros(0, 1, 128, dtype=torch.int32),
        swa_lens=torch.zeros(0, dtype=torch.int32), extra_kv_cache=cache,
        extra_indices=torch.zeros(0, 512, dtype=torch.int32),
        extra_lens=torch.zeros(0, dtype=torch.int32), out=none,
    )  # fmt: skip
    return {"calls": len(calls), "allocated": len(world.allocations)}


@scenario
def strided(tree: Path, wheel: Path) -> Any:
    """Arguments that are not contiguous: each in turn."""
    results = {}
    world = World(tree, wheel)
    layer = world.layer(world.jit_cls, config(), 4)
    world.dummy_run(layer)
    q = torch.zeros(3, 16, HEAD_DIM, dtype=torch.bfloat16)
    good: dict[str, torch.Tensor] = {
        "query": q,
        "out": q,
        "swa_indices": torch.full((3, 128), -1, dtype=torch.int32),
        "swa_lens": torch.zeros(3, dtype=torch.int32),
        "extra_indices": torch.full((3, 512), -1, dtype=torch.int32),
        "extra_lens": torch.zeros(3, dtype=torch.int32),
    }
    cache = torch.zeros(2, 64, 1, 584, dtype=torch.uint8)

    def run(**changes: torch.Tensor) -> str:
        arguments = {"swa_kv_cache": cache, "extra_kv_cache": cache, **good, **changes}
        return raised(lambda: layer._run_sparse_mla(**arguments))

    results["none"] = run()
    for name, tensor in good.items():
        results[name] = run(**{name: tensor.repeat_interleave(2, dim=0)[::2]})
    return results


# --- the JIT class: scratch ---------------------------------------------------------------------


@scenario
def reserve(tree: Path, wheel: Path) -> Any:
    """Four layers, of which the first dummy run reserves for all, in whatever order they come."""
    results = {}
    for first in ("swa", "c4a", "c128a", "draft"):
        world = World(tree, wheel)
        calls = _with_fake_runner(world)
        conf = config(heads=32, max_model_len=131072, speculative_config=dspark(5))
        kinds = {"swa": 1, "c4a": 4, "c128a": 128, "draft": 1}
        layers = {n: world.layer(world.jit_cls, conf, r, prefix=n) for n, r in kinds.items()}
        conf.layers["other"] = SimpleNamespace()  # such as a cache or a MoE layer
        outputs = [world.dummy_run(layers[first])]
        before = {n: layer._scratch for n, layer in layers.items()}
        outputs += [world.dummy_run(layer) for layer in layers.values()]
        world.capturing = True
        addresses = set()
        for name, layer in layers.items():
            wide: dict[str, Any] = {"values": False}
            draft = {"swa_width": world.builder_width(32, 5)}
            wide |= draft if name == "draft" else {"extra_width": 1024}
            attend(world, layer, make_batch(layer, [(300, 1)] * 64, 64, **wide))
            attend(world, layer, make_batch(layer, [(300, 65)], 0, **wide))
        world.capturing = False
        for call in calls:
            addresses |= {call[n]["address"] for n in ("mid_out", "mid_lse", "out_lse") if call[n]}
        results[first] = {
            "allocations": [{k: str(v) for k, v in a.items()} for a in world.allocations],
            "shared": all(layer._scratch is before[first] for layer in layers.values()),
            "before": all(scratch is not None for scratch in before.values()),
            "elements": {k: v.numel() for k, v in before[first]._asdict().items()},
            "dtypes": {k: str(v.dtype) for k, v in before[first]._asdict().items()},
            "addresses": len(addresses),
            "calls": len(calls),
            "zeroed": all(not output.any() for output in outputs),
        }
    return results


@scenario
def reserve_late(tree: Path, wheel: Path) -> Any:
    world = World(tree, wheel)
    conf = config()
    layer = world.layer(world.jit_cls, conf, 1)
    batch = make_batch(layer, [(300, 1)] * 3, 3)
    world.capturing = True
    first = raised(lambda: attend(world, layer, batch))
    world.capturing = False
    return {
        "capturing": first,
        "later": error(attend(world, layer, batch), batch.expected),
        "new_layer_keeps_old": _new_layer(world, conf, layer),
    }


def _new_layer(world: World, conf: SimpleNamespace, old: Any) -> bool:
    scratch = old._scratch
    new = world.layer(world.jit_cls, conf, 4, prefix="new")
    world.dummy_run(new)
    return old._scratch is scratch and new._scratch is not scratch


@scenario
def too_small(tree: Path, wheel: Path) -> Any:
    world = World(tree, wheel)
    layer = world.layer(world.jit_cls, config(max_model_len=16384), 128)
    world.dummy_run(layer)
    wide = make_batch(layer, [(300, 1)] * 64, 64, extra_width=1024, values=False)
    many = make_batch(layer, [(300, 300)], 0, values=False)
    return {
        "wide": raised(lambda: attend(world, layer, wide)),
        "many": raised(lambda: attend(world, layer, many)),
        "calls": world.kernels.calls,
    }


# --- the JIT class: errors and the log ----------------------------------------------------------


@scenario
def undispatchable(tree: Path, wheel: Path) -> Any:
    world = World(tree, wheel)
    calls = _with_fake_runner(world)
    layer = world.layer(world.jit_cls, config(), 4)
    world.dummy_run(layer)

    def run(tokens: int, topk: int = 128, page: int = 64, extra: tuple[int, int] | None = None,
            heads: int = 16) -> str:  # fmt: skip
        q = torch.zeros(tokens, heads, HEAD_DIM, dtype=torch.bfloat16)
        indices = torch.zeros(tokens, 1, topk, dtype=torch.int32)
        lens = torch.zeros(tokens, dtype=torch.int32)
        extra_kv = extra_indices = None
        if extra is not None:
            extra_kv = torch.zeros(3, extra[1], 1, 584, dtype=torch.uint8)
            extra_indices = torch.zeros(tokens, extra[0], dtype=torch.int32)
        return raised(
            lambda: layer._run_sparse_mla(
                query=q, swa_kv_cache=torch.zeros(3, page, 1, 584, dtype=torch.uint8),
                swa_indices=indices, swa_lens=lens, extra_kv_cache=extra_kv,
                extra_indices=extra_indices, extra_lens=None if extra is None else lens, out=q,
            )
        )  # fmt: skip

    results = {
        "decode width": run(5, topk=320),
        "decode page": run(5, page=32),
        "decode heads": run(5, heads=48),
        "prefill width": run(65, topk=320),
        "prefill page": run(65, page=32),
        "prefill heads": run(65, heads=24),
        "prefill extra width": run(65, topk=512, extra=(512, 64)),
        "prefill extra page": run(65, extra=(512, 128)),
    }
    assert not calls
    return results | {
        "decode 8 heads": run(5, heads=8),
        "decode extra page": run(5, extra=(512, 128)),
        "prefill 512": run(65, topk=512),
        "prefill extra": run(65, extra=(512, 64)),
        "prefill extra page 2": run(65, extra=(192, 2)),
    }


@scenario
def at_start(tree: Path, wheel: Path) -> Any:
    """What a layer says when it is made, before any weight is loaded."""
    results = {}
    for k in (5, 384, 385, 896, 897):
        world = World(tree, wheel)
        conf = config(speculative_config=dspark(k))
        make = lambda world=world, conf=conf: world.layer(world.jit_cls, conf, 1)  # noqa: E731
        results[f"k {k}"] = raised(make)
    world = World(tree, wheel)
    world.runner_module._DECODE_DSV4_DISPATCH = frozenset({(32, 128)})
    results["heads"] = raised(lambda: world.layer(world.jit_cls, config(), 1))
    return results


@scenario
def widths(tree: Path, wheel: Path) -> Any:
    """The width that a layer reserves for, and the one that the metadata builder makes."""
    world = World(tree, wheel)
    results = {}
    for heads in (16, 32, 64):
        for k in range(1, 33):
            conf = config(heads=heads, speculative_config=dspark(k))
            layer = world.layer(world.jit_cls, conf, 1)
            results[f"{heads} {k}"] = [layer._topk, world.builder_width(heads, k)]
    for length in (1, 128, 16384, 16385, 131072, 1 << 20):
        layer = world.layer(world.jit_cls, config(max_model_len=length), 128)
        results[f"c128a {length}"] = layer._extra_topk
    return results


@scenario
def log(tree: Path, wheel: Path) -> Any:
    world = World(tree, wheel)
    world.layer(world.jit_cls, config(), 1)
    jit = list(world.log)
    world.log.clear()
    world.layer(world.stock_cls, config(), 1)
    return {"jit": jit, "stock": world.log}


@scenario
def not_sm12x(tree: Path, wheel: Path) -> Any:
    results = {}
    for name, cuda, capability in (
        ("sm121", True, (12, 1)), ("sm120", True, (12, 0)), ("sm100", True, (10, 0)),
        ("sm90", True, (9, 0)), ("gfx12", False, (12, 0)),
    ):  # fmt: skip
        world = World(tree, wheel, platform=Platform(cuda, capability))
        make = lambda world=world: world.layer(world.jit_cls, config(), 1)  # noqa: E731
        results[name] = raised(make)
    return results


@scenario
def other_runner(tree: Path, wheel: Path) -> Any:
    """FlashInfer's real file with one thing changed."""
    file = wheel / "flashinfer/mla/_sparse_mla_sm120.py"
    run = "        sm_scale: float,\n        *,\n        topk_length: Optional[torch.Tensor] = None,\n"
    first, _, last = run.splitlines()
    changes = {
        "argument renamed": (run, run.replace("topk_length", "lengths")),
        "argument added": (run, f"{run}        pdl: bool = False,\n"),
        "keyword made positional": (run, f"{first}\n{last}\n"),
        "class gone": ("class _SparseMLAPagedAttentionRunner", "class _Runner"),
        "predicate gone": ("def _decode_dsv4_dispatchable", "def _dispatchable"),
        "tile of 32": ("_BI = 64 ", "_BI = 32 "),
        "limit of 128": ("_DECODE_MAX_TOKENS = 64\n", "_DECODE_MAX_TOKENS = 128\n"),
        "annotation and default": (run, run.replace("Optional[torch.Tensor] = None", "int = 7")),
    }
    results = {}
    for name, (old, new) in changes.items():
        source = file.read_text()
        assert old in source, name
        world = World(tree, wheel)
        module = types.ModuleType(world.runner_module.__name__)
        module.__package__ = "flashinfer.mla"
        exec(compile(source.replace(old, new), str(file), "exec"), vars(module))
        sys.modules[module.__name__] = module
        sys.modules["flashinfer.mla"]._sparse_mla_sm120 = module
        world.runner_module = module
        sys.modules["flashinfer"].__version__ = "0.7.0"
        make = lambda world=world: world.layer(world.jit_cls, config(), 1)  # noqa: E731
        results[name] = raised(make)
    world = World(tree, wheel)
    sys.modules["flashinfer.mla._sparse_mla_sm120"] = None  # type: ignore[assignment]
    del sys.modules["flashinfer.mla"]._sparse_mla_sm120
    results["module gone"] = raised(lambda: world.layer(world.jit_cls, config(), 1))
    return results


def main() -> None:
    torch.set_num_threads(1)
    tree, wheel = Path(sys.argv[1]), Path(sys.argv[2])
    results = {}
    for name in sys.argv[3:]:
        try:
            results[name] = {"value": SCENARIOS[name](tree, wheel)}
        except Exception as e:
            if os.environ.get("DSV4_TRACEBACK"):
                raise
            results[name] = {"error": f"{type(e).__name__}: {e}"}
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
