"""The patch `dead-experts`: zero, NaN, infinite and missing NVFP4 global scales.

vLLM is not imported (it wants a GPU build and half of PyPI). `scenarios` cuts the real
oracle, the real preparation for CUTLASS and FlashInfer, and the two real MoE methods out
of a tree and runs them from `create_weights` to the kernel's quantization config, in a
Python that has torch. What an expert then computes is worked out from that config, with
one number for a weight and one for a block scale, so that every factor is visible.
"""

import inspect
import json
import math
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.patch("dead-experts")
EXPERTS = 4
LAYER = "model.layers.3.mlp.experts"


def scenarios(tree: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run in another Python, so everything that it needs is inside."""
    import ast
    import functools
    import importlib
    import pathlib
    import sys
    import types

    torch: Any = importlib.import_module("torch")
    NS = types.SimpleNamespace
    layers = "vllm/model_executor/layers/"
    ct_file = (
        layers + "quantization/compressed_tensors/compressed_tensors_moe/"
        "compressed_tensors_moe_w4a4_nvfp4.py"
    )
    flags = importlib.import_module("__future__").annotations.compiler_flag

    @functools.cache
    def compiled(name: str, wanted: frozenset[str]) -> Any:
        """The whole module without its imports, or some definitions."""
        body = ast.parse((pathlib.Path(tree) / name).read_text(encoding="utf-8")).body
        if wanted:
            body = [node for node in body if getattr(node, "name", "") in wanted]
            assert len(body) == len(wanted), "the source has moved"
        else:
            imports = (ast.Import, ast.ImportFrom)
            body = [node for node in body if not isinstance(node, imports)]
        module = ast.Module(body=body, type_ignores=[])
        return compile(module, name, "exec", flags, dont_inherit=True)

    class Torch:
        """torch, but what `empty` gives is what memory can hold: anything."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def empty(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
            garbage = 1e30 if dtype == torch.float32 else 0
            return torch.empty(*args, dtype=dtype, **kwargs).fill_(garbage)

    fake_torch = Torch()

    def run(case: dict[str, Any]) -> dict[str, Any]:
        warnings: list[str] = []

        def warn(message: str, *args: Any) -> None:
            warnings.append(message % args)

        logger = NS(warning=warn, warning_once=warn, info_once=warn, debug_once=warn)
        enum = importlib.import_module("enum")
        oracle: dict[str, Any] = {
            "torch": fake_torch,
            "Enum": enum.Enum,
            "init_logger": lambda name: logger,
            "__name__": "oracle",
            "kE2M1ToFloat_handle": NS(val=torch.zeros(1)),
            "nvfp4_moe_quant_config": lambda **kwargs: kwargs,
            "nvfp4_w4a16_moe_quant_config": lambda **kwargs: kwargs,
            # Repacking is not at issue; the scales pass through.
            "prepare_nvfp4_moe_layer_for_marlin": lambda **kwargs: tuple(
                kwargs[f"{w}{part}"] for w in ("w13", "w2") for part in ("", "_scale", "_scale_2")
            ),
        }
        exec(compiled(layers + "fused_moe/oracle/nvfp4.py", frozenset()), oracle)
        backend = oracle["NvFp4MoeBackend"][case["backend"]]
        prepare: dict[str, Any] = {"torch": fake_torch, "swizzle_blockscale": lambda x: x}
        # From 0.28 on; before, the same is written out in the function.
        utils = layers + "quantization/utils/quant_utils.py"
        if "def amax_for_moe_activation_quant" in (pathlib.Path(tree) / utils).read_text():
            exec(compiled(utils, frozenset({"amax_for_moe_activation_quant"})), prepare)
        wanted = frozenset({"prepare_nvfp4_moe_layer_for_fi_or_cutlass", "reorder_w1w3_to_w3w1"})
        exec(compiled(layers + "quantization/utils/flashinfer_fp4_moe.py", wanted), prepare)
        oracle["prepare_nvfp4_moe_layer_for_fi_or_cutlass"] = prepare[
            "prepare_nvfp4_moe_layer_for_fi_or_cutlass"
        ]
        # It is imported from there.
        parts = ["vllm", "model_executor", "layers", "fused_moe", "oracle", "nvfp4"]
        for depth in range(1, len(parts) + 1):
            module = types.ModuleType(parts[depth - 1])
            if depth == len(parts):
                vars(module).update(oracle)
            sys.modules[".".join(parts[:depth])] = module

        fused = case["backend"] in ("FLASHINFER_CUTLASS", "VLLM_CUTLASS")

        def fuse(layer: Any) -> None:
            """What the CUTLASS and FlashInfer expert classes do in the end."""
            if fused:
                layer.w13_weight_scale_2.data.mul_(layer.w13_input_scale)
                layer.w2_weight_scale_2.data.mul_(layer.w2_input_scale)

        def parameter(data: Any, **kwargs: Any) -> Any:
            return torch.nn.Parameter(data, requires_grad=False)

        def replace(layer: Any, name: str, value: Any) -> None:
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))

        method_namespace: dict[str, Any] = {
            **{name: oracle[name] for name in oracle if name.endswith("nvfp4_backend")},
            "convert_to_nvfp4_moe_kernel_format": oracle["convert_to_nvfp4_moe_kernel_format"],
            "make_nvfp4_moe_quant_config": oracle["make_nvfp4_moe_quant_config"],
            "make_nvfp4_moe_kernel": lambda **kwargs: NS(
                fused_experts=NS(process_weights_after_loading=fuse)
            ),
            "torch": fake_torch,
            "logger": logger,
            "CompressedTensorsMoEMethod": object,
            "FusedMoEMethodBase": object,
            "FusedMoeWeightScaleSupported": enum.Enum("S", "GROUP TENSOR BLOCK"),
            "set_weight_attrs": lambda *args: None,
            "replace_parameter": replace,
            "ModelWeightParameter": parameter,
            "PerTensorScaleParameter": parameter,
        }
        inverse = case["method"] == "compressed-tensors"
        if inverse:
            name, source = "CompressedTensorsW4A4Nvfp4MoEMethod", ct_file
        else:
            name, source = "ModelOptNvFp4FusedMoE", layers + "quantization/modelopt.py"
        exec(compiled(source, frozenset({name})), method_namespace)
        method = object.__new__(method_namespace[name])
        method.group_size = 16
        method.moe = NS(is_act_and_mul=True)
        method.nvfp4_backend, method.experts_cls = backend, object
        method.use_global_sf = oracle["is_global_sf_supported_for_nvfp4_backend"](backend)
        method.quant_config = NS(group_size=16, is_checkpoint_nvfp4_serialized=True)

        class Layer:
            def __init__(self) -> None:
                self.layer_name = case["layer"]
                self.activation = NS(is_gated=True)
                self.moe_config = NS(moe_parallel_config=NS(enable_eplb=False))

            def register_parameter(self, name: str, value: Any) -> None:
                setattr(self, name, value)

            def _expert_routing_tables(self) -> None:
                return None

        layer = Layer()
        experts = len(case["w13"])
        method.create_weights(layer, experts, 16, 16, None, global_num_experts=experts)
        names = {
            "w13": "w13_weight_global_scale" if inverse else "w13_weight_scale_2",
            "w2": "w2_weight_global_scale" if inverse else "w2_weight_scale_2",
            "a13": "w13_input_global_scale" if inverse else "w13_input_scale",
            "a2": "w2_input_global_scale" if inverse else "w2_input_scale",
        }
        # Load. A scale of None is not in the checkpoint.
        layer.w13_weight_scale.fill_(2.0)
        layer.w2_weight_scale.fill_(2.0)
        for short, long in names.items():
            for expert, value in enumerate(case[short]):
                if value is not None:
                    getattr(layer, long)[expert] = float(value)
        try:
            method.process_weights_after_loading(layer)
        except ValueError as e:
            return {"error": str(e), "warnings": warnings}

        # What a kernel computes per expert, for inputs and weights of 1: quantize with
        # gscale, multiply, and scale back with alpha, which undoes gscale too.
        def expand(value: Any) -> Any:
            return value.float().expand(experts) if value.dim() == 0 else value.float()

        config = method.moe_quant_config
        out = {}
        for weight, n in (("w13", 1), ("w2", 2)):
            block = getattr(layer, f"{weight}_weight_scale").float().amax((1, 2))
            alpha = expand(config[f"g{n}_alphas"])
            if case["backend"] in ("MARLIN", "FLASHINFER_B12X"):
                out[weight] = (block * alpha).tolist()
                continue
            gscale = expand(config[f"a{n}_gscale"])
            if not fused:
                alpha = alpha / gscale
            out[weight] = (gscale * block * alpha).tolist()
            out[f"a{n}_gscale"] = gscale.tolist()
            out[f"alpha{n}"] = alpha.tolist()
        return {"error": None, "warnings": warnings, **out}

    return [run(case) for case in cases]


