"""The real series over the release's real Python, in a wheel whose binaries are small ones.

The release's wheel is 300 MB; what an overlay changes is its Python and METADATA, and that the
sdist has too (both were compared once, docs/overlay.md).
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from make import elf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sm121.compile.wheel import component_paths, metadata_faults
from sm121.context import Context, Options
from sm121.files import HashMemory
from sm121.layout import Layout
from sm121.lock.resolve import REQUIREMENT_FILES
from sm121.overlay.metadata import listed_requirements
from sm121.overlay.stage import OverlayStage
from sm121.patches.stage import PatchStage
from sm121.pins.model import OverlayPin, Stack
from sm121.repair.wheel import Wheel, read_wheel
from sm121.ui import Ui
from support.upstream import sha256
from support.wheels import make_wheel

# The stacks that have the profile.
pytestmark = pytest.mark.stacks("0.26.0")
NAME = "vllm-{}-cp38-abi3-manylinux_2_28_aarch64.whl"


@dataclass(frozen=True)
class Made:
    result: dict[str, Any]
    wheel: Wheel
    said: str


@pytest.fixture(scope="module")
def made(
    root: Path, stack: Stack, stack_name: str, real, pristine_tree: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Made:  # fmt: skip
    folder = tmp_path_factory.mktemp("overlay")
    release = _release(folder / "release", stack, pristine_tree)
    file = folder / "cache/files" / sha256(release) / release.name
    file.parent.mkdir(parents=True)
    release.rename(file)
    pinned = {"linux-aarch64": {"filename": file.name, "sha256": file.parent.name}}
    assert stack.overlay is not None
    overlay = OverlayPin.model_validate(
        {"wheels": pinned, "python-alone": stack.overlay.python_alone, "left-out": stack.overlay.left_out}
    )  # fmt: skip
    (folder / "build/source").mkdir(parents=True)
    (folder / "build/source/vllm.git").symlink_to(real.repository.path)
    out, err = io.StringIO(), io.StringIO()
    context = Context(
        layout=Layout(root=root, build=folder / "build", wheelhouse=folder / "house",
                      cache=folder / "cache"),
        stack_name=stack_name, stack=stack.model_copy(update={"overlay": overlay}),
        options=Options(profile="overlay", offline=True), ui=Ui(out=out, err=err),
        memory=HashMemory(folder / "hashes.json"),
    )  # fmt: skip
    results: dict[str, Any] = {"source": {"commit": real.base}}
    results["patch"] = PatchStage().run(context, results)
    result = dict(OverlayStage().run(context, results))
    wheel = read_wheel(OverlayStage().dist(context) / result["wheel"])
    return Made(result, wheel, err.getvalue())


def _release(folder: Path, stack: Stack, tree: Path) -> Path:
    """A wheel as upstream's: the release's whole Python, its requirements, a binary for each
    component."""
    assert stack.overlay is not None
    files: dict[str, bytes | str] = {
        str(path.relative_to(tree)): path.read_bytes()
        for path in (tree / "vllm").rglob("*") if path.is_file()
    }  # fmt: skip
    for name in stack.profiles["overlay"].components:
        for path in component_paths(name, python="3.12", machine="aarch64"):
            files[path] = "" if path.endswith(".py") else elf(needed=["libcuda.so.1"])
    asked = listed_requirements({n: (tree / n).read_text() for n in REQUIREMENT_FILES})
    kept = [r for r in asked if not r.startswith("flashinfer-cubin")]
    tag = NAME.split("-", 2)[2].removesuffix(".whl")
    return make_wheel(folder, files, name="vllm", version=stack.vllm.version, tag=tag, requires=kept)  # fmt: skip


def test_every_python_file_is_the_patched_trees(made: Made, patched_tree: Path) -> None:
    with zipfile.ZipFile(made.wheel.path) as archive:
        there = {n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")}
        for path in (patched_tree / "vllm").rglob("*.py"):
            name = str(path.relative_to(patched_tree))
            assert name in there
            if name != "vllm/_version.py":
                assert archive.read(name) == path.read_bytes(), name


def test_metadata_is_what_the_pins_say(made: Made, stack: Stack, patched_tree: Path) -> None:
    texts = {n: (patched_tree / n).read_text() for n in REQUIREMENT_FILES}
    named = {canonicalize_name(Requirement(r).name) for r in listed_requirements(texts)}
    required = named & stack.family.keys()
    assert required >= {"torch", "flashinfer-python", "nvidia-cutlass-dsl"}
    assert metadata_faults(made.wheel.metadata, stack.family, required) == []
    assert "flashinfer-cubin" not in made.wheel.metadata


def test_every_patch_is_accounted_for(made: Made, real) -> None:
    """Each file of each patch is in the wheel or has a reason why not."""
    fates = made.result["patches"]
    assert list(fates) == [patch.name for patch in real.series]
    for patch, applied in zip(real.series, real.applied.patches, strict=True):
        fate = fates[patch.name]
        parent = real.repository.commit_of(f"{applied.commit}^")
        changed = set(real.repository.changed_paths(parent, applied.commit))
        assert changed == set(fate["files"]) | set(fate["not_applied"]), patch.name
        assert fate["status"] == "applied" or fate["reason"], patch.name
        python = {path for path in changed if path.startswith("vllm/")}
        assert python <= set(fate["files"]), patch.name


def test_what_is_said_names_every_patch(made: Made, real) -> None:
    for patch in real.series:
        assert f"  {patch.name} " in made.said
