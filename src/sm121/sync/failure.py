"""What a failed ssh or rsync means, by its own words."""

from __future__ import annotations

from collections.abc import Sequence

from sm121.errors import (
    DiskFull,
    EnvironmentFault,
    HostKeyFault,
    NetworkFault,
    Sm121Error,
    ToolFailed,
)  # fmt: skip
from sm121.sync.hosts import Node

_RERUN = "Run the same command again: it goes on from what has arrived. `current` is as it was."
_LOST = ("timed out", "not responding", "closed by", "Connection reset", "Broken pipe", "lost connection",
         "Connection refused", "No route to host", "Could not resolve", "Network is unreachable",
         "connection unexpectedly closed", "Cannot assign requested address")  # fmt: skip


def explain(node: Node, code: int, lines: Sequence[str], *, doing: str) -> Sm121Error:
    """The error for a program (ssh or rsync) that ended with `code` having said `lines`."""
    text = "\n".join(lines)
    said = [line for line in lines if line.strip()][-8:]
    host = node.name.rpartition("@")[2]
    if "Host key verification failed" in text or "IDENTIFICATION HAS CHANGED" in text:
        changed = "HAS CHANGED" in text
        return HostKeyFault(
            f"The host key of {node.name} is not the known one; nothing was sent."
            if changed else f"The host key of {node.name} is not known; nothing was sent.",
            cause="another machine answers there, or it was installed anew" if changed
            else "sm121 takes no key on trust",
            remedy=f"Compare `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` at the node with what `ssh {node.name}` shows, "
            + (f"then `ssh-keygen -R {host}` and accept it there." if changed else "and accept it there once."),
            details=said,
        )  # fmt: skip
    if "No space left on device" in text:
        return DiskFull(f"{node.name}: No space left on this node.", cause=f"while {doing}", details=said,
                        remedy=f"Free some space there below {node.root}. {_RERUN}")  # fmt: skip
    if "Permission denied (" in text:
        return EnvironmentFault(
            f"{node.name} does not let this user in.", cause=said[-1] if said else "",
            remedy="Put your public key into ~/.ssh/authorized_keys there (ssh-copy-id), or give "
            "--identity FILE. sm121 asks for no password.",
        )  # fmt: skip
    if "sm121: the node's python3" in text:
        return EnvironmentFault(f"{node.name}: {said[-1].removeprefix('sm121: ')}.",
                                remedy="There: sudo apt-get install -y python3.12")  # fmt: skip
    if code == 127 or "command not found" in text:
        return EnvironmentFault(
            f"{node.name} lacks a program that sync needs.", details=said,
            remedy="There: sudo apt-get install -y rsync python3",
        )  # fmt: skip
    if any(word in text for word in _LOST) or code in (10, 12, 30, 35, 255):
        return NetworkFault(f"The link to {node.name} broke while {doing}.", cause=said[-1] if said else f"exit status {code}",
                            details=said[:-1], remedy=_RERUN)  # fmt: skip
    if code < 0 or code in (19, 20, 137, 143):
        return NetworkFault(f"The transfer to {node.name} was ended from outside while {doing}.",
                            cause=said[-1] if said else f"signal {-code}", details=said[:-1], remedy=_RERUN)  # fmt: skip
    return ToolFailed(f"{node.name}: a program failed with exit status {code} while {doing}.",
                      returncode=code, tail=said, remedy=_RERUN)  # fmt: skip
