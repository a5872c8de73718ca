"""The patch `cutedsl-switch`: with VLLM_DISABLE_CUTEDSL=1 nothing on DeepSeek-V4's path
imports CuTeDSL.

No torch, CuTeDSL or GPU is needed. The functions that choose a kernel are cut out of the
real sources and run as they are, with the tree's own `has_cutedsl` and `vllm.envs`, and
with a CuTeDSL that notes who asks for it. A scan of all sources finds the uses that no
such test knows of.
"""

import __future__

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.patch("cutedsl-switch")
SWITCH = "VLLM_DISABLE_CUTEDSL"
DSV4 = "vllm/models/deepseek_v4"
COMPRESSOR = f"{DSV4}/compressor.py"
INDEXER_Q = f"{DSV4}/common/ops/fused_indexer_q.py"
CACHE_UTILS = f"{DSV4}/common/ops/cache_utils.py"
TRITON_COMPRESSOR = f"{DSV4}/common/ops/fused_compress_quant_cache.py"
LL_BF16 = "vllm/model_executor/kernels/linear/cute_dsl/ll_bf16.py"
NVFP4 = "vllm/model_executor/kernels/linear/nvfp4/flashinfer.py"
GATE_LINEAR = "vllm/model_executor/layers/fused_moe/router/gate_linear.py"
MXFP8 = "vllm/model_executor/layers/quantization/utils/mxfp8_utils.py"
INDEXER = "vllm/model_executor/layers/sparse_attn_indexer.py"
WARMUP = "vllm/model_executor/warmup/cutedsl_warmup.py"
KERNEL_WARMUP = "vllm/model_executor/warmup/kernel_warmup.py"
JIT_MONITOR = "vllm/utils/jit_monitor.py"
FLASHINFER = "vllm/utils/flashinfer.py"
FLASH_ATTN = "vllm/vllm_flash_attn/flash_attn_interface.py"

# What needs CuTeDSL as soon as it is imported, beside vLLM's modules that import these.
CUTEDSL = ("cutlass", "flashinfer.cute_dsl")


def under(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


# --- cutting code out of sources ----------------------------------------------------


@functools.cache
def parsed_text(text: str) -> ast.Module:
    return ast.parse(text)


def parsed(path: Path) -> ast.Module:
    """By content: two tests' temporary folders can have the same name."""
    return parsed_text(path.read_text(encoding="utf-8"))


def run_source(nodes: Sequence[ast.stmt], namespace: dict[str, Any]) -> dict[str, Any]:
    """Execute definitions without decorators and without evaluating annotations."""
    plain = []
    for node in nodes:
        copy = type(node)(**{name: getattr(node, name) for name in node._fields})
        copy.decorator_list = []  # type: ignore[attr-defined]
        plain.append(ast.copy_location(copy, node))
    module = ast.Module(body=plain, type_ignores=[])
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "<cut out>", "exec", flags, dont_inherit=True), namespace)
    return namespace


def definitions(body: list[ast.stmt]) -> dict[str, Any]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


# --- what the code under test meets -------------------------------------------------


