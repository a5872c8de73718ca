"""A checkout with a made-up stack, in which the verb runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.stacks import minimal, write_stack


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "checkout"
    write_stack(root / "pins", minimal())
    (root / "pins/default").write_text("1.2.3\n")
    (root / "patches/vllm/1.2.3").mkdir(parents=True)
    (root / "pins/rules.toml").write_text(
        (Path(__file__).parents[3] / "pins/rules.toml").read_text()
    )
    monkeypatch.chdir(root)
    monkeypatch.setenv("SM121_PYTHON", sys.executable)
    return root
