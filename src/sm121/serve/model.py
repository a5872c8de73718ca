"""The types of serve.toml: vLLM's flags and the environment that a stack needs, each with a reason.

Which flags and variables there are is fixed here, so that a misspelt one is refused with the
nearest known; tests/integration/serve/test_tree.py looks each of them up in the release's source.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    model_validator,
)

from sm121.pins.model import Model

Value = TypeVar("Value")

# What a value of [environment] may take from the nodes' file and the release, as @name@.
PLACEHOLDERS = {
    "root": "folder of the releases",
    "address": "this node's IPv4 address on the link",
    "interface": "this node's network interface of the link",
    "hca": "this node's RDMA devices, with commas between",
    "cuda-home": "the CUDA toolkit on the nodes",
}
_PLACEHOLDER = re.compile(r"@([^@]*)@")


def _text(value: str) -> str:
    if not value or not value.isprintable() or not value.isascii():
        raise ValueError("must be printable ASCII on one line, and not empty")
    for name in _PLACEHOLDER.findall(value):
        if name not in PLACEHOLDERS:
            raise ValueError(f"@{name}@ is none of {', '.join(f'@{n}@' for n in PLACEHOLDERS)}")
    return value


Text = Annotated[str, AfterValidator(_text)]
Reason = Annotated[str, Field(min_length=10)]
Port = Annotated[StrictInt, Field(ge=1024, le=65535)]
Seconds = Annotated[StrictInt, Field(ge=1, le=86400)]
Switch = Literal["0", "1"]


class Setting(Model, Generic[Value]):
    """One value and why it is that one."""

    value: Value
    reason: Reason


class Speculative(Model):
    """vLLM's --speculative-config."""

    method: Literal["dspark"]
    num_speculative_tokens: Annotated[StrictInt, Field(ge=1, le=16)]

    def as_argument(self) -> str:
        """The JSON that the flag takes; its keys are vLLM's, with underscores."""
        return json.dumps(self.model_dump())


class Arguments(Model):
    """Flags of `vllm serve` for both nodes; a key is the flag without its dashes."""

    tensor_parallel_size: Setting[Annotated[StrictInt, Field(ge=2)]]
    distributed_executor_backend: Setting[Literal["mp"]]
    nnodes: Setting[Literal[2]]
    master_port: Setting[Port]
    distributed_timeout_seconds: Setting[Seconds]
    kv_cache_dtype: Setting[Literal["fp8_ds_mla", "fp8"]]
    block_size: Setting[Annotated[StrictInt, Field(ge=64, multiple_of=64)]]
    gpu_memory_utilization: Setting[Annotated[StrictFloat, Field(gt=0.1, lt=1)]]
    speculative_config: Setting[Speculative]

    @model_validator(mode="after")
    def _consistent(self) -> Arguments:
        size, nodes = self.tensor_parallel_size.value, self.nnodes.value
        if size % nodes:
            raise ValueError(
                f"tensor-parallel-size.value: {size} ranks do not divide by {nodes} nodes"
            )
        if self.master_port.value == 65535:
            raise ValueError("master-port.value: the port after it is the start helper's own")
        return self

    def flags(self) -> dict[str, str]:
        """Flag and value as they stand on the command line, in this order."""
        found = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name).value
            text = value.as_argument() if isinstance(value, Speculative) else str(value)
            found[f"--{field.alias}"] = text
        return found


class Environment(BaseModel):
    """Variables of the service on each node, by their own names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    VLLM_HOST_IP: Setting[Text]
    NCCL_SOCKET_IFNAME: Setting[Text]
    GLOO_SOCKET_IFNAME: Setting[Text]
    NCCL_IB_HCA: Setting[Text]
    VLLM_DSV4_SM120_JIT_ATTN: Setting[Switch]
    VLLM_USE_V2_MODEL_RUNNER: Setting[Switch]
    VLLM_CACHE_ROOT: Setting[Text]
    DG_JIT_USE_NVRTC: Setting[Switch]
    DG_JIT_NVCC_COMPILER: Setting[Text]
    DG_JIT_CACHE_DIR: Setting[Text]
    CUDA_HOME: Setting[Text]
    FLASHINFER_WORKSPACE_BASE: Setting[Text]
    MAX_JOBS: Setting[Annotated[str, Field(pattern=r"^[1-9][0-9]?$")]]
    PATH: Setting[Text]
    HF_HUB_OFFLINE: Setting[Switch]
    PYTHONSAFEPATH: Setting[Literal["1"]]
    TRITON_PTXAS_BLACKWELL_PATH: Setting[Text] | None = None

    @model_validator(mode="before")
    @classmethod
    def _looked_up(cls, data: object) -> object:
        if isinstance(data, dict) and "NCCL_IB_GID_INDEX" in data:
            raise ValueError(
                "NCCL_IB_GID_INDEX: is looked up on the node at each start, since it changes with "
                "the order in which the interface gets its addresses"
            )
        return data

    def variables(self) -> dict[str, str]:
        """Name and value, placeholders and all, in this order."""
        settings = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: str(setting.value) for name, setting in settings.items() if setting}


class Service(Model):
    """Times of the systemd units and of the start helper."""

    restart_seconds: Setting[Seconds]
    stop_seconds: Setting[Seconds]
    lost_peer_seconds: Setting[Annotated[StrictInt, Field(ge=3, le=600)]]


class Serve(Model):
    """One serve.toml."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    arguments: Arguments
    environment: Environment
    service: Service
