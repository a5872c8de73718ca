"""Which node is head and which is worker, and the files by which each of them serves."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from sm121.errors import UsageFault
from sm121.files import remove_tree, write_atomic
from sm121.serve.load import load_carried
from sm121.serve.nodes import ROLES, Nodes
from sm121.serve.render import render
from sm121.sync.hosts import HERE, Node


def roles_of(nodes: Sequence[Node], file: Nodes) -> dict[str, str]:
    """A host as it was named → `head` or `worker`, by the names in the nodes' file.

    `here` is the node of this machine's name; else, beside one other host, the one that is left.
    Raises UsageFault for a host that is neither, and for two that are the same one.
    """
    names = {file.head.name: ROLES[0], file.worker.name: ROLES[1]}
    roles = {node.name: names.get(_host(node), "") for node in nodes}
    if not roles.get(HERE, "taken"):
        left = [role for role in ROLES if role not in roles.values()]
        roles[HERE] = left[0] if len(roles) == len(names) and len(left) == 1 else ""
    unknown = [name for name, role in roles.items() if not role]
    if unknown:
        raise UsageFault(
            f"{unknown[0]}: the nodes' file does not say what this node is.",
            cause=f"head is {file.head.name}, worker is {file.worker.name}",
            remedy="Name the host as in the file, or correct its `name` there.",
        )
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
    files = {}
    for rank, role in enumerate(ROLES):
        for name, text in render(serve, file, rank, stack=stack).files.items():
            files[f"{role}/{name}"] = folder / role / name
            write_atomic(folder / role / name, text)
    return files


def _host(node: Node) -> str:
    return platform.node() if node.name == HERE else node.name.rpartition("@")[2]
