"""The patches' kernels on a GPU, where there is one: see kernels.py, and docs/patches.md for what
one said. Elsewhere this is skipped with the reason that kernels.py gives."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest


@pytest.mark.stacks("0.26.0")  # what kernels.py cuts out and expects is that release's
def test_kernels_of_both_trees(torch_python: Path, pristine_tree: Path, patched_tree: Path) -> None:
    done = subprocess.run(
        [torch_python, Path(__file__).with_name("kernels.py"), pristine_tree, patched_tree],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode == 3:
        pytest.skip(lines[-1]["skipped"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line["part"] for line in lines[1:] if "skipped" not in line} >= {"flatten", "widths"}
