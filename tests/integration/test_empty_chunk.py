"""The patch `empty-chunk`: SM12x attention of a batch with requests of no tokens.

No SM12x GPU: the attention class and FlashInfer's Python are the real ones, its kernels are
computed in PyTorch (support/dsv4_sm120.py), and the results are compared with dense attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.dsv4 import run_scenarios, unpacked

pytestmark = pytest.mark.patch("empty-chunk")
KINDS = ["behind", "between", "decodes"]
RATIOS = ["1", "4", "128"]  # sliding window only, C4A and C128A layers
NAMES = [f"empty_{kind}" for kind in ["none", *KINDS]]


@pytest.fixture(scope="module")
def wheel(flashinfer_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(flashinfer_wheel, tmp_path_factory.mktemp("flashinfer"))


@pytest.fixture(scope="module")
def before(torch_python: Path, pristine_tree: Path, wheel: Path) -> dict[str, Any]:
    return run_scenarios(torch_python, pristine_tree, wheel, *NAMES)


@pytest.fixture(scope="module")
def after(torch_python: Path, patched_tree: Path, wheel: Path) -> dict[str, Any]:
    return run_scenarios(torch_python, patched_tree, wheel, *NAMES)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_batch_without_empty_requests_is_right_before_and_after(
    before: dict[str, Any], after: dict[str, Any], ratio: str
) -> None:
    assert before["empty_none"][ratio] < 0.01
    assert after["empty_none"][ratio] == before["empty_none"][ratio]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_upstream_fails_on_empty_requests(before: dict[str, Any], kind: str, ratio: str) -> None:
    assert "cannot reshape tensor of 0 elements" in str(before[f"empty_{kind}"][ratio])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_patched_skips_empty_requests(after: dict[str, Any], kind: str, ratio: str) -> None:
    result = after[f"empty_{kind}"][ratio]
    assert isinstance(result, float), result
    assert result < 0.01
