"""DeepSeek V4's SM12x attention of a vLLM tree, on CPU tensors.

Runs in a Python that has torch and neither vLLM nor FlashInfer. The attention classes,
vllm/envs.py and vllm/utils/flashinfer.py are the tree's own files, and the Python half of the SM120
kernels is FlashInfer's own. Stand-ins are what surrounds them: vLLM's base layer, the metadata, one
Triton kernel, and FlashInfer's CUDA module, here `Kernels`, which checks what the C++ checks, reads
memory as the kernels do (by address and shape, whatever the strides) and computes in float32.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.machinery
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# vLLM's import_utils wants it; the build host's environment, which runs this, has no need of it.
sys.modules.setdefault("regex", re)

HEAD_DIM, NOPE, ROPE, TILE, SCALES = 512, 448, 64, 64, 8
ROW = NOPE + 2 * ROPE  # bytes of a token's data; its 8 scale bytes are at the end of the page
LOG2E = math.log2(math.e)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def pick(path: Path, names: Collection[str], into: dict[str, Any]) -> None:
    """Run the named top-level definitions of a source file, and nothing else of it."""
    found = {}
    for node in _parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    body = [found[name] for name in names]
    exec(compile(ast.Module(body=body, type_ignores=[]), str(path), "exec"), into)


# --- the packed cache ---------------------------------------------------------------------------


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp8 bytes, scale bytes and bf16 tail of rows[tokens, 512]: UE8M0 scales, one for 64 values."""
    nope = rows[:, :NOPE].float().view(-1, NOPE // 64, 64)
    exponent = torch.ceil(torch.log2(nope.abs().amax(-1).clamp(min=1e-4) / 448.0))
    values = (nope / torch.exp2(exponent)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.zeros(rows.shape[0], SCALES, dtype=torch.uint8)
    scales[:, : NOPE // 64] = (exponent + 127).to(torch.uint8)
    return values.view(torch.uint8).reshape(-1, NOPE), scales, rows[:, NOPE:].to(torch.bfloat16)


def dequantize(values: torch.Tensor, scales: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    factor = torch.exp2(scales[:, : NOPE // 64].float() - 127)
    nope = values.view(torch.float8_e4m3fn).float().view(-1, NOPE // 64, 64) * factor[..., None]
    return torch.cat([nope.reshape(-1, NOPE), tail.float()], dim=1)


def new_cache(pages: int, page_size: int) -> torch.Tensor:
    """[pages, page size, 584] whose pages are 576-aligned, hence padded; poisoned with NaN."""
    span = -(-page_size * (ROW + SCALES) // 576) * 576
    pool = torch.full((pages, span), 0x7F, dtype=torch.uint8)
    return pool.as_strided((pages, page_size, ROW + SCALES), (span, ROW + SCALES, 1))


def _page_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.as_strided((cache.shape[0], cache.shape[1] * (ROW + SCALES)), (cache.stride(0), 1))


def write_cache(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    size = cache.shape[1]
    page, local = slots // size, slots % size
    values, scales, tail = quantize(rows)
    data = torch.cat([values, tail.contiguous().view(torch.uint8).reshape(-1, 2 * ROPE)], dim=1)
    raw = _page_bytes(cache)
    raw[page[:, None], local[:, None] * ROW + torch.arange(ROW)] = data
    raw[page[:, None], size * ROW + local[:, None] * SCALES + torch.arange(SCALES)] = scales


def read_cache(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    size = cache.shape[1]
    page, local = slots // size, slots % size
    raw = _page_bytes(cache)
    data = raw[page[:, None], local[:, None] * ROW + torch.arange(ROW)]
    scales = raw[page[:, None], size * ROW + local[:, None] * SCALES + torch.arange(SCALES)]
    tail = data[:, NOPE:].contiguous().view(torch.bfloat16)
    return dequantize(data[:, :NOPE].contiguous(), scales, tail)


# --- FlashInfer's CUDA module -------------------------------------------------------------------


def memory(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """What a kernel sees that is given the address and assumes this shape, contiguous."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tensor.as_strided(shape, strides)


@dataclass
class Kernels:
    """The three entry points of sparse_mla_sm120_jit_binding.cu, for DSv4."""

    csrc: Path
    compute: bool = True
    calls: list[dict[str, Any]] = field(default_factory=list)

    def _body(self, file: str, start: str, stop: str) -> str:
        text = (self.csrc / file).read_text()
        begin = text.index(start)
        return text[begin : text.index(stop, begin)]

    @functools.cached_property
    def decode_table(self) -> set[tuple[int, int]]:
        text = (self.csrc / "sparse_mla_sm120_decode_dsv4.cu").read_text()
        return {(int(h), int(k)) for h, k in re.findall(r"DSV4_DISPATCH\((\d+), (\d+)\)", text)}

    @functools.cached_property
    def prefill_table(self) -> tuple[set[int], set[int], set[int], set[int], set[int]]:
        """Heads and top-k without an extra cache; heads, top-k and extra page sizes with one."""
        file = "sparse_mla_sm120_prefill.cu"
        single = self._body(file, "inline bool dispatch_dsv4_single", "#undef DISPATCH_BY_NH_CM")
        dual = self._body(file, "#define DISPATCH_DUAL_MG_CM", "#undef DISPATCH_BY_NH_PBSX")

        def numbers(pattern: str, text: str) -> set[int]:
            return {int(n) for n in re.findall(pattern, text)}

        return (
            numbers(r"case (\d+):", single),
            numbers(r"topk == (\d+)", single),
            numbers(r"case (\d+):", dual),
            numbers(r"topk != (\d+)\) return false", dual),
            numbers(r"extra_page_block_size == (\d+)", dual),
        )

    def build_and_load(self) -> Kernels:
        return self

    def _tiles(
        self,
        q: torch.Tensor,
        segments: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        scale: float,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Output and log2-sum-exp of each tile of 64 indices."""
        for cache, indices, lengths in segments:
            for start in range(0, indices.shape[1], TILE):
                tile = indices[:, start : start + TILE]
                inside = torch.arange(start, start + tile.shape[1]) < lengths[:, None]
                valid = (tile >= 0) & inside
                rows = torch.zeros(*tile.shape, HEAD_DIM)
                rows[valid] = read_cache(cache, tile[valid].long())
                logits = torch.einsum("nhd,ntd->nht", q.float(), rows) * scale * LOG2E
                logits = logits.masked_fill(~valid[:, None], -math.inf)
                lse = torch.logsumexp(logits / LOG2E, -1) * LOG2E
                weights = torch.exp2(logits - lse.masked_fill(lse.isinf(), 0)[..., None])
                yield torch.einsum("nht,ntd->nhd", weights, rows), lse

    @staticmethod
    def _merge(
        outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """outs[N, H, S, D] and lses[N, H, S] with the sink's share."""
        every = torch.cat([lses, (sink * LOG2E)[None, :, None].expand(*lses.shape[:2], 1)], -1)
        total = torch.logsumexp(every / LOG2E, -1) * LOG2E
        weights = torch.exp2(lses - total.masked_fill(total.isinf(), 0)[..., None])
        return (outs * weights[..., None]).sum(2), total

    def _segments(
        self,
        n: int,
        kv: torch.Tensor,
        indices: torch.Tensor,
        lengths: torch.Tensor,
        extra_kv: torch.Tensor | None,
        extra_indices: torch.Tensor | None,
        extra_lengths: torch.Tensor | None,
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        segments = [(_as3d(kv), memory(indices, n, indices.shape[-1]), memory(lengths, n))]
        if extra_kv is not None:
            assert extra_indices is not None
            assert extra_lengths is not None
            wide = memory(extra_indices, n, extra_indices.shape[-1])
            segments.append((_as3d(extra_kv), wide, memory(extra_lengths, n)))
        return segments

    def sparse_mla_sm120_decode_dsv4(
        self, q: Any, kv: Any, indices: Any, mid_out: Any, mid_lse: Any, output: Any, out_lse: Any,
        num_splits: int, scale: float, lengths: Any, sink: Any, extra_kv: Any, extra_indices: Any,
        extra_lengths: Any, chunks_per_block: int,
    ) -> None:  # fmt: skip
        n, heads, width = q.shape
        assert width == HEAD_DIM
        assert (heads, indices.shape[-1]) in self.decode_table, "decode-dsv4 launch failed"
        assert _as3d(kv).shape[1] == 64, "decode-dsv4 launch failed"
        self.calls.append({"kernel": "decode", "tokens": n, "splits": num_splits})
        if not self.compute:
            return
        segments = self._segments(n, kv, indices, lengths, extra_kv, extra_indices, extra_lengths)
        outs = memory(mid_out, n, heads, num_splits, HEAD_DIM)
        lses = memory(mid_lse, n, heads, num_splits)
        lses.fill_(-math.inf)
        outs.zero_()
        tiles = self._tiles(memory(q, n, heads, width), segments, scale)
        for split, (out, lse) in enumerate(tiles):
            outs[:, :, split] = out.to(outs.dtype)
            lses[:, :, split] = lse
        merged, total = self._merge(outs.float(), lses, sink)
        memory(output, n, heads, HEAD_DIM).copy_(merged)
        memory(out_lse, n, heads).copy_(total)

    def sparse_mla_sm120_paged_attention(
        self, q: Any, kv: Any, indices: Any, output: Any, out_lse: Any, scale: float,
        model_type: int, lengths: Any, sink: Any, extra_kv: Any, extra_indices: Any,
        extra_lengths: Any,
    ) -> None:  # fmt: skip
        n, heads, width = q.shape
        topk = indices.shape[-1]
        for tensor, dtype in (
            (q, torch.bfloat16), (indices, torch.int32), (output, torch.bfloat16),
            (out_lse, torch.float32), (lengths, torch.int32), (sink, torch.float32),
            (extra_indices, torch.int32), (extra_lengths, torch.int32),
        ):  # fmt: skip
            assert tensor is None or (tensor.dtype == dtype and tensor.is_contiguous())
        assert output.shape == (n, heads, HEAD_DIM)
        assert out_lse.shape == (n, heads)
        assert lengths.shape == (n,)
        assert sink.shape == (heads,)
        assert kv.dtype == torch.uint8
        assert n > 64, (
            "Decode (num_tokens <= 64) must go through sparse_mla_sm120_decode_dsv3_2 or "
            f"sparse_mla_sm120_decode_dsv4; got num_tokens={n}"
        )
        heads1, topks1, heads2, topks2, pages2 = self.prefill_table
        if extra_kv is None:
            known = heads in heads1 and topk in topks1
        else:
            known = heads in heads2 and topk in topks2 and _as3d(extra_kv).shape[1] in pages2
        assert known, f"Unsupported sparse-MLA prefill configuration: {heads} {topk}"
        self.calls.append({"kernel": "prefill", "tokens": n})
        if not self.compute:
            return
        segments = self._segments(n, kv, indices, lengths, extra_kv, extra_indices, extra_lengths)
        outs, lses = zip(*self._tiles(memory(q, n, heads, width), segments, scale), strict=True)
        merged, total = self._merge(torch.stack(outs, 2), torch.stack(lses, 2), sink)
        output.copy_(merged)
        out_lse.copy_(total)


def _as3d(cache: torch.Tensor) -> torch.Tensor:
    if cache.ndim == 4:
        return cache.squeeze(1 if cache.shape[1] == 1 else 2)
    return cache


# --- FlashInfer's Python ------------------------------------------------------------------------


def _module(name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


def _package(name: str, path: Path, **attributes: Any) -> types.ModuleType:
    module = _module(name, **attributes)
    module.__path__ = [str(path)]
    return module


class _TunableRunner:
    def __call__(self, inputs: list[torch.Tensor], tactic: int = -1, **kwargs: Any) -> Any:
        return self.forward(inputs, tactic=tactic, **kwargs)  # type: ignore[attr-defined]


class _AutoTuner:
    is_tuning_mode = False

    @classmethod
    def get(cls) -> _AutoTuner:
        return cls()

    def choose_one(self, name: str, runners: list[Any], *args: Any, **kwargs: Any) -> Any:
        return runners[0], -1


_CORE = (
    "_SparseMLASegment", "_NormalizedSparseMLASegment", "_normalize_optional_mla_sink",
    "_normalize_sparse_mla_indices_and_lens", "_normalize_sparse_mla_segments",
    "_workspace_tensor_view", "_sparse_mla_decode_workspace",
    "_trtllm_batch_decode_sparse_mla_sm120", "_check_sm120_dsv4_kv_cache_layout",
    "_resolve_dsv4_sparse_mla_backend", "_trtllm_batch_decode_sparse_mla_dsv4_sm120",
)  # fmt: skip


def load_flashinfer(wheel: Path, kernels: Kernels) -> types.ModuleType:
    """FlashInfer's runner, and its public function for DSv4 without the checks for other GPUs."""

    def same(*args: Any, **kwargs: Any) -> Any:
        return lambda function: function

    build = dict[str, Any]()
    exec((wheel / "flashinfer/_build_meta.py").read_text(), build)
    _package("flashinfer", wheel / "flashinfer", __version__=build["__version__"])
    names = ("ConstraintSpec", "DynamicTensorSpec", "OptimizationProfile", "TuningConfig")
    placeholders = {name: lambda *args, **kwargs: None for name in names}
    _module(
        "flashinfer.autotuner", AutoTuner=_AutoTuner, TunableRunner=_TunableRunner,
        autotune=contextlib.nullcontext, **placeholders,
    )  # fmt: skip
    _package("flashinfer.jit", wheel / "nowhere")
    _module("flashinfer.jit.env", FLASHINFER_WORKSPACE_DIR=wheel / "nowhere")
    _module("flashinfer.jit.mla", gen_sparse_mla_sm120_module=lambda: kernels)
    _module(
        "flashinfer.utils", register_custom_op=same, register_fake_op=same,
        supported_compute_capability=same,
    )  # fmt: skip
    _package("flashinfer.mla", wheel / "flashinfer/mla")
    module = importlib.import_module("flashinfer.mla._sparse_mla_sm120")

    import dataclasses

    core = _module("flashinfer.mla._core", torch=torch, math=math, dataclass=dataclasses.dataclass)
    core.__package__ = "flashinfer.mla"
    vars(core).update({name: getattr(typing, name) for name in typing.__all__})
    core.is_sm12x_supported = lambda device: True
    core.get_compute_capability = lambda device: (12, 1)
    core.check_shape_dtype_device = lambda x, shape, dtype, device, name: None
    pick(wheel / "flashinfer/mla/_core.py", _CORE, vars(core))

    def public(**kwargs: Any) -> torch.Tensor:
        assert core._resolve_dsv4_sparse_mla_backend(kwargs["query"].device) == "sparse"
        return core._trtllm_batch_decode_sparse_mla_dsv4_sm120(bmm2_scale=1.0, **kwargs)

    _module(
        "flashinfer.decode",
        trtllm_batch_decode_sparse_mla_dsv4=public,
        trtllm_batch_decode_with_kv_cache_mla=public,
    )
    return module


# --- vLLM ---------------------------------------------------------------------------------------


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
    output_buffers: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the Triton kernel of that name."""
    count = topk_indices.shape[0]
    local = topk_indices.long()
    rows = block_table[token_to_req_indices[:count].long()].long()
    pages = rows.gather(1, (local.clamp(min=0) // block_size))
    slots = torch.where(local >= 0, pages * block_size + local % block_size, -1).int()
    lens = torch.where(is_valid_token[:count], (local >= 0).sum(1), 0).int()
    return slots, lens


@dataclass
class Platform:
    cuda: bool = True
    capability: tuple[int, int] = (12, 1)

    def is_cuda(self) -> bool:
        return self.cuda

    def get_device_capability(self) -> SimpleNamespace:
        return SimpleNamespace(major=self.capability[0], minor=self.capability[1])

    def is_device_capability_family(self, family: int) -> bool:
        return self.capability[0] == family // 10


class Layer(torch.nn.Module):
    """What the attention classes use of vLLM's DeepseekV4Attention."""

    PREFILL_CHUNK_SIZE = 4

    def __init__(
        self,
        vllm_config: Any,
        prefix: str,
        topk_indices_buffer: torch.Tensor | None = None,
        aux_stream_list: Any = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.compress_ratio = vllm_config.ratios[prefix]
        self.n_local_heads = vllm_config.heads
        self.padded_heads = self.get_padded_num_q_heads(self.n_local_heads)
        self.window_size = 128
        self.scale = HEAD_DIM**-0.5
        self.max_num_batched_tokens = vllm_config.max_num_batched_tokens
        self.max_model_len = vllm_config.max_model_len
        self.topk_indices_buffer = topk_indices_buffer
        self.kv_cache_torch_dtype = torch.uint8
        sink = torch.full((self.padded_heads,), -math.inf)
        self.attn_sink = torch.nn.Parameter(sink, requires_grad=False)
        self.swa_cache_layer = SimpleNamespace(prefix=f"{prefix}.swa", block_size=64, kv_cache=None)
        self.kv_cache = torch.tensor([])
        vllm_config.layers[prefix] = self

    def _global_topk_output_buffers(self, topk_indices: torch.Tensor) -> None:
        """From vLLM 0.28 on: no pool of scratch here."""


def config(**changes: Any) -> SimpleNamespace:
    values = SimpleNamespace(
        heads=12,  # fewer than any kernel takes: padded to 16
        max_num_batched_tokens=256,
        max_model_len=16384,
        speculative_config=None,
        ratios={},
        layers={},
    )
    vars(values).update(changes)
    # What vLLM 0.28 asks: is this the draft model's config?
    values.attention_config = SimpleNamespace(use_non_causal=values.speculative_config is not None)
    return values


def dspark(k: int) -> SimpleNamespace:
    return SimpleNamespace(use_dspark=lambda: True, num_speculative_tokens=k)


@dataclass
class World:
    tree: Path
    wheel: Path
    compute: bool = True
    platform: Platform = field(default_factory=Platform)
    log: list[str] = field(default_factory=list)
    context: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(attn_metadata=None, no_compile_layers={})
    )

    def __post_init__(self) -> None:
        self.kernels = Kernels(self.wheel / "flashinfer/data/csrc", compute=self.compute)
        for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", "flashinfer")]:
            del sys.modules[name]
        self.runner_module = load_flashinfer(self.wheel, self.kernels)
        self._load_vllm()

    def _say(self, message: str, *args: Any) -> None:
        self.log.append(message % args)

    def _load_vllm(self) -> None:
        source = self.tree / "vllm"
        logger = SimpleNamespace(info_once=self._say, debug_once=lambda *a, **k: None)
        for name in (
            "", ".models", ".models.deepseek_v4", ".models.deepseek_v4.nvidia", ".utils", ".v1",
            ".v1.attention", ".v1.attention.backends", ".v1.attention.backends.mla",
        ):  # fmt: skip
            _package("vllm" + name, source.joinpath(*name.split(".")))
        _package("vllm.config", source / "nowhere", VllmConfig=object)
        _module("vllm.config.cache", CacheDType=str)
        _module("vllm.logger", init_logger=lambda name: logger)
        _package("vllm.platforms", source / "nowhere", current_platform=self.platform)
        _module("vllm.platforms.interface", DeviceCapability=tuple)
        _module("vllm.forward_context", get_forward_context=lambda: self.context)
        sys.modules.setdefault("requests", types.ModuleType("requests"))
        _module("vllm.utils.torch_utils", direct_register_custom_op=lambda *args, **kwargs: None)

        base = "vllm.models.deepseek_v4."
        _module(base + "attention", DeepseekV4Attention=Layer)
        _package(base + "common", source / "nowhere")
        _module(
            base + "common.ops", build_flashinfer_mixed_sparse_indices=None,
            compute_global_topk_indices_and_lens=compute_global_topk_indices_and_lens,
        )  # fmt: skip
        _package(base + "nvidia.ops", source / "nowhere")
        _module(
            base + "nvidia.ops.o_proj", compute_fp8_einsum_recipe=lambda: (None, None),
            deep_gemm_fp8_o_proj=None,
        )  # fmt: skip
        sparse_mla = _module(
            base + "sparse_mla", DeepseekV4FlashMLABackend=object, DeepseekV4FlashMLAMetadata=object,
            DeepseekV4SparseMLABackend=object,
        )  # fmt: skip
        models = source / "models/deepseek_v4"
        self.swa_file = source / "v1/attention/backends/mla/sparse_swa.py"
        pick(models / "sparse_mla.py", ["_C128A_TOPK_ALIGNMENT"], vars(sparse_mla))
        _module("vllm.v1.attention.backend", MultipleOf=object)
        swa = _module("vllm.v1.attention.backends.mla.sparse_swa", Collection=Collection)
        if "def _smallest_dispatchable_width" in self.swa_file.read_text():
            pick(self.swa_file, ["_smallest_dispatchable_width"], vars(swa))

        width_file = self.swa_file.with_name("compressor_utils.py")
        if "def get_dspark_swa_index_width" in width_file.read_text():
            utils = _module("vllm.v1.attention.backends.mla.compressor_utils")
            utils.cdiv = importlib.import_module("vllm.utils.math_utils").cdiv
            names = ["_DSPARK_SWA_INDEX_ALIGNMENT", "get_dspark_swa_index_width"]
            pick(width_file, names, vars(utils))

        self.flashinfer_utils = importlib.import_module("vllm.utils.flashinfer")
        sys.modules["vllm.envs"].VLLM_HAS_FLASHINFER_CUBIN = True
        self.stock = importlib.import_module(base + "nvidia.flashinfer_sparse")
        self.stock_cls = self.stock.DeepseekV4FlashInferSM120Attention
        if (models / "nvidia/flashinfer_sparse_jit.py").exists():
            self.load_jit()

    def load_jit(self) -> None:
        self.jit = importlib.import_module("vllm.models.deepseek_v4.nvidia.flashinfer_sparse_jit")
        self.jit_cls = self.jit.DeepseekV4FlashInferSM120JitAttention
        self.allocations: list[dict[str, Any]] = []
        allocate = self.jit._Scratch.allocate.__func__

        def on_cpu(cls: Any, *args: Any, **kwargs: Any) -> Any:
            """The scratch is for the current GPU; there is none."""
            values = inspect.signature(allocate).bind(cls, *args, **kwargs).arguments
            self.allocations.append({k: v for k, v in values.items() if k != "cls"})
            return allocate(**values | {"device": torch.device("cpu")})

        self.jit._Scratch.allocate = classmethod(on_cpu)
        torch.accelerator.current_device_index = lambda: 0
        torch.cuda.is_current_stream_capturing = lambda: self.capturing

    capturing = False

    def builder_width(self, heads: int, k: int) -> int:
        """The index width that the metadata builder makes for DSpark's draft of k tokens."""
        if utils := sys.modules.get("vllm.v1.attention.backends.mla.compressor_utils"):
            return int(utils.get_dspark_swa_index_width(128, k))
        model = SimpleNamespace(get_num_attention_heads=lambda parallel: heads)
        made = SimpleNamespace(
            window_size=128,
            num_speculative_tokens=k,
            vllm_config=SimpleNamespace(model_config=model, parallel_config=None),
        )
        return int(self.builder_method("_get_noncausal_index_width")(made))

    def builder_method(self, name: str) -> Any:
        """A method of the metadata builder, as a function."""
        (body,) = (
            node
            for builder in _parsed(self.swa_file).body
            if isinstance(builder, ast.ClassDef)
            for node in builder.body
            if isinstance(node, ast.FunctionDef) and node.name == name
        )
        names = vars(sys.modules["vllm.v1.attention.backends.mla.sparse_swa"]) | {
            "current_platform": self.platform,
            "cdiv": sys.modules["vllm.utils.math_utils"].cdiv,
        }
        exec(compile(ast.Module(body=[body], type_ignores=[]), str(self.swa_file), "exec"), names)
        return names[name]

    def layer(self, cls: Any, config: SimpleNamespace, ratio: int, prefix: str = "layer") -> Any:
        config.ratios[prefix] = ratio
        buffer = None
        if ratio == 4:
            buffer = torch.full((config.max_num_batched_tokens, 512), -1, dtype=torch.int32)
        layer = cls(config, prefix, topk_indices_buffer=buffer)
        self.context.no_compile_layers = config.layers
        return layer

    def dummy_run(self, layer: Any, tokens: int = 16) -> torch.Tensor:
        self.context.attn_metadata = None
        q = torch.zeros(tokens, layer.padded_heads, HEAD_DIM, dtype=torch.bfloat16)
        output = torch.ones_like(q)
        layer.forward_mqa(q, q, torch.arange(tokens), output)
        return output


# --- a batch ------------------------------------------------------------------------------------


def make_batch(
    layer: Any,
    requests: list[tuple[int, int]],
    num_decodes: int,
    *,
    seed: int = 0,
    extra_width: int = 128,
    swa_width: int = 128,
    values: bool = True,
) -> SimpleNamespace:
    """Caches, query and metadata for requests of (sequence length, query length), and the tokens'
    dense attention. The indices are padded with -1, and tokens in the caches are in random pages.
    Without `values` only the shapes are right."""
    torch.manual_seed(seed)
    ratio, heads = layer.compress_ratio, layer.n_local_heads
    lens = [n for _, n in requests]
    tokens, decode_tokens = sum(lens), sum(lens[:num_decodes])
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    longest = max(length for length, _ in requests)

    def paged(page_size: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A cache and a block table for `count` rows of each request; block 0 is nobody's."""
        blocks = -(-max(count, 1) // page_size)
        order = torch.randperm(blocks * len(requests)) + 1
        cache = new_cache(len(order) + 1, page_size)
        _page_bytes(cache)[0] = 0
        return cache, order.view(len(requests), blocks).int()

    def fill(cache: torch.Tensor, table: torch.Tensor, r: int, count: int) -> torch.Tensor:
        rows = torch.randn(count, HEAD_DIM) * 0.5
        position = torch.arange(count)
        size = cache.shape[1]
        write_cache(cache, table[r][position // size].long() * size + position % size, rows)
        return dequantize(*quantize(rows))

    swa_cache, swa_table = paged(64, longest)
    page = 256 // ratio if ratio > 1 else 0
    if ratio > 1:
        extra_cache, extra_table = paged(page, longest // ratio)
    else:
        extra_cache, extra_table = torch.tensor([]), torch.zeros(len(requests), 1).int()
    sink = torch.full((layer.padded_heads,), -math.inf)
    sink[:heads] = torch.randn(heads)
    layer.attn_sink.data = sink
    layer.swa_cache_layer.kv_cache, layer.kv_cache = swa_cache, extra_cache

    q = torch.zeros(tokens, layer.padded_heads, HEAD_DIM, dtype=torch.bfloat16)
    q[:, :heads] = torch.randn(tokens, heads, HEAD_DIM).to(torch.bfloat16)
    expected = torch.zeros(tokens, heads, HEAD_DIM)
    swa = torch.full((tokens, 1, swa_width), -1, dtype=torch.int32)
    swa_lens = torch.zeros(tokens, dtype=torch.int32)
    width = 512 if ratio == 4 else extra_width
    local = torch.full((tokens, width), -1, dtype=torch.int32)
    owner = torch.zeros(tokens, dtype=torch.int32)

    t = 0
    for r, (length, count) in enumerate(requests if values else []):
        keys = fill(swa_cache, swa_table, r, length)
        extra = fill(extra_cache, extra_table, r, length // ratio) if ratio > 1 else keys[:0]
        for i in range(count):
            position = length - count + i
            seen = torch.arange(max(0, position - 127), position + 1)
            if swa_width > 128:  # the draft's block sees its own future
                seen = torch.arange(max(0, length - count - 128), length)
            swa[t, 0, : len(seen)] = swa_table[r][seen // 64] * 64 + seen % 64
            swa_lens[t] = len(seen)
            chosen = torch.arange((position + 1) // ratio if ratio > 1 else 0)
            if ratio == 4:
                chosen = torch.randperm(len(chosen))[: min(width, len(chosen) * 2 // 3)]
            local[t, : len(chosen)] = chosen.int()
            owner[t] = r
            rows = torch.cat([keys[seen], extra[chosen.long()]])
            logits = q[t, :heads].float() @ rows.T * layer.scale
            weights = torch.softmax(torch.cat([logits, sink[:heads, None]], 1), 1)[:, :-1]
            expected[t] = weights @ rows
            t += 1

    valid = torch.ones(tokens, dtype=torch.bool)
    is_decode = slice(0, decode_tokens)
    is_prefill = slice(decode_tokens, tokens)
    metadata = SimpleNamespace(
        num_decodes=num_decodes,
        num_prefills=len(requests) - num_decodes,
        num_decode_tokens=decode_tokens,
        num_prefill_tokens=tokens - decode_tokens,
        query_start_loc_cpu=starts,
        is_valid_token=valid,
        token_to_req_indices=owner,
        decode_swa_indices=swa[is_decode],
        decode_swa_lens=swa_lens[is_decode],
        prefill_swa_indices=swa[is_prefill] if tokens > decode_tokens else None,
        prefill_swa_lens=swa_lens[is_prefill] if tokens > decode_tokens else None,
    )
    own = None
    if ratio == 4:
        layer.topk_indices_buffer[:tokens] = local
    if ratio > 1:
        own = SimpleNamespace(block_size=256, block_table=extra_table)
    if ratio == 128:
        slots, extra_lens = compute_global_topk_indices_and_lens(
            local, owner, extra_table, page, valid
        )
        own.c128a_global_decode_topk_indices = slots[is_decode].view(decode_tokens, 1, width)
        own.c128a_decode_topk_lens = extra_lens[is_decode]
        own.c128a_prefill_topk_indices = local[is_prefill]
    return SimpleNamespace(
        q=q,
        tokens=tokens,
        expected=expected,
        metadata={layer.prefix: own, layer.swa_cache_layer.prefix: metadata},
    )


def attend(world: World, layer: Any, batch: SimpleNamespace) -> torch.Tensor:
    world.context.attn_metadata = batch.metadata
    output = torch.full_like(batch.q, math.nan)
    layer.forward_mqa(batch.q, batch.q, torch.arange(batch.tokens), output)
    return output[:, : layer.n_local_heads]


def error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation, in units of the largest value; infinite if anything is NaN."""
    if output.isnan().any():
        return math.inf
    return ((output.float() - expected).abs().max() / expected.abs().max()).item()
