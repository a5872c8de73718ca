"""checks.py finds what only running shows: each kind of damage made, in environments of this machine.

torch is the real one; torchvision is made here, since of a CPU build and a broken one there is no
wheel for this torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sm121 import proc
from sm121.target import checks
from support.checkouts import Checkout
from support.environments import family, unpack
from support.wheels import make_wheel

pytestmark = pytest.mark.timeout(300)

VISION = '''
import torch
from . import version
__version__ = "0.26.0"
library = torch.library.Library("torchvision", "DEF")
for name in {names}:
    library.define(name + "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    def kernel(boxes, scores, threshold):
        """Greedy: the best that is left, then without all that overlap it too much."""
        left, kept = scores.argsort(descending=True).tolist(), []
        while left:
            kept.append(left.pop(0))
            a = boxes[kept[-1]]
            left = [i for i in left if iou(a, boxes[i]) <= {threshold}]
        return torch.tensor(kept)
    for key in {keys}:
        library.impl(name, kernel, key)

def iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    common = max(width, 0) * max(height, 0)
    area = lambda c: (c[2] - c[0]) * (c[3] - c[1])
    return common / (area(a) + area(b) - common)

class ops:
    nms = staticmethod(lambda boxes, scores, threshold: torch.ops.torchvision.nms(boxes, scores, threshold))
'''


def environment(root: Path, python: Path) -> Path:
    """An empty environment of that Python; returns its site-packages."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    site = root / f"lib/python{version}/site-packages"
    site.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin/python").symlink_to(python.resolve())
    (root / "pyvenv.cfg").write_text(f"home = {python.resolve().parent}\n")
    return site


def check(root: Path, name: str) -> tuple[str, str]:
    """Verdict and text."""
    argv = [root / "bin/python", "-I", Path(checks.__file__), name]
    finished = proc.run(argv, env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}, check=False)
    told = [line for line in finished.output.splitlines() if line.startswith(checks.MARK)]
    assert told, finished.output
    verdict, text = json.loads(told[-1].removeprefix(checks.MARK))
    assert (finished.returncode == 0) == (verdict == "pass")
    return verdict, text


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "6 operators for CPU and CUDA, nms is right"),
        ({"keys": ("CPU",)}, "torchvision::nms has no kernel for CUDA"),
        ({"names": checks.VISION[1:]}, "torchvision::nms does not exist"),
        ({"names": checks.VISION[:-1]}, "torchvision::deform_conv2d does not exist"),
        ({"threshold": "1.0"}, "nms at IoU 0.68 keeps [1, 2, 0], by hand it is [1, 2]"),
        ({"cuda": 12060}, "torchvision is for CUDA 12.6, torch for 13.0"),
    ],
    ids=["good", "CPU build", "no nms", "no operator", "wrong nms", "another CUDA"],
)  # fmt: skip
def test_torchvision(built: Checkout, tmp_path: Path, facts: dict[str, object], says: str) -> None:
    """cases.md 6: three kinds of torchvision, three verdicts, although each of them imports."""
    (torch,) = (built.root / "build/env").glob("*/lib/python3*/site-packages/torch")
    site = environment(tmp_path / "env", torch.parents[3] / "bin/python")
    (site / "torch.pth").write_text(f"{torch.parent}\n")
    text = VISION.format(
        names=facts.get("names", checks.VISION), keys=facts.get("keys", ("CPU", "CUDA")),
        threshold=facts.get("threshold", "threshold"),
    )  # fmt: skip
    (site / "torchvision").mkdir()
    (site / "torchvision/__init__.py").write_text(text)
    (site / "torchvision/version.py").write_text(f"cuda = {facts.get('cuda', 13000)}\n")
    verdict, found = check(tmp_path / "env", "torchvision")
    assert says in found
    assert verdict == ("fail" if facts else "pass")


@pytest.fixture
def cutedsl(tmp_path: Path) -> Path:
    """site-packages with two CuTeDSL components and no compiler."""
    site = environment(tmp_path / "env", Path(sys.executable))
    for name, wheel in family(tmp_path / "wheels").items():
        if name.startswith("nvidia-cutlass-dsl"):
            unpack(wheel, site)
    return site


def test_cutedsl_with_files_of_two_packages(cutedsl: Path) -> None:
    """cases.md 7: equal versions, but one file is another package's."""
    (cutedsl / "cutlass/cute.py").write_text("base = 1\n")
    verdict, text = check(cutedsl.parents[2], "cutedsl")
    assert verdict == "fail"
    assert text == "1 files are not nvidia-cutlass-dsl-libs-cu13's: cutlass/cute.py"


def test_cutedsl_of_two_versions(cutedsl: Path, tmp_path: Path) -> None:
    other = make_wheel(tmp_path, {"cutlass/x": "x"}, name="nvidia_cutlass_dsl", version="4.5.2")
    unpack(other, cutedsl)
    verdict, text = check(cutedsl.parents[2], "cutedsl")
    assert verdict == "fail"
    assert "components of several versions" in text
    assert "'nvidia-cutlass-dsl': '4.5.2'" in text


def test_cutedsl_that_cannot_compile(cutedsl: Path) -> None:
    verdict, text = check(cutedsl.parents[2], "cutedsl")
    assert verdict == "fail"
    assert "cutlass" in text


def test_a_module_of_another_place_is_not_the_environments(tmp_path: Path) -> None:
    """cases.md 24, and a package that is in the system's Python."""
    site = environment(tmp_path / "env", Path(sys.executable))
    elsewhere = tmp_path / "elsewhere/tilelang"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").write_text("__version__ = '0'\n")
    (site / "other.pth").write_text(f"{elsewhere.parent}\n")
    verdict, text = check(tmp_path / "env", "tilelang")
    assert verdict == "fail"
    assert f"tilelang came from {elsewhere}" in text