class Anything(SimpleNamespace):
    """Has every attribute, can be called, indexed and counted with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *_: object, **__: object) -> Any:
        return Anything()

    def __getitem__(self, _: object) -> Any:
        return Anything()

    def __mod__(self, _: object) -> int:
        return 0

    def __floordiv__(self, _: object) -> int:
        return 1


class CuteDSL:
    """An importer that has CuTeDSL and what needs it, and notes what was imported."""

    def __init__(self) -> None:
        self.imported: list[str] = []

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if under(name, CUTEDSL) or name.endswith("_cutedsl") or name == "vllm.cute_utils":
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        self.imported.append(module.__name__)

        def member(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything()

        module.__getattr__ = member  # type: ignore[method-assign]


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, _: str) -> Callable[..., None]:
        def record(message: str, *values: object) -> None:
            self.lines.append(message % values)

        return record


class Platform(SimpleNamespace):
    """As much of `vllm.platforms.current_platform` as the code asks."""

    cuda: bool = True
    capability: int = 121
    device_type: str = "cuda"

    def is_cuda(self) -> bool:
        return self.cuda

    def is_rocm(self) -> bool:
        return not self.cuda

    def is_xpu(self) -> bool:
        return False

    def is_device_capability_family(self, capability: int) -> bool:
        return self.capability // 10 == capability // 10

    def is_device_capability(self, capability: tuple[int, int]) -> bool:
        return divmod(self.capability, 10) == capability

    def has_device_capability(self, capability: int) -> bool:
        return self.capability >= capability

    def fp8_dtype(self) -> str:
        return "float8_e4m3fn"


class Vllm:
    """A tree's own code where CuTeDSL is installed."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = tree
        self.monkeypatch = monkeypatch
        self.log = Log()
        self.platform = Platform()
        self.launched: list[str] = []
        self.cutedsl = CuteDSL()
        monkeypatch.setattr(sys, "meta_path", [self.cutedsl, *sys.meta_path])
        for package in (
            "vllm",
            "vllm.utils",
            *("vllm.model_executor", "vllm.model_executor.kernels"),
            *("vllm.model_executor.kernels.linear", "vllm.model_executor.kernels.linear.cute_dsl"),
            *("vllm.model_executor.kernels.attention", "vllm.model_executor.kernels.attention.dsa"),
            *("vllm.models", "vllm.models.deepseek_v4"),
            *("vllm.models.deepseek_v4.nvidia", "vllm.models.deepseek_v4.nvidia.ops"),
        ):
            self.stub(package, __path__=[])
        self.stub("vllm.platforms", current_platform=self.platform)
        # `vllm.envs` as it is, and the probe with all that it calls but the import itself.
        spec = importlib.util.spec_from_file_location("vllm.envs", tree / "vllm/envs.py")
        assert spec
        assert spec.loader
        self.envs = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.envs)
        monkeypatch.setitem(sys.modules, "vllm.envs", self.envs)
        sys.modules["vllm"].envs = self.envs  # type: ignore[attr-defined]
        self.probed: list[str] = []
        self.probe = self.cut("vllm/utils/import_utils.py", "has_cutedsl")["has_cutedsl"]
        self.stub("vllm.utils.import_utils", has_cutedsl=self.probe)

    def has_module(self, name: str) -> bool:
        self.probed.append(name)
        return True

    def stub(self, name: str, **members: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(members)
        self.monkeypatch.setitem(sys.modules, name, module)
        return module

    def kernel(self, name: str) -> Any:
        """A Triton kernel: `name[grid](...)`."""

        class Kernel:
            def __getitem__(_, grid: object) -> Callable[..., None]:
                return lambda *_, **__: self.launched.append(name)

        return Kernel()

    def cut(self, path: str, *names: str, **namespace: Any) -> dict[str, Any]:
        found = definitions(parsed(self.tree / path).body)
        return run_source(
            [found[name] for name in names],
            {
                "__package__": path.removesuffix(".py").replace("/", ".").rpartition(".")[0],
                "Any": Any,
                "cast": lambda _, value: value,
                "current_platform": self.platform,
                "envs": self.envs,
                "has_cutedsl": getattr(self, "probe", None),
                "logger": self.log,
                "torch": Anything(
                    float8_e4m3fn="float8_e4m3fn",
                    uint8="uint8",
                    bfloat16="bf16",
                    empty=lambda *shape, **_: Anything(shape=shape[0]),
                ),
                "_has_module": self.has_module,
                **namespace,
            },
        )

    @property
    def imported(self) -> list[str]:
        return self.cutedsl.imported

    # Each of these runs one piece of DeepSeek-V4's path.

    def compressor(self, *, head_dim: int = 512, cache: str = "fp8_ds_mla", ratio: int = 4) -> Any:
        class Module:
            def __init__(self) -> None: ...

        namespace = self.cut(
            COMPRESSOR,
            "_prefer_two_stage_compressor",
            "DeepseekCompressor",
            nn=SimpleNamespace(Module=Module, Parameter=Anything()),
            CompressorStateCache=Anything(),
            MergedColumnParallelLinear=Anything(),
            RMSNorm=Anything(),
            CompressorMetadata=object,
            MXFP4_BLOCK_SIZE=32,
            get_forward_context=lambda: SimpleNamespace(
                attn_metadata=AttnMetadata(), cudagraph_runtime_mode="none"
            ),
            CUDAGraphMode=SimpleNamespace(FULL="full"),
            save_partial_states=lambda **_: None,
            compress_norm_rope_store_triton=self.with_real_signature(
                "compress_norm_rope_store_triton"
            ),
            compress_norm_rope_store_two_stage_triton=self.with_real_signature(
                "compress_norm_rope_store_two_stage_triton"
            ),
        )
        config = Anything(cache_config=SimpleNamespace(cache_dtype=cache))
        config.model_config = Anything(
            hf_config=SimpleNamespace(qk_rope_head_dim=64, rms_norm_eps=1e-6)
        )
        layer = Anything(kv_cache=Anything(dtype="uint8"))
        if cache != "fp8_ds_mla":
            layer.kv_cache.dtype = "float8_e4m3fn" if "fp8" in cache else "bf16"
        config.compilation_config = Anything(static_forward_context={"k": layer})
        made = namespace["DeepseekCompressor"](config, ratio, 4096, head_dim, k_cache_prefix="k")
        made.state_cache = Anything(prefix="state")
        return made

    def with_real_signature(self, name: str) -> Callable[..., None]:
        """A Triton launcher that takes exactly the arguments of the real one."""
        node = definitions(parsed(self.tree / TRITON_COMPRESSOR).body)[name]
        parameters = {argument.arg for argument in node.args.args}

        def launch(**arguments: object) -> None:
            assert set(arguments) == parameters
            self.launched.append(name)

        return launch

    def compress(self, **options: Any) -> None:
        kv_score = Anything(split=lambda *_, **__: (Anything(), Anything()))
        self.compressor(**options).forward(kv_score, Anything(), Anything())

    def indexer_q(self, *, fp4: bool) -> None:
        function = self.cut(
            INDEXER_Q,
            "fused_indexer_q_rope_quant",
            MXFP4_BLOCK_SIZE=32,
            _fused_indexer_q_rope_mxfp4_kernel=self.kernel("mxfp4"),
            _fused_indexer_q_rope_quant_kernel=self.kernel("fp8"),
        )["fused_indexer_q_rope_quant"]
        function(
            Anything(shape=(3,), ndim=1),
            Anything(shape=(3, 64, 128), ndim=3),
            Anything(shape=(64, 64), ndim=2),
            Anything(shape=(3, 64), ndim=2),
            1.0,
            1.0,
            use_fp4=fp4,
        )

    def gather_k(self) -> None:
        self.cut(
            CACHE_UTILS,
            "dequantize_and_gather_k_cache",
            dequantize_and_gather_k_cache_triton=lambda *_, **__: self.launched.append("gather"),
        )["dequantize_and_gather_k_cache"](*(Anything() for _ in range(5)), 64, 0)

    def merge_dcp(self) -> None:
        self.cut(
            INDEXER,
            "_assert_cutedsl_dcp_merge_supported",
            "_merge_dcp_topk_global",
            torch=Anything(float32="f32", int32="i32", empty=Anything()),
            get_dcp_group=Anything(),
        )["_merge_dcp_topk_global"](
            Anything(device=Anything(type="cuda"), dtype="f32", shape=(1, 2)),
            Anything(dtype="i32", shape=(1, 512), device="cuda"),
            512,
            0,
            2,
            1,
        )

    def ll_bf16_available(self) -> bool:
        available = self.cut(LL_BF16, "is_available", _cutedsl_available=None)["is_available"]
        return bool(available())

    def warm_up_router(self) -> None:
        """The warm-up of a kernel that GB10 does not even use."""
        self.stub(
            "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16",
            is_available=self.ll_bf16_available,
            ll_bf16_gemm_kernel=SimpleNamespace(
                warmup=lambda **_: importlib.import_module("cutlass.cute")
            ),
        )
        warm_up = self.cut(
            KERNEL_WARMUP,
            "_warmup_ll_bf16_router_gemm",
            _LL_BF16_WARMUP_MODEL_SHAPES=(),
            _LL_BF16_WARMUP_M_RANGE=(),
            _ll_bf16_router_shapes_from_model=lambda model: ((4096, 256),),
        )["_warmup_ll_bf16_router_gemm"]
        # From 0.28 on it is given the model, to read the shapes from.
        warm_up(*[Anything()] * len(inspect.signature(warm_up).parameters))

    def warm_up_providers(self) -> None:
        def unit(_: object = None) -> Any:
            importlib.import_module("cutlass.cute")
            return 1

        self.cut(
            WARMUP,
            "cutedsl_warmup",
            time=Anything(perf_counter=lambda: 0.0),
            _iter_cutedsl_warmup_compile_units=lambda: [],
            _collect_unique_compile_units=lambda _: [SimpleNamespace(name="unit")],
            _compile_cutedsl_warmup_units=unit,
        )["cutedsl_warmup"]()

    def monitor_jit(self) -> None:
        self.cut(
            JIT_MONITOR,
            "_setup_cutedsl_jit_hook",
            "_MonitoredCuteCompile",
            _cutedsl_hook_installed=False,
        )["_setup_cutedsl_jit_hook"]()

    def gate(self) -> Any:
        class ReplicatedLinear:
            def __init__(self, *_: object, params_dtype: object, **__: object) -> None:
                self.weight = SimpleNamespace(dtype=params_dtype)

        self.stub(
            "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16",
            is_available=self.ll_bf16_available,
        )
        kernel_config = SimpleNamespace(enable_bf16x3_router_gemm=True)
        return self.cut(
            GATE_LINEAR,
            "GateLinear",
            ReplicatedLinear=ReplicatedLinear,
            torch=SimpleNamespace(bfloat16="bf16", float32="f32", dtype=str),
            get_current_vllm_config_or_none=lambda: SimpleNamespace(kernel_config=kernel_config),
        )["GateLinear"]

    def flashinfer(self) -> dict[str, Any]:
        names = [
            *("has_flashinfer_cutedsl", "has_flashinfer_cutedsl_grouped_gemm_nt_masked"),
            *("has_flashinfer_cutedsl_moe_nvfp4", "has_flashinfer_b12x_gemm"),
            "has_flashinfer_b12x_moe",
        ]
        namespace = self.cut(
            FLASHINFER,
            *names,
            importlib=importlib,
            has_flashinfer=lambda: True,
            has_flashinfer_moe=lambda: True,
            _get_submodule=lambda name: (
                importlib.import_module(name) if under(name, CUTEDSL) else Anything()
            ),
        )
        self.stub("flashinfer", __path__=[])
        self.monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: self.cutedsl.imported.append(f"spec of {name}") or True,
        )
        return {name: namespace[name] for name in names}

    def quantize_mxfp8(self) -> str:
        backends: list[str] = []

        def quantize(x: object, *, backend: str, **_: object) -> tuple[Any, Any]:
            backends.append(backend)
            return Anything(), Anything()

        self.stub("flashinfer", mxfp8_quantize=quantize)
        self.cut(MXFP8, "_mxfp8_e4m3_quantize_impl")["_mxfp8_e4m3_quantize_impl"](Anything())
        return backends[0]


