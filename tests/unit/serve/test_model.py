"""serve.toml: the real ones hold, and each bad value is refused with the path of its key."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from sm121.errors import PinsFault
from sm121.pins.load import stack_names
from sm121.serve.load import load_serve
from sm121.serve.model import Serve

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pins/0.26.0/serve.toml").read_text())


def load(tmp_path: Path, data: dict[str, Any]) -> Serve:
    (tmp_path / "1.2.3").mkdir()
    (tmp_path / "1.2.3/serve.toml").write_text(tomli_w.dumps(data))
    return load_serve(tmp_path, "1.2.3")


@pytest.mark.parametrize("stack", stack_names(ROOT / "pins"))
def test_every_stack_can_be_served_as_the_issue_asks(stack: str) -> None:
    serve = load_serve(ROOT / "pins", stack)
    flags, variables = serve.arguments.flags(), serve.environment.variables()
    assert flags["--distributed-executor-backend"] == "mp"
    assert flags["--nnodes"] == "2"
    assert flags["--kv-cache-dtype"] == "fp8_ds_mla"
    assert flags["--block-size"] == "256"
    assert flags["--gpu-memory-utilization"] == "0.87"
    assert flags["--speculative-config"] == '{"method": "dspark", "num_speculative_tokens": 5}'
    assert variables["VLLM_DSV4_SM120_JIT_ATTN"] == variables["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "NCCL_IB_GID_INDEX" not in variables
    assert "121.7" in serve.arguments.gpu_memory_utilization.reason


def put(path: str, value: object):
    def edit(data: dict[str, Any]) -> None:
        *folders, last = path.split("/")
        for name in folders:
            data = data.setdefault(name, {})
        data[last] = value

    return edit


WHY = "because it must be so"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (put("arguments/kv-cache-dtyp", {"value": "fp8", "reason": WHY}),
         "arguments.kv-cache-dtyp: unknown key; did you mean 'kv-cache-dtype'?"),
        (put("environment/VLLM_DSV4_SM120_JIT_ATTEN", {"value": "1", "reason": WHY}),
         "environment.VLLM_DSV4_SM120_JIT_ATTEN: unknown key; did you mean 'VLLM_DSV4_SM120_JIT_ATTN'?"),
        (put("servise", {}), "servise: unknown key; did you mean 'service'?"),
        (put("arguments/block-size/reson", "x"),
         "arguments.block-size.reson: unknown key; did you mean 'reason'?"),
        (put("arguments/speculative-config/value/num-speculative-token", 3),
         "arguments.speculative-config.value.num-speculative-token: unknown key; did you mean 'num-speculative-tokens'?"),
        (put("arguments/gpu-memory-utilization/value", 1.2), "arguments.gpu-memory-utilization.value: "),
        (put("arguments/gpu-memory-utilization/value", "0.87"), "arguments.gpu-memory-utilization.value: "),
        (put("arguments/block-size/value", 100), "arguments.block-size.value: "),
        (put("arguments/nnodes/value", 3), "arguments.nnodes.value: "),
        (put("arguments/kv-cache-dtype/value", "auto"), "arguments.kv-cache-dtype.value: "),
        (put("arguments/master-port/value", 80), "arguments.master-port.value: "),
        (put("arguments/master-port/value", 65535), "master-port.value: the port after it"),
        (put("arguments/tensor-parallel-size/value", 3), "tensor-parallel-size.value: 3 ranks do not divide"),
        (put("arguments/speculative-config/value/method", "mtp"), "arguments.speculative-config.value.method: "),
        (put("arguments/block-size/reason", ""), "arguments.block-size.reason: "),
        (put("environment/VLLM_USE_V2_MODEL_RUNNER/value", "yes"), "environment.VLLM_USE_V2_MODEL_RUNNER.value: "),
        (put("environment/NCCL_IB_GID_INDEX", {"value": "3", "reason": WHY}),
         "environment: NCCL_IB_GID_INDEX: is looked up on the node at each start"),
        (put("environment/GLOO_SOCKET_IFNAME/value", "@interfce@"), "environment.GLOO_SOCKET_IFNAME.value: @interfce@ is none of"),
        (put("environment/CUDA_HOME/value", "/usr\nEVIL=1"), "environment.CUDA_HOME.value: must be printable"),
        (put("service/restart-seconds/value", 0), "service.restart-seconds.value: "),
        (lambda d: d["arguments"].pop("master-port"), "arguments.master-port: missing"),
        (lambda d: d["environment"]["PATH"].pop("reason"), "environment.PATH.reason: missing"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_their_path(
    tmp_path: Path, real: dict[str, Any], edit, said: str
) -> None:
    data = copy.deepcopy(real)
    edit(data)
    with pytest.raises(PinsFault) as caught:
        load(tmp_path, data)
    assert len(caught.value.details) == 1, caught.value.details
    assert said in caught.value.details[0]
    assert "serve.toml" in caught.value.what


def test_a_stack_without_one(tmp_path: Path) -> None:
    with pytest.raises(PinsFault, match=r"no serve\.toml"):
        load_serve(tmp_path, "1.2.3")
