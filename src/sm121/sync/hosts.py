"""Which nodes, and how ssh reaches them. Host keys are always checked."""

from __future__ import annotations

import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

from sm121.errors import UsageFault

HERE = "here"
# No leading '-' (ssh would take it for an option), no spaces, quotes or colons in front of a path.
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%\w+)?)")  # fmt: skip
_ROOT = re.compile(r"(?:/[A-Za-z0-9_+][A-Za-z0-9._+-]*)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How ssh goes. interface, address: of this machine, to go out by (the direct link).

    alive_s: seconds between the questions whether the other side still answers; after three
    without an answer the link counts as cut.
    """

    interface: str | None = None
    address: str | None = None
    identity: Path | None = None
    config: Path | None = None
    alive_s: int = 4

    def ssh(self) -> list[str]:
        """ssh and its options. No password is asked for, no unknown key taken, nothing forwarded."""
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "UpdateHostKeys": "no",
            "ConnectTimeout": "10",
            "ServerAliveInterval": str(self.alive_s),
            "ServerAliveCountMax": "3",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "ClearAllForwardings": "yes",
            # Wheels are compressed. A cipher that CPUs have instructions for comes first.
            "Compression": "no",
            "Ciphers": "^aes128-gcm@openssh.com,aes256-gcm@openssh.com",
            # A shared connection would put all streams through one cipher.
            "ControlMaster": "no",
            "ControlPath": "none",
            "LogLevel": "ERROR",
        }
        if self.interface:
            options["BindInterface"] = self.interface
        if self.address:
            options["BindAddress"] = self.address
        argv = ["ssh", "-T"]
        if self.config:
            argv += ["-F", str(self.config)]
        if self.identity:
            argv += ["-i", str(self.identity)]
            options["IdentitiesOnly"] = "yes"
        return [*argv, *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node by the name that the user gave it; `here` is this machine, without ssh."""

    name: str
    way: Way
    root: str

    @property
    def here(self) -> bool:
        return self.name == HERE

    def command(self, *words: str) -> list[str]:
        """Run a program there; its words are quoted for the shell that sshd starts."""
        if self.here:
            return list(words)
        return [*self.way.ssh(), self.name, shlex.join(words)]

    def rsync(self, folder: str) -> tuple[list[str], str]:
        """(options, destination) of rsync for a folder below the root."""
        place = f"{self.root}/{folder}/"
        if self.here:
            return [], place
        user, at, host = self.name.rpartition("@")
        bracketed = f"[{host}]" if ":" in host else host
        return ["-e", shlex.join(self.way.ssh())], f"{user}{at}{bracketed}:{place}"


def nodes_of(names: list[str], *, way: Way, root: str) -> list[Node]:
    """Raises UsageFault for names that are no hosts, a name twice, or a root that is none."""
    if not _ROOT.fullmatch(root):
        raise UsageFault(
            f"--root {root!r} is not a folder that a node can have.",
            cause="an absolute path of letters, digits and . _ + - is, without '..' or hidden folders",
        )  # fmt: skip
    for name in names:
        if not _HOST.fullmatch(name):
            raise UsageFault(
                f"{name!r} is no host.",
                remedy=f"Give HOST or USER@HOST, as ssh takes it, or `{HERE}` for this machine.",
            )
    if len(set(names)) != len(names):
        raise UsageFault("A node is named twice.", cause=" ".join(names))
    return [Node(name=name, way=way, root=root) for name in names]


def has_address(address: str) -> bool:
    """Is it one of this machine's (IPv4)?"""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
