"""Runs scenarios of dsv4_scenarios.py in a Python that has torch."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

_NEEDED = ("flashinfer/mla/", "flashinfer/_build_meta.py", "flashinfer/data/csrc/sparse_mla_sm120")


def unpacked(wheel: Path, into: Path) -> Path:
    """The wheel as a folder, if it is not one already; only what the scenarios read."""
    if wheel.is_dir():
        return wheel
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into, [n for n in archive.namelist() if n.startswith(_NEEDED)])
    return into


def run_scenarios(python: Path, tree: Path, wheel: Path, *names: str) -> dict[str, Any]:
    """Of each scenario, what it returned; a failed one is an AssertionError when it is asked for."""
    script = Path(__file__).with_name("dsv4_scenarios.py")
    done = subprocess.run(
        [python, "-W", "ignore", script, tree, wheel, *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Results(json.loads(done.stdout))


class Results(dict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        result = super().__getitem__(name)
        assert "value" in result, f"{name}: {result['error']}"
        return result["value"]
