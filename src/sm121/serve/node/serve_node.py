"""A node of two, as serve.env describes it, and what its sysfs and /proc say of the link.

Used by serve_check.py and serve_start.py beside it. Standard library only.
"""

# A copy of this file goes into every wheelhouse, so it must not import sm121, and it prints by
# itself. It needs Python 3.9 or later.
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any


class Refused(Exception):
    """vLLM can't start here as it is: what, and what to do about it."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


def say(text: str) -> None:
    print(text, flush=True)


def guarded(run: Callable[[Node], int], system: Path = Path("/")) -> int:
    """Run with this process's node; a refusal is said, and is status 3."""
    try:
        return run(Node(os.environ, system))
    except Refused as refused:
        tell(refused)
        return 3


def tell(refused: Refused) -> None:
    say("refused: {}".format(refused))
    if refused.remedy:
        say("   next: {}".format(refused.remedy))


class Node:
    """What serve.env says of this node and the other one. system: root of /proc and /sys."""

    def __init__(self, environment: Any, system: Path) -> None:
        try:
            self.role = environment["SM121_ROLE"]
            self.root = Path(environment["SM121_ROOT"])
            self.model = Path(environment["SM121_MODEL"])
            self.interface = environment["SM121_INTERFACE"]
            self.address = environment["SM121_ADDRESS"]
            self.peer = environment["SM121_PEER"]
            self.hcas = [name for name in environment["SM121_HCA"].split(",") if name]
            self.port = int(environment["SM121_MASTER_PORT"])
            self.memory = float(environment["SM121_MEMORY"])
            self.stop_seconds = float(environment["SM121_STOP_SECONDS"])
            self.lost_seconds = float(environment["SM121_LOST_PEER_SECONDS"])
        except (KeyError, ValueError) as error:
            raise Refused(
                "the environment is not that of serve.env: {}".format(error),
                "run it by the unit, or `set -a; . <root>/current/serve/serve.env` first",
            ) from error
        self.environment = environment
        self.proc, self.sys = system / "proc", system / "sys"


def gid_table(sys_folder: Path, hca: str) -> Iterator[tuple[int, str, str, str]]:
    """Index, type, interface and address of each GID of a port ('rocep1s0f0' or 'rocep1s0f0:1').

    Kernel: Documentation/ABI/stable/sysfs-class-infiniband. An unset entry reads as EINVAL.
    """
    device, _, number = hca.partition(":")
    port = sys_folder / "class/infiniband" / device / "ports" / (number or "1")
    if not port.is_dir():
        base = port.parents[2]
        have = sorted(p.name for p in base.iterdir()) if base.is_dir() else []
        raise Refused(
            "there is no RDMA device {}; there are: {}".format(hca, ", ".join(have) or "none"),
            "correct hca in the nodes' file and render it again",
        )
    state = (port / "state").read_text().strip()
    if not state.endswith("ACTIVE"):
        raise Refused(
            "{} is not active: {}".format(hca, state), "look at the cable and the interface"
        )
    for entry in sorted((port / "gids").iterdir(), key=lambda p: int(p.name)):
        try:
            address = IPv6Address(entry.read_text().strip())
            kind = (port / "gid_attrs/types" / entry.name).read_text().strip()
            ndev = (port / "gid_attrs/ndevs" / entry.name).read_text().strip()
        except (OSError, ValueError):
            continue
        yield int(entry.name), kind, ndev, str(address.ipv4_mapped or address)


def gid_index(node: Node) -> int:
    """NCCL_IB_GID_INDEX: of RoCE v2 with the link's IPv4, the same on every device.

    NCCL takes one index for all devices. Devices of other interfaces have other addresses.
    """
    chosen: dict[str, int] = {}
    own = False
    for hca in node.hcas:
        table = list(gid_table(node.sys, hca))
        routable = [(i, ndev, a) for i, kind, ndev, a in table if kind == "RoCE v2" and "." in a]
        if any(ndev == node.interface for _, _, ndev, _ in table):
            fitting = [i for i, *rest in routable if rest == [node.interface, node.address]]
            own = True
        else:
            fitting = [i for i, _, _ in routable] if len(node.hcas) > 1 else []
        if not fitting:
            raise Refused(
                "{} has no RoCE v2 GID with {} of {}; it has: {}".format(
                    hca, node.address, node.interface,
                    "; ".join("{} {} {} {}".format(*row) for row in table if row[3] != "::") or "none",
                ),
                "give the address to the device's own interface (`rdma link` names it)",
            )  # fmt: skip
        chosen[hca] = fitting[0]
    if not own:
        raise Refused(
            "none of {} belongs to {}".format(", ".join(node.hcas), node.interface),
            "correct hca or interface in the nodes' file (`rdma link` shows both)",
        )
    if len(set(chosen.values())) != 1:
        raise Refused(
            "the devices have the address at different GID indices: {}".format(
                ", ".join("{} {}".format(*item) for item in chosen.items())
            ),
            "NCCL takes one index for all: name one device in the nodes' file, or give the "
            "interfaces their addresses in the same order",
        )
    return next(iter(chosen.values()))


def rendezvous(node: Node) -> bool:
    """Is there an established connection between the ranks' store and the other node?

    The store (torch.distributed.TCPStore) listens on the head's master port; its clients stay
    connected as long as the group lives. /proc/net/tcp: proc(5).
    """
    for name in ("net/tcp", "net/tcp6"):
        try:
            lines = (node.proc / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] != "01":
                continue
            (_, local_port), (remote, remote_port) = end_of(fields[1]), end_of(fields[2])
            port = local_port if node.role == "head" else remote_port
            if port == node.port and str(remote) == node.peer:
                return True
    return False


def end_of(text: str) -> tuple[Any, int]:
    """'0B01A8C0:733D' as address and port; words are in the machine's byte order."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    packed = b"".join(words if sys.byteorder == "little" else [w[::-1] for w in words])
    address = ip_address(packed)
    mapped: IPv4Address | None = getattr(address, "ipv4_mapped", None)
    return mapped or address, int(port, 16)
