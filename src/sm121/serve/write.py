"""Put what is rendered into a folder: <folder>/head/… and <folder>/worker/…, as a release has it."""

from __future__ import annotations

from pathlib import Path

from sm121.files import write_atomic
from sm121.serve.model import Serve
from sm121.serve.nodes import ROLES, Nodes
from sm121.serve.render import render


def write_both(serve: Serve, nodes: Nodes, folder: Path, *, stack: str) -> dict[str, Path]:
    """Render for both nodes; returns name in a release (`head/serve.env`) → file. Raises PinsFault."""
    written = {}
    for rank, role in enumerate(ROLES):
        for name, text in render(serve, nodes, rank, stack=stack).files.items():
            written[f"{role}/{name}"] = folder / role / name
            write_atomic(folder / role / name, text)
    return written