class AttnMetadata(dict[str, Any]):
    def __missing__(self, _: str) -> Any:
        return Anything(slot_mapping=Anything(shape=(3,)), num_decode_tokens=1)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if under(name, (*CUTEDSL, "vllm")):
            del sys.modules[name]


@pytest.fixture
def patched(patched_tree: Path, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    """The patched tree, the switch off."""
    monkeypatch.delenv(SWITCH, raising=False)
    return Vllm(patched_tree, monkeypatch)


@pytest.fixture
def switched_off(patched: Vllm) -> Vllm:
    """The patched tree with CuTeDSL disabled."""
    patched.monkeypatch.setenv(SWITCH, "1")
    return patched


@pytest.fixture
def pristine(pristine_tree: Path, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    """The pristine tree, which is asked the same: it has no switch."""
    monkeypatch.setenv(SWITCH, "1")
    return Vllm(pristine_tree, monkeypatch)


# --- the switch and the probe -------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "disabled"), [(None, False), ("0", False), ("1", True), ("True", True), ("", False)]
)
def test_variable(patched: Vllm, value: str | None, disabled: bool) -> None:
    if value is not None:
        patched.monkeypatch.setenv(SWITCH, value)
    assert getattr(patched.envs, SWITCH) is disabled
    assert patched.probe() is not disabled


def test_variable_is_declared_and_in_the_compile_cache_key(patched: Vllm) -> None:
    """Other kernels are compiled with it."""
    tree = parsed(patched.tree / "vllm/envs.py")
    declared = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    assert f"{SWITCH}: bool = False" in declared
    assert SWITCH not in ast.unparse(definitions(tree.body)["compile_factors"])


def test_a_disabled_cutedsl_is_not_even_looked_at(switched_off: Vllm, pristine_tree: Path) -> None:
    assert switched_off.probe() is False
    assert switched_off.probed == []
    assert any(SWITCH in line for line in switched_off.log.lines)
    pristine = Vllm(pristine_tree, switched_off.monkeypatch)
    assert pristine.probe() is True
    assert pristine.probed == ["cutlass"]


# --- each use -----------------------------------------------------------------------

WITH_FALLBACK: dict[str, tuple[Callable[[Vllm], Any], list[str]]] = {
    "compressor, C4A": (Vllm.compress, ["compress_norm_rope_store_triton"]),
    "compressor, C128A": (
        lambda vllm: vllm.compress(ratio=128),
        ["compress_norm_rope_store_triton"],
    ),
    "indexer q, fp8": (lambda vllm: vllm.indexer_q(fp4=False), ["fp8"]),
    "indexer q, mxfp4": (lambda vllm: vllm.indexer_q(fp4=True), ["mxfp4"]),
    "k gather": (Vllm.gather_k, ["gather"]),
    "router GEMM": (Vllm.ll_bf16_available, []),
    "router warm-up": (Vllm.warm_up_router, []),
    "warm-up units": (Vllm.warm_up_providers, []),
    "JIT monitor": (Vllm.monitor_jit, []),
}
each_use = pytest.mark.parametrize(
    ("use", "fallback"), WITH_FALLBACK.values(), ids=WITH_FALLBACK.keys()
)


@each_use
def test_pristine_uses_cutedsl(
    pristine: Vllm, use: Callable[[Vllm], Any], fallback: list[str]
) -> None:
    use(pristine)
    assert pristine.imported
    assert pristine.launched == []


@each_use
def test_switched_off(switched_off: Vllm, use: Callable[[Vllm], Any], fallback: list[str]) -> None:
    use(switched_off)
    assert switched_off.imported == []
    assert switched_off.launched == fallback


@each_use
def test_unchanged_without_the_switch(
    patched: Vllm, pristine_tree: Path, use: Callable[[Vllm], Any], fallback: list[str]
) -> None:
    use(patched)
    assert patched.imported
    assert patched.launched == []


# --- the compressor -----------------------------------------------------------------


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_no_fallback_for_a_plain_cache(switched_off: Vllm, cache: str) -> None:
    """Only CuTeDSL stores plain rows: an error when the model is made, not garbage."""
    with pytest.raises(RuntimeError) as raised:
        switched_off.compressor(cache=cache)
    message = str(raised.value)
    for part in (f"not {cache}.", "fp8_ds_mla", SWITCH, "nvidia-cutlass-dsl"):
        assert part in message
    assert switched_off.imported == []


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_ds_mla"])
def test_plain_cache_with_cutedsl(patched: Vllm, cache: str) -> None:
    patched.compress(cache=cache)
    assert patched.imported == ["vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"]


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_indexer_compressor_is_triton_anyway(patched: Vllm, cache: str) -> None:
    patched.compress(head_dim=128, cache=cache)
    patched.monkeypatch.setenv(SWITCH, "1")
    patched.compress(head_dim=128, cache=cache)
    assert patched.launched == ["compress_norm_rope_store_triton"] * 2
    assert patched.imported == []


def test_rocm_compressor(patched: Vllm) -> None:
    patched.platform.cuda = False
    patched.compress(cache="auto")
    patched.compress(ratio=128)
    assert patched.launched == [
        "compress_norm_rope_store_triton",
        "compress_norm_rope_store_two_stage_triton",
    ]
    assert patched.imported == []


# --- the rest -----------------------------------------------------------------------


def test_dcp_has_no_fallback(switched_off: Vllm, pristine_tree: Path) -> None:
    with pytest.raises(RuntimeError, match="requires CuteDSL"):
        switched_off.merge_dcp()
    assert switched_off.imported == []
    pristine = Vllm(pristine_tree, switched_off.monkeypatch)
    pristine.merge_dcp()
    assert pristine.imported


def router_kernels(gate: Any) -> tuple[bool, bool]:
    bf16 = gate(4096, 256, out_dtype="f32", params_dtype="bf16")
    late = gate(4096, 256, params_dtype="bf16")
    late.set_out_dtype("f32")
    assert late.allow_ll_bf16_gemm == bf16.allow_ll_bf16_gemm
    fp32 = gate(4096, 256, params_dtype="f32")
    return bf16.allow_ll_bf16_gemm, fp32.allow_bf16x3_router_gemm


@pytest.mark.parametrize("capability", [90, 100, 121])
def test_router(patched: Vllm, pristine_tree: Path, capability: int) -> None:
    patched.platform.capability = capability
    expected = {90: (True, False), 100: (True, True), 121: (False, False)}[capability]
    assert router_kernels(patched.gate()) == expected
    patched.monkeypatch.setenv(SWITCH, "1")
    patched.cutedsl.imported.clear()
    assert router_kernels(patched.gate()) == (False, False)
    assert patched.imported == []
    pristine = Vllm(pristine_tree, patched.monkeypatch)
    pristine.platform.capability = capability
    assert router_kernels(pristine.gate()) == expected


def test_flashinfers_cutedsl(patched: Vllm, pristine_tree: Path) -> None:
    """Which FP4 experts and GEMMs are offered, the ones for SM12x (b12x) among them."""
    assert all(probe() for probe in patched.flashinfer().values())
    patched.monkeypatch.setenv(SWITCH, "1")
    patched.cutedsl.imported.clear()
    assert {name: probe() for name, probe in patched.flashinfer().items() if probe()} == {}
    assert patched.imported == []
    pristine = Vllm(pristine_tree, patched.monkeypatch)
    assert all(probe() for probe in pristine.flashinfer().values())


@pytest.mark.parametrize("disabled", [False, True])
def test_nvfp4_gemm(patched: Vllm, pristine_tree: Path, disabled: bool) -> None:
    patched.monkeypatch.setenv(SWITCH, str(int(disabled)))
    for vllm, expected in (
        (patched, not disabled),
        (Vllm(pristine_tree, patched.monkeypatch), True),
    ):
        vllm.platform.capability = 100
        kernel = definitions(
            definitions(parsed(vllm.tree / NVFP4).body)["FlashInferCuteDslNvFp4LinearKernel"].body
        )["is_supported"]
        supported = run_source(
            [kernel],
            {
                "current_platform": vllm.platform,
                "has_flashinfer": lambda: True,
                "has_flashinfer_cutedsl": vllm.flashinfer()["has_flashinfer_cutedsl"],
            },
        )["is_supported"]
        assert supported(None)[0] is expected


@pytest.mark.parametrize("capability", [100, 121])
def test_mxfp8_quantization(patched: Vllm, pristine_tree: Path, capability: int) -> None:
    patched.platform.capability = capability
    assert patched.quantize_mxfp8() == "cute-dsl"
    patched.monkeypatch.setenv(SWITCH, "1")
    assert patched.quantize_mxfp8() == "cuda"
    pristine = Vllm(pristine_tree, patched.monkeypatch)
    pristine.platform.capability = capability
    assert pristine.quantize_mxfp8() == "cute-dsl"


@pytest.mark.parametrize("capability", [90, 100, 110])
def test_fa4(patched: Vllm, capability: int) -> None:
    patched.platform.capability = capability
    fa4 = patched.cut(FLASH_ATTN, "_is_fa4_supported", FA4_AVAILABLE=True)["_is_fa4_supported"]
    assert fa4() == (True, None)
    patched.monkeypatch.setenv(SWITCH, "1")
    supported, why = fa4()
    assert not supported
    assert SWITCH in why
    assert patched.probed == []


# --- every use in the sources -------------------------------------------------------

# Uses that are not behind the probe where they stand, each with the reason.
ELSEWHERE = {
    # Reached only where `is_available` of the same file, which asks the probe, agreed.
    f"{LL_BF16}: _cute",
    f"{LL_BF16}: LLBf16Gemm._fake_gemm_tensors",
    f"{LL_BF16}: LLBf16Gemm._compile_dotprod",
    f"{LL_BF16}: LLBf16Gemm._compile_splitk",
    # Lazy wrappers: for experts that are only offered where `has_flashinfer_cutedsl_...` or
    # `has_flashinfer_b12x_moe`, which ask it, agreed.
    f"{FLASHINFER}: flashinfer_convert_sf_to_mma_layout",
    f"{FLASHINFER}: flashinfer_cutedsl_grouped_gemm_nt_masked",
    # Looks for such a kernel in a graph; brings none.
    "vllm/compilation/passes/fusion/collective_fusion.py: AsyncTPPass.__init__",
    # Masks for FA4, which `_is_fa4_supported` switches off, and which no SM12x has.
    "vllm/v1/attention/backends/flash_attn.py: _make_mm_prefix_mask_mod",
    "vllm/v1/attention/backends/flash_attn.py: _make_mm_prefix_mask_mod.mm_prefix_mask_mod",
    "vllm/v1/attention/backends/flash_attn.py: _make_rswa_mask_mod",
    "vllm/v1/attention/backends/flash_attn.py: _make_rswa_mask_mod.rswa_mask_mod",
    # Other models: GDN's CuTeDSL backend must be asked for; MiniMax-M3; Inkling.
    (
        "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py: "
        "ChunkGatedDeltaRule.forward_cutedsl"
    ),
    (
        "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py: "
        "QwenGatedDeltaNetAttention._warmup_prefill_kernels"
    ),
    "vllm/models/minimax_m3/common/indexer.py: select_indexer_impl_cls",
    "vllm/models/inkling/nvidia/ops/fa4_rel_attention.py: _get_score_mod",
    "vllm/models/inkling/nvidia/ops/fa4_rel_attention.py: _get_score_mod.score_mod_rel_bias",
}
# A layout of weights for such experts.
_FP4_MOE = "vllm/model_executor/layers/quantization/utils/flashinfer_fp4_moe.py"
_GDN = "vllm/v1/attention/backends/gdn_attn.py: GDNAttentionMetadataBuilder"
_KIMI = "vllm/models/kimi_k3/nvidia"
_SKINNY = "vllm/model_executor/kernels/linear/cute_dsl/skinny_gemm.py: ShapeDynamicSkinnyGemm"
_TRANSFORMS = "vllm/model_executor/layers/quantization/compressed_tensors/transform/schemes"
ONLY_IN = {
    "0.26.0": {
        f"{_FP4_MOE}: prepare_nvfp4_moe_layer_for_flashinfer_cutedsl",
        f"{_GDN}.build",
    },
    "0.28.0": {
        f"{_FP4_MOE}: nvfp4_swizzled_scale_to_cutedsl_mma_view",
        f"{_GDN}._build_chunk_metadata",
        # Only where `is_available` of the same class, which asks the probe, agreed.
        f"{_SKINNY}._compile",
        f"{_SKINNY}._cutlass_dtype",
        # Quantizes for the b12x package, whose `has_b12x` asks it.
        "vllm/model_executor/kernels/linear/mxfp4/b12x.py: _apply_b12x_mxfp4_linear",
        # The name of a kernel that was chosen before.
        (
            f"{_TRANSFORMS}/linear_qutlass_nvfp4.py: "
            "QutlassNvFP4LinearMethod._get_flashinfer_gemm_backend"
        ),
        # Masks for FA4.
        (
            "vllm/model_executor/layers/attention/sparse_mla_attention.py: "
            "SparseMLACommonImpl._run_masked_mha"
        ),
        "vllm/v1/attention/backends/flash_attn.py: _make_mm_prefix_mask_mod._load_q_range",
        # Other models: DeepSeek-V3.2's fused queries, dense MLA on SM100, Kimi-K3.
        "vllm/models/deepseek_v32/common/kernels.py: fused_q",
        "vllm/v1/attention/backends/mla/flashinfer_mla.py: _select_mla_decode_backend",
        *(f"{_KIMI}/kda.py: KimiK3DeltaAttention.{name}" for name in ("__init__", "forward")),
        *(f"{_KIMI}/mla.py: MultiHeadLatentAttention.{name}" for name in ("__init__", "forward")),
        *(f"{_KIMI}/model.py: KimiMLP.{name}" for name in ("__init__", "forward")),
        f"{_KIMI}/model.py: maybe_init_gemm_rs",
        f"{_KIMI}/ops/latent_moe_tail.py: KimiK3LatentMoETailOp.__init__",
    },
}
# The uses that the patch puts behind the probe, and those that were behind it already.
NEWLY_BEHIND = {
    f"{COMPRESSOR}: DeepseekCompressor.forward",
    f"{LL_BF16}: is_available",
    f"{GATE_LINEAR}: GateLinear.forward",
    f"{GATE_LINEAR}: fp32_router_gemm_dispatch_impl",
    f"{MXFP8}: _mxfp8_e4m3_quantize_impl",
    f"{JIT_MONITOR}: _setup_cutedsl_jit_hook",
    f"{FLASHINFER}: has_flashinfer_cutedsl",
    f"{FLASHINFER}: has_flashinfer_cutedsl_grouped_gemm_nt_masked",
    f"{FLASHINFER}: has_flashinfer_b12x_moe",
    f"{NVFP4}: FlashInferCuteDslNvFp4LinearKernel.apply_weights",
    (
        "vllm/model_executor/kernels/linear/mxfp4/flashinfer.py: "
        "FlashInferMxFp4LinearKernel.apply_weights"
    ),
    (
        "vllm/model_executor/kernels/linear/mxfp8/flashinfer.py: "
        "FlashInferCutedslMxfp8LinearKernel.apply_weights"
    ),
}
NEWLY_BEHIND_ONLY_IN = {"0.26.0": set(), "0.28.0": {f"{_SKINNY}.is_available"}}
ALREADY_BEHIND = {
    f"{INDEXER}: _merge_dcp_topk_global",
    f"{CACHE_UTILS}: dequantize_and_gather_k_cache",
    f"{INDEXER_Q}: fused_indexer_q_rope_quant",
}


IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.M
)


