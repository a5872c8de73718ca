"""Two example nodes, as the data that nodes.toml would hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import tomli_w

_TWO: dict[str, Any] = {
    "schema": 1,
    "root": "/opt/sm121",
    "user": "sm121",
    "model": "/srv/models/DeepSeek-V4-Flash",
    "head": {
        "name": "spark-a",
        "address": "192.168.177.11",
        "interface": "enp1s0f0np0",
        "hca": ["rocep1s0f0"],
    },
    "worker": {
        "name": "spark-b",
        "address": "192.168.177.12",
        "interface": "enP2p1s0f1np1",
        "hca": ["roceP2p1s0f1"],
    },
}


def two_nodes() -> dict[str, Any]:
    """A fresh copy to alter."""
    return copy.deepcopy(_TWO)


def write_nodes(file: Path, data: dict[str, Any]) -> Path:
    file.write_text(tomli_w.dumps(data), encoding="utf-8")
    return file