# --- cases ----------------------------------------------------------------------------

METHODS = ["compressed-tensors", "modelopt"]
# One activation scale for all experts, one each, the reference, and weight only.
BACKENDS = ("FLASHINFER_CUTLASS", "VLLM_CUTLASS", "EMULATION", "MARLIN", "FLASHINFER_B12X")
WEIGHT_ONLY = {"MARLIN", "FLASHINFER_B12X"}
each_path = pytest.mark.parametrize(("method", "backend"), list(product(METHODS, BACKENDS)))
SCALES = ("w13", "w2", "a13", "a2")
BAD: dict[str, float | None] = {
    "zero": 0.0,
    "nan": math.nan,
    "inf": math.inf,
    "missing": None,
}
DEAD = 2  # the expert
# Powers of two, so that inverses are exact. Expert 1 has the largest activations.
HEALTHY: dict[str, list[float]] = {
    "w13": [2.0**-6, 2.0**-5, 2.0**-7, 2.0**-6],
    "w2": [2.0**-4, 2.0**-6, 2.0**-5, 2.0**-7],
    "a13": [2.0**-3, 2.0**-1, 2.0**-2, 2.0**-4],
    "a2": [2.0**-2, 2.0**-1, 2.0**-5, 2.0**-3],
}


def case(method: str, backend: str, **changed: list[float | None]) -> dict[str, Any]:
    """Scales as a checkpoint has them; compressed-tensors stores the inverse."""
    stored: dict[str, Any] = {}
    for scale, values in HEALTHY.items():
        healthy = [1 / v if method == "compressed-tensors" else v for v in values]
        replaced = changed.get(scale)
        stored[scale] = (
            healthy
            if replaced is None
            else [h if isinstance(r, str) else r for h, r in zip(healthy, replaced, strict=True)]
        )
    return {"method": method, "backend": backend, "layer": LAYER, **stored}


