"""What verify-jit saw a node compile itself, kept for the manifest of a wheelhouse.

build/jit/<stack>/first-start.json, written by a whole run that passed; it counts for the patched
tree that it was made of and for no other.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sm121.files import write_atomic
from sm121.jit.report import Report

FILE = "first-start.json"


def first_start_file(build: Path, stack: str) -> Path:
    return build / "jit" / stack / FILE


def keep_first_start(report: Report, path: Path, *, patched_tree: str) -> None:
    """Write it, or remove what an earlier run left if this one did not pass."""
    if report.result != "pass":
        path.unlink(missing_ok=True)
        return
    data = {"patched_tree": patched_tree, "families": [asdict(f) for f in report.first_start]}
    write_atomic(path, json.dumps(data, indent=1) + "\n")


def read_first_start(path: Path, *, patched_tree: str) -> list[dict[str, Any]] | None:
    """The families, as report.FirstStart has them; None if there is none for this tree."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["patched_tree"] != patched_tree:
            return None
        families: list[dict[str, Any]] = data["families"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return families
