"""Programs that tests need. A missing one is a failure with a message, never a skip."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str, package: str = "") -> str:
    """Path of a program, or a failed test that says how to get it."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is not on PATH: apt-get install {package or name} (see .ci/run)")
    return path


def run(
    *argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program that a test needs; its failure is the test's."""
    done = subprocess.run(
        [str(a) for a in argv], cwd=cwd, env=None if env is None else dict(env),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{argv} failed:\n{done.stdout}\n{done.stderr}"
    return done


def sm121_environment(**extra: str) -> dict[str, str]:
    """Environment in which `python -m sm121` is this checkout's."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", **extra}
