"""A small valid stack, as the data that stack.toml would hold."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

SHA256 = "a" * 64
COMMIT = "c" * 40

_MINIMAL: dict[str, Any] = {
    "schema": 1,
    "lock-date": datetime(2026, 1, 1, tzinfo=UTC),
    "vllm": {
        "version": "1.2.3",
        "git": "https://example.invalid/vllm.git",
        "tag": "v1.2.3",
        "commit": COMMIT,
        "date": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "sdist-sha256": SHA256,
    },
    "cuda": {
        "version": "13.0",
        "arch": "12.1a",
        "accepted-archs": ["12.1a"],
        "toolkit": {"nvidia-cuda-nvcc": "13.0.88"},
    },
    "targets": {
        "linux-aarch64": {"glibc": "2.39", "pythons": ["3.12", "3.11"]},
        "linux-x86_64": {"glibc": "2.36", "pythons": ["3.12", "3.11"]},
    },
    "family": {
        "torch": {"version": "2.11.0", "reason": "needed"},
        "nvidia-cutlass-dsl": {"version": "4.5.1", "reason": "needed", "extras": ["cu13"]},
    },
    "overrides": {"torch": "says who"},
    "host": {"requirements": ["ninja"]},
    "sources": {
        "cutlass": {
            "git": "https://example.invalid/cutlass.git",
            "ref": "v4.4.2",
            "env": "VLLM_CUTLASS_SRC_DIR",
            "upstream-file": "CMakeLists.txt",
            "upstream-repository": "nvidia/cutlass",
            "wheels": [
                {
                    "filename": "flashinfer_python-0.6.8-py3-none-any.whl",
                    "sha256": SHA256,
                    "subtrees": {"include": "flashinfer/data/cutlass/include"},
                }
            ],
        }
    },
    "components": {"spinloop": "busy-wait", "fs_io_C": "files", "_fa3": "FA3"},
    "left-out": {"_fa3": "for sm_90"},
    "profiles": {
        "smoke": {
            "summary": "small",
            "components": ["spinloop"],
            "memory-per-job-gib": 1.5,
            "sources": ["cutlass"],
        }
    },
}


def minimal() -> dict[str, Any]:
    """A fresh copy to alter."""
    return copy.deepcopy(_MINIMAL)


def write_stack(pins: Path, data: dict[str, Any], name: str = "1.2.3") -> Path:
    """Write it as pins/<name>/stack.toml; returns that file."""
    folder = pins / name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "stack.toml"
    file.write_text(tomli_w.dumps(data), encoding="utf-8")
    return file