class Source:
    """One file, and which places in it are only reached if the probe agrees."""

    def __init__(self, tree: Path, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(tree).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.module = self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        is_package = path.name == "__init__.py"
        self.package = self.module if is_package else self.module.rpartition(".")[0]

    def absolute(self, base: str) -> str:
        level = len(base) - len(base.lstrip("."))
        if not level:
            return base
        parts = self.package.split(".")
        return ".".join([*parts[: len(parts) - level + 1], *filter(None, [base.lstrip(".")])])

    @functools.cached_property
    def mentioned(self) -> list[str]:
        """What the import statements name, read fast: too much rather than too little."""
        names = []
        for base, members, modules in IMPORT.findall(self.text):
            if base:
                base = self.absolute(base)
                names += [f"{base}.{name}" for name in re.findall(r"\w+", members)]
            else:
                names += re.findall(r"[.\w]+", modules)
        return names

    @functools.cached_property
    def parent(self) -> dict[ast.AST, ast.AST]:
        body = parsed(self.path)
        return {child: node for node in ast.walk(body) for child in ast.iter_child_nodes(node)}

    def nodes(self, *kinds: type[Any]) -> list[Any]:
        return [node for node in self.parent if isinstance(node, kinds)]

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """(child, parent), inside out."""
        while node in self.parent:
            yield node, self.parent[node]
            node = self.parent[node]

    def imports(self) -> Iterator[tuple[ast.stmt, str]]:
        for node in self.nodes(ast.Import, ast.ImportFrom):
            if any(
                isinstance(parent, ast.If) and "TYPE_CHECKING" in ast.unparse(parent.test)
                for _, parent in self.around(node)
            ):
                continue
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            else:
                base = self.absolute("." * node.level + (node.module or ""))
                yield from ((node, f"{base}.{alias.name}") for alias in node.names)

    def place(self, node: ast.AST) -> str:
        """The function, or else the variable, that something stands in."""
        names: list[str] = []
        variable = "import"
        for inner in [node, *(parent for _, parent in self.around(node))]:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.insert(0, inner.name)
            elif isinstance(inner, ast.Assign):
                variable = ast.unparse(inner.targets[0])
        return f"{self.name}: {'.'.join(names) or variable}"

    def in_function(self, node: ast.AST) -> bool:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        return any(isinstance(parent, kinds) for _, parent in self.around(node))


class Guards:
    """What implies that `has_cutedsl()` returned True, by names."""

    def __init__(self, sources: list[Source]) -> None:
        self.probes = {"has_cutedsl"}
        self.checks: set[str] = set()  # functions that raise unless the probe agrees
        self.attributes: set[str] = set()  # variables that are only true if it does
        known = 0
        while known < (known := len(self.probes) + len(self.checks) + len(self.attributes)):
            for source in sources:
                self.learn(source)

    def learn(self, source: Source) -> None:
        for function in definitions(parsed(source.path).body).values():
            if isinstance(function, ast.FunctionDef):
                if self.agrees(source, function):
                    self.probes.add(function.name)
                if any(
                    isinstance(node, ast.If)
                    and self.denies(node.test)
                    and isinstance(node.body[-1], ast.Raise)
                    for node in function.body
                ):
                    self.checks.add(function.name)
        values: dict[str, list[ast.expr]] = {}
        for node in source.nodes(ast.Assign):
            if isinstance(node.targets[0], ast.Attribute):
                values.setdefault(node.targets[0].attr, []).append(node.value)
        self.attributes |= {
            name
            for name, given in values.items()
            if any(map(self.implies, given))
            and all(self.implies(value) or self.false(value) for value in given)
        }

    def agrees(self, source: Source, function: ast.FunctionDef) -> bool:
        """Whether every result of a function but False implies that the probe agreed."""
        values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        unsure = [value for value in values if value is None or not self.false(value)]
        return bool(unsure) and all(
            value is not None and (self.implies(value) or self.behind(source, value))
            for value in unsure
        )

    @staticmethod
    def false(value: ast.expr) -> bool:
        first = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
        return isinstance(first, ast.Constant) and first.value is False

    def implies(self, test: ast.expr) -> bool:
        """Whether a true test means that the probe agreed."""
        match test:
            case ast.Call(func=ast.Name(id=name)):
                return name in self.probes
            case ast.Attribute(attr=name) | ast.Name(id=name):
                return name in self.attributes
            case ast.BoolOp(op=ast.And(), values=values):
                return any(map(self.implies, values))
        return False

    def denies(self, test: ast.expr) -> bool:
        """Whether a false test means that the probe agreed."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.implies(operand)
            case ast.BoolOp(op=ast.Or(), values=values):
                return any(map(self.denies, values))
        return False

    def behind(self, source: Source, node: ast.AST) -> bool:
        return any(self.holds(source, *step) for step in source.around(node))

    def holds(self, source: Source, child: Any, parent: Any) -> bool:
        match parent:
            case ast.If(body=[*inside]) | ast.IfExp(body=inside):
                inside = inside if isinstance(inside, list) else [inside]
                if child in inside and self.implies(parent.test):
                    return True
            case ast.BoolOp(op=ast.And(), values=values):
                return any(map(self.implies, values[: values.index(child)]))
            case ast.ClassDef(body=members):  # a kernel that is only offered if it agrees
                offered = definitions(members).get("is_supported")
                return offered not in (None, child) and self.agrees(source, offered)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and child in block:
                return any(map(self.stops, block[: block.index(child)]))
        return False

    def stops(self, statement: ast.stmt) -> bool:
        """Whether what follows a statement is only reached if the probe agreed."""
        match statement:
            case ast.If(test=test, body=[*_, ast.Return() | ast.Raise()]):
                return self.denies(test)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
                return name in self.checks
        return False


class Uses:
    """All uses of CuTeDSL in a tree, by whether they are behind the probe.

    A module that imports CuTeDSL when it is itself imported needs it; importing such a
    module is a use as well.
    """

    def __init__(self, tree: Path) -> None:
        every = [Source(tree, path) for path in sorted((tree / "vllm").rglob("*.py"))]
        self.needing: set[str] = set()
        while True:
            needed = (*CUTEDSL, *self.needing)
            importing = [s for s in every if any(under(name, needed) for name in s.mentioned)]
            new = {
                source.module
                for source in importing
                if any(
                    under(name, needed) and not source.in_function(node)
                    for node, name in source.imports()
                )
            }
            if new <= self.needing:
                break
            self.needing |= new
        words = re.compile(
            r"has_cutedsl|cute-dsl|flashinfer\.cute_dsl|@(cute|cutlass|dsl_user_op)\b"
        )
        sources = [s for s in every if s in importing or words.search(s.text)]
        self.guards = Guards(sources)
        self.behind: set[str] = set()
        self.bare: set[str] = set()
        for source in sources:
            if source.module not in self.needing:
                self.sort(source, needed)

    def sort(self, source: Source, needed: Sequence[str]) -> None:
        found: list[ast.AST] = [node for node, name in source.imports() if under(name, needed)]
        found += [
            node
            for node in source.nodes(ast.Constant)
            if node.value == "cute-dsl" or under(str(node.value), ("flashinfer.cute_dsl",))
        ]
        found += [
            node
            for node in source.nodes(ast.FunctionDef, ast.ClassDef)
            for decorator in node.decorator_list
            if re.match(r"(cute|cutlass|dsl_user_op)\b", ast.unparse(decorator))
        ]
        for node in found:
            behind = self.guards.behind(source, node)
            (self.behind if behind else self.bare).add(source.place(node))


@pytest.fixture(scope="module")
def uses(patched_tree: Path) -> Uses:
    return Uses(patched_tree)


def test_every_use_is_behind_the_probe(uses: Uses, stack_name: str) -> None:
    """A new use, in DeepSeek-V4 or beside it, fails here until someone has looked at it."""
    assert uses.bare == ELSEWHERE | ONLY_IN[stack_name]
    assert uses.behind == NEWLY_BEHIND | NEWLY_BEHIND_ONLY_IN[stack_name] | ALREADY_BEHIND


def test_pristine_uses(pristine_tree: Path, stack_name: str) -> None:
    uses = Uses(pristine_tree)
    newly_behind = NEWLY_BEHIND | NEWLY_BEHIND_ONLY_IN[stack_name]
    assert uses.bare == ELSEWHERE | ONLY_IN[stack_name] | newly_behind
    assert uses.behind == ALREADY_BEHIND


def test_nothing_of_deepseek_v4_is_excepted(uses: Uses) -> None:
    """And its kernels that need CuTeDSL are known as such."""
    assert not [use for use in uses.bare if use.startswith(DSV4)]
    kernels = {name.rpartition(".")[2] for name in uses.needing if "deepseek_v4" in name}
    assert kernels == {
        "dequant_gather_k_cutedsl",
        "fused_indexer_q_cutedsl",
        "sparse_attn_compress_cutedsl",
    }


PROBES_ONLY_IN = {"0.26.0": set(), "0.28.0": {"has_b12x"}}


def test_guards_are_what_they_seem(uses: Uses, stack_name: str) -> None:
    """The scan goes by names; these are all that it takes for the probe's consent."""
    assert uses.guards.probes == PROBES_ONLY_IN[stack_name] | {
        "has_cutedsl",
        "is_available",
        *("has_flashinfer_cutedsl", "has_flashinfer_cutedsl_grouped_gemm_nt_masked"),
        *("has_flashinfer_cutedsl_moe_nvfp4", "has_flashinfer_b12x_gemm"),
        "has_flashinfer_b12x_moe",
    }
    assert uses.guards.checks == {"_assert_cutedsl_dcp_merge_supported"}
    assert uses.guards.attributes == {
        *("_use_cutedsl", "allow_bf16x3_router_gemm", "allow_ll_bf16_gemm")
    }


NEW_USES = {
    "import": "import cutlass\n\ndef f():\n    has_cutedsl()\n",
    "in a function": "def f():\n    from cutlass import cute\n",
    "of a kernel": "def f():\n    from ..nvidia.ops import dequant_gather_k_cutedsl\n",
    "of vLLM's helpers": "from vllm.cute_utils import cvt\n",
    "of FlashInfer's": "def f(q):\n    return q(backend='cute-dsl')\n",
    "after the check": "def f():\n    if has_cutedsl():\n        pass\n    import cutlass\n",
    "in the other branch": (
        "def f():\n    if has_cutedsl():\n        pass\n    else:\n        import cutlass\n"
    ),
    "with another condition": "def f(x):\n    if x or has_cutedsl():\n        import cutlass\n",
    "where it only warns": (
        "def f():\n    if not has_cutedsl():\n        print()\n    import cutlass\n"
    ),
}
GUARDED = {
    "if": "def f(x):\n    if x and has_cutedsl():\n        import cutlass\n",
    "early": "def f(x):\n    if x or not has_cutedsl():\n        return\n    import cutlass\n",
    "choice": "def f(q):\n    return q(backend='cute-dsl' if has_cutedsl() else 'cuda')\n",
    "types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cutlass\n",
}


@pytest.mark.parametrize(
    "source", [*NEW_USES.values(), *GUARDED.values()], ids=[*NEW_USES, *GUARDED]
)
def test_the_scan_sees(tmp_path: Path, patched_tree: Path, source: str) -> None:
    """On a small tree with one more file than DeepSeek-V4 has."""
    parsed.cache_clear()  # pytest gives the folder of a test that passed to the next one
    for path in (f"{DSV4}/nvidia/ops/dequant_gather_k_cutedsl.py", "vllm/cute_utils/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((patched_tree / path).read_bytes())
    new = tmp_path / DSV4 / "common" / "new.py"
    new.parent.mkdir()
    new.write_text(source, encoding="utf-8")
    user = new.with_name("user.py")
    user.write_text("from .new import f\n", encoding="utf-8")
    uses = Uses(tmp_path)
    if source in GUARDED.values():
        assert not uses.bare
    elif source.startswith(("import", "from")):  # then whoever imports it needs CuTeDSL
        assert {"vllm.models.deepseek_v4.common.new", "vllm.models.deepseek_v4.common.user"} <= (
            uses.needing
        )
    else:
        assert uses.bare == {f"{DSV4}/common/new.py: f"}
        assert not uses.behind