def one_bad(bad: float | None) -> list[Any]:
    return [bad if expert == DEAD else "healthy" for expert in range(EXPERTS)]


def every(bad: float | None) -> list[Any]:
    return [bad] * EXPERTS


def build_cases() -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for method, backend in product(METHODS, BACKENDS):
        yield ("healthy", method, backend), case(method, backend)
        yield (
            ("no input scales", method, backend),
            case(method, backend, a13=every(None), a2=every(None)),
        )
        yield (
            # --load-format dummy fills scales with small numbers of either sign.
            ("negative", method, backend),
            case(method, backend, w13=[-1.0, 1.0, -2.0, 4.0], a13=[-1.0, 1.0, -2.0, 4.0]),
        )
        yield (
            ("dead between them", method, backend),
            case(
                method,
                backend,
                w13=[0.0, math.nan, "healthy", "healthy"],
                w2=["healthy", "healthy", math.inf, None],
            ),
        )
        for scale, (kind, bad) in product(SCALES, BAD.items()):
            yield (
                ("one", method, backend, scale, kind),
                case(method, backend, **{scale: one_bad(bad)}),
            )
            yield (
                ("all", method, backend, scale, kind),
                case(method, backend, **{scale: every(bad)}),
            )


CASES = dict(build_cases())


def run_in(python: Path, tree: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    program = (
        "from __future__ import annotations\nimport json, sys\nfrom typing import Any\n"
        f"{inspect.getsource(scenarios)}\n"
        "print(json.dumps(scenarios(sys.argv[1], json.load(sys.stdin))))\n"
    )
    done = subprocess.run(
        [python, "-c", program, tree],
        input=json.dumps(list(CASES.values())),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


Results = dict[tuple[str, ...], dict[str, Any]]


@pytest.fixture(scope="module")
def patched(torch_python: Path, patched_tree: Path) -> Results:
    return run_in(torch_python, patched_tree)


@pytest.fixture(scope="module")
def pristine(torch_python: Path, pristine_tree: Path) -> Results:
    return run_in(torch_python, pristine_tree)


def product_of(scale: str, expert: int) -> float:
    """Weight 1, block scale 2, input 1."""
    return 2.0 * HEALTHY[scale][expert]


def spoiled(seen: dict[str, Any], *, dead_weights: bool) -> list[str]:
    """The experts, and the GEMM, whose result is not what it should be."""
    found = []
    for weight in ("w13", "w2"):
        for expert, value in enumerate(seen[weight]):
            good = {product_of(weight, expert)}
            if dead_weights and expert == DEAD:
                good = {0.0}
            if value not in good:  # NaN is in no set
                found.append(f"{weight}[{expert}] = {value}")
    for name in ("a1_gscale", "a2_gscale", "alpha1", "alpha2"):
        for expert, value in enumerate(seen.get(name, [])):
            if not 0 < value < math.inf:
                found.append(f"{name}[{expert}] = {value}")
    return found


# --- tests ----------------------------------------------------------------------------


@each_path
def test_healthy_layers_are_left_alone(
    pristine: Results, patched: Results, method: str, backend: str
) -> None:
    for kind in ("healthy", "negative"):
        assert patched[kind, method, backend] == pristine[kind, method, backend]
    assert spoiled(patched["healthy", method, backend], dead_weights=False) == []


@each_path
@pytest.mark.parametrize("scale", SCALES)
def test_one_dead_expert(patched: Results, method: str, backend: str, scale: str) -> None:
    for kind in BAD:
        seen = patched["one", method, backend, scale, kind]
        assert seen["error"] is None
        assert spoiled(seen, dead_weights=scale.startswith("w")) == []
        warned = [w for w in seen["warnings"] if w.startswith(LAYER)]
        if scale.startswith("w"):
            (warning,) = warned
            assert f"1 of {EXPERTS} experts" in warning
            assert warning.endswith(f"nothing: [{DEAD}]")
        elif backend in WEIGHT_ONLY:
            assert warned == []
        else:
            (warning,) = warned
            count = 2 if scale == "a13" else 1  # one for w1, one for w3
            assert f": {count} of {count * EXPERTS} NVFP4 input scales of w{scale[1:]} " in warning


@pytest.mark.parametrize("method", METHODS)
def test_a_shared_scale_is_that_of_the_live(patched: Results, method: str) -> None:
    for kind in BAD:
        seen = patched["one", method, "FLASHINFER_CUTLASS", "a13", kind]
        assert seen["a1_gscale"] == [1 / max(HEALTHY["a13"])] * EXPERTS


@pytest.mark.parametrize("method", METHODS)
def test_an_expert_of_its_own_gets_the_largest(patched: Results, method: str) -> None:
    """Where experts have their own scale, the live ones keep theirs."""
    for kind in BAD:
        seen = patched["one", method, "VLLM_CUTLASS", "a13", kind]
        scales = [v if e != DEAD else max(HEALTHY["a13"]) for e, v in enumerate(HEALTHY["a13"])]
        assert seen["a1_gscale"] == [1 / scale for scale in scales]


@each_path
@pytest.mark.parametrize("scale", SCALES)
def test_a_dead_layer_fails(
    pristine: Results, patched: Results, method: str, backend: str, scale: str
) -> None:
    for kind in BAD:
        name = ("all", method, backend, scale, kind)
        assert pristine[name]["error"] is None
        error = patched[name]["error"]
        if scale.startswith("a") and backend in WEIGHT_ONLY:
            assert error is None  # no kernel of theirs looks at it
            continue
        assert error is not None
        assert error.startswith(f"{LAYER}: ")
        of_what = f"all {EXPERTS} experts" if scale.startswith("w") else f"scales of w{scale[1:]} "
        assert of_what in error


@each_path
def test_experts_dead_for_different_reasons(
    pristine: Results, patched: Results, method: str, backend: str
) -> None:
    """Two lack w13, the other two w2: none is left."""
    name = ("dead between them", method, backend)
    assert pristine[name]["error"] is None
    assert f"all {EXPERTS} experts" in patched[name]["error"]


@pytest.mark.parametrize(("method", "backend"), list(product(METHODS, sorted(WEIGHT_ONLY))))
def test_weight_only_checkpoints_need_no_input_scales(
    patched: Results, method: str, backend: str
) -> None:
    seen = patched["no input scales", method, backend]
    assert seen["error"] is None
    assert seen["warnings"] == []
    assert spoiled(seen, dead_weights=False) == []


# What one bad scale did before: (method, backend, scale, kind) -> experts spoiled.
EVERYONE, ITSELF = set(range(EXPERTS)), {DEAD}
BEFORE = {
    # Shared through `max`: one zero of compressed-tensors is an infinity for all.
    ("compressed-tensors", "FLASHINFER_CUTLASS", "a13", "zero"): EVERYONE,
    ("compressed-tensors", "FLASHINFER_CUTLASS", "a13", "nan"): EVERYONE,
    ("compressed-tensors", "FLASHINFER_CUTLASS", "a2", "zero"): EVERYONE,
    ("compressed-tensors", "EMULATION", "a2", "nan"): EVERYONE,
    ("compressed-tensors", "EMULATION", "a13", "zero"): EVERYONE,
    ("modelopt", "FLASHINFER_CUTLASS", "a13", "nan"): EVERYONE,
    ("modelopt", "FLASHINFER_CUTLASS", "a13", "inf"): EVERYONE,
    ("modelopt", "FLASHINFER_CUTLASS", "a2", "inf"): EVERYONE,
    ("modelopt", "EMULATION", "a13", "nan"): EVERYONE,
    # Of its own.
    ("compressed-tensors", "VLLM_CUTLASS", "a13", "zero"): ITSELF,
    ("compressed-tensors", "VLLM_CUTLASS", "w13", "zero"): ITSELF,
    ("compressed-tensors", "MARLIN", "w2", "zero"): ITSELF,
    ("compressed-tensors", "FLASHINFER_B12X", "w2", "nan"): ITSELF,
    ("modelopt", "VLLM_CUTLASS", "a13", "zero"): ITSELF,
    ("modelopt", "VLLM_CUTLASS", "a2", "nan"): ITSELF,
    ("modelopt", "VLLM_CUTLASS", "w13", "inf"): ITSELF,
    ("modelopt", "MARLIN", "w13", "nan"): ITSELF,
}


@pytest.mark.parametrize("name", BEFORE, ids="-".join)
def test_pristine_is_spoiled(pristine: Results, patched: Results, name: tuple[str, ...]) -> None:
    dead_weights = name[2].startswith("w")
    names = spoiled(pristine["one", *name], dead_weights=dead_weights)
    gemm = "w13" if name[2].endswith("13") else "w2"
    experts = {int(n.split("[")[1][0]) for n in names if n.startswith(f"{gemm}[")}
    assert experts == BEFORE[name]
    assert spoiled(patched["one", *name], dead_weights=dead_weights) == []


@pytest.mark.parametrize("scale", ["a13", "a2"])
def test_pristine_takes_the_largest_garbage(
    pristine: Results, patched: Results, scale: str
) -> None:
    """modelopt's scales came from `torch.empty`: one that is missing was anything."""
    gscale = f"a{'1' if scale == 'a13' else '2'}_gscale"
    name = ("one", "modelopt", "FLASHINFER_CUTLASS", scale, "missing")
    assert max(pristine[name][gscale]) < 1e-29
    assert min(patched[name][gscale]) == 1 / max(HEALTHY[scale])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", ["w13", "w2"])
def test_pristine_takes_garbage_weights(
    pristine: Results, patched: Results, method: str, scale: str
) -> None:
    name = ("one", method, "FLASHINFER_CUTLASS", scale, "missing")
    garbage = 2e30 if method == "modelopt" else 2e-30
    assert pristine[name][scale][DEAD] == pytest.approx(garbage)
    assert patched[name][scale][DEAD] == 0
