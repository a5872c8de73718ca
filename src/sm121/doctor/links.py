"""The links to other nodes: MTU, speed, and whether RoCE is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sm121.doctor.facts import links
from sm121.doctor.model import Check, Level

if TYPE_CHECKING:
    from sm121.doctor.machine import Machine

MTU = 9000


def check_links(machine: Machine) -> Iterator[Check]:
    """Interfaces with an RDMA port, which two nodes talk through; without one, NCCL uses TCP."""
    found = links(machine.root)
    ports = [link for link in found if link["rdma"]]
    level: Level = "ok"
    cause = remedy = ""
    if not ports:
        level = "warning"
        cause = "between two nodes NCCL would go over TCP, which is several times slower"
        remedy = "On a Spark: look at `rdma link` and the ConnectX-7 ports; one node alone needs none."  # fmt: skip
    elif not any(active(link) for link in ports):
        level, cause = "warning", "no RDMA port is active with RoCE"
        remedy = "Plug the cable between the nodes, set the interface up and give it an address."
    elif low := [link["name"] for link in ports if active(link) and (link["mtu"] or 0) < MTU]:
        level, cause = "warning", f"{', '.join(low)}: an MTU below {MTU} makes small packets of large messages"  # fmt: skip
        remedy = f"`ip link set {low[0]} mtu {MTU}` on both nodes, and in netplan to keep it."
    yield Check(
        name="links", build="not needed", run=level, cause=cause, remedy=remedy,
        found="; ".join(map(describe, ports)) or f"no RDMA port on {len(found)} interface(s)",
    )  # fmt: skip


def active(link: dict[str, Any]) -> bool:
    """Is there a RoCE port on it that works?"""
    return link["rdma_state"] == "ACTIVE" and bool(link["roce"])


def describe(link: dict[str, Any]) -> str:
    """One line of a link, for a person."""
    speed = f"{link['speed'] / 1000:g} Gb/s" if link["speed"] else "no speed"
    rdma = f", {link['rdma']} {link['rdma_state'] or '?'} {'/'.join(link['roce']) or 'no RoCE'}" if link["rdma"] else ""  # fmt: skip
    return f"{link['name']} {link['state'] or '?'}, MTU {link['mtu']}, {speed}{rdma}"
