"""Which node is head and which is worker, and the files by which each of them serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sm121.errors import UsageFault
from sm121.files import remove_tree
from sm121.serve.load import load_carried
from sm121.serve.nodes import ROLES, Nodes
from sm121.serve.write import write_both
from sm121.sync.hosts import HERE, Node, has_address


def roles_of(nodes: Sequence[Node], file: Nodes) -> dict[str, str]:
    """A host as it was named → `head` or `worker`. `here` is the one whose address this machine has.

    Raises UsageFault for a host that is neither, and for two that are the same one.
    """
    roles = {}
    for node in nodes:
        host = node.name.rpartition("@")[2]
        for role, one in zip(ROLES, (file.head, file.worker), strict=True):
            if host == one.name or (node.name == HERE and has_address(one.address)):
                roles[node.name] = role
        if node.name not in roles:
            raise UsageFault(
                f"{node.name}: the nodes' file does not say what this node is.",
                cause=f"head is {file.head.name} ({file.head.address}), worker is {file.worker.name} ({file.worker.address})",
                remedy=f"Name a host as in the file; `{HERE}` is known by its address.",
            )  # fmt: skip
    if len(set(roles.values())) != len(roles):
        raise UsageFault(f"{' and '.join(roles)} are the same node of the nodes' file.")
    return roles


def write_serving(wheelhouse: Path, file: Nodes, *, stack: str, folder: Path) -> dict[str, Path]:
    """Render what both roles need, out of what the wheelhouse carries, into an empty folder.

    Returns name in the release (`head/serve.env`, …) → file. Raises PinsFault: no serve.toml in
    the wheelhouse, or faults in it.
    """
    serve = load_carried(wheelhouse)
    remove_tree(folder)
    return write_both(serve, file, folder, stack=stack)
