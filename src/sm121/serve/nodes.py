"""The user's file of two nodes: what sm121 can't know. Read by `serve`, `sync` and `acceptance`."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictFloat, StrictInt, model_validator

from sm121.pins.load import read_model
from sm121.pins.model import Model

_REMEDY = "Correct it; docs/serve.md lists every key."


def _path(value: str) -> str:
    # These go into units and scripts, and % and $ mean something to systemd.
    if not re.fullmatch(r"/[A-Za-z0-9._+/-]+", value) or ".." in value.split("/"):
        raise ValueError("must be an absolute path of letters, digits and . _ + / -")
    return value.rstrip("/")


def _address(value: str) -> str:
    try:
        address = ip_address(value)
    except ValueError as error:
        raise ValueError("is not an IP address") from error
    if not isinstance(address, IPv4Address):
        raise ValueError("must be IPv4: the RoCE v2 GID is looked up by it")
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        raise ValueError("must be the node's own address on the link")
    return value


def _argument(value: str) -> str:
    if not value or not value.isprintable() or not value.isascii():
        raise ValueError("must be printable ASCII on one line, and not empty")
    return value


AbsolutePath = Annotated[str, AfterValidator(_path)]
Address = Annotated[str, AfterValidator(_address)]
Argument = Annotated[str, AfterValidator(_argument)]
# Linux: IFNAMSIZ is 16 with the final zero.
Interface = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$")]
Hca = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_]*(:[0-9]+)?$")]
HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?$")]
User = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]

ROLES: tuple[Literal["head"], Literal["worker"]] = ("head", "worker")


class Node(Model):
    """One node. name: its host name, as ssh knows it. address, interface: of the direct link.

    hca: its RDMA devices (ls /sys/class/infiniband); none means NCCL over TCP.
    """

    name: HostName
    address: Address
    interface: Interface
    hca: tuple[Hca, ...]


class Api(Model):
    """Where the head answers requests. name: what clients call the model."""

    host: str = "127.0.0.1"
    port: Annotated[StrictInt, Field(ge=1, le=65535)] = 8000
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] = "deepseek-v4-flash"

    @model_validator(mode="after")
    def _host(self) -> Api:
        try:
            ip_address(self.host)
        except ValueError as error:
            raise ValueError(f"host: {self.host!r} is not an IP address") from error
        return self


class Nodes(Model):
    """The whole file.

    root: where releases lie, on both nodes. user: whom the service runs as. model: its folder, on
    both nodes. gpu_memory_utilization: instead of the stack's. arguments: more of `vllm serve`'s,
    for both nodes.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")]
    root: AbsolutePath
    user: User
    model: AbsolutePath
    cuda_home: AbsolutePath = "/usr/local/cuda"
    gpu_memory_utilization: Annotated[StrictFloat, Field(gt=0.1, lt=1)] | None = None
    arguments: tuple[Argument, ...] = ()
    api: Api = Api()
    head: Node
    worker: Node

    @model_validator(mode="after")
    def _two(self) -> Nodes:
        for key in ("name", "address"):
            if getattr(self.head, key) == getattr(self.worker, key):
                raise ValueError(f"worker.{key}: is the head's, too")
        if self.user == "root":
            raise ValueError("user: a service that answers requests must not run as root")
        if bool(self.head.hca) != bool(self.worker.hca):
            raise ValueError("worker.hca: one node has RDMA devices and the other has none")
        return self

    def of_rank(self, rank: int) -> tuple[Node, Node]:
        """The node of a rank, and its peer. Rank 0 is the head."""
        return (self.head, self.worker) if rank == 0 else (self.worker, self.head)


def load_nodes(path: Path) -> Nodes:
    """Read nodes.toml. Raises PinsFault with every fault and its dotted path."""
    return read_model(path, Nodes, remedy=_REMEDY)
