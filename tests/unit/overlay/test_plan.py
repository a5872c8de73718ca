"""What becomes of a patch when only Python can change."""

from __future__ import annotations

import pytest

from sm121.errors import PatchFailed, PinsFault
from sm121.overlay.plan import Change, Fate, plan
from sm121.pins.model import OverlayPin

WHEEL = {"vllm/envs.py", "vllm/data.json", "vllm/_C_stable_libtorch.abi3.so"}


def pin(**more: object) -> OverlayPin:
    wheel = {"filename": "vllm-1.2.3-cp38-abi3-manylinux_2_28_aarch64.whl", "sha256": "a" * 64}
    return OverlayPin.model_validate({"wheels": {"linux-aarch64": wheel}, **more})


def fate(*files: str, added: tuple[str, ...] = (), pins: OverlayPin | None = None) -> Fate:
    (one,) = plan(
        [Change(name="one", files=files)], wheel=WHEEL, added=added, pin=pins or pin()
    )  # fmt: skip
    return one


def test_python_in_the_wheel_is_applied() -> None:
    got = fate("vllm/envs.py", "docs/usage.md", "tests/test_envs.py")
    assert (got.status, got.files, got.reason) == ("applied", ("vllm/envs.py",), "")
    assert got.not_applied == {"docs/usage.md": "in no wheel", "tests/test_envs.py": "in no wheel"}


def test_new_python_is_applied() -> None:
    assert fate("vllm/new.py", added=("vllm/new.py",)).files == ("vllm/new.py",)


def test_requirements_are_applied_as_metadata() -> None:
    assert fate("requirements/cuda.txt").status == "applied"


@pytest.mark.parametrize("file", ["CMakeLists.txt", "csrc/ops.cu", "setup.py", "requirements/build.txt", "tools/x.py"])  # fmt: skip
def test_inputs_of_the_build_are_left_out(file: str) -> None:
    got = fate(file)
    assert (got.status, got.files) == ("left out", ())
    assert "binaries are the release's own" in got.reason


def test_docs_alone_are_left_out_for_another_reason() -> None:
    assert fate("docs/usage.md").reason == "all that it changes is in no wheel"


@pytest.mark.parametrize("build", ["csrc/ops.cu", "CMakeLists.txt", "vllm/new.json"])
def test_half_of_a_patch_is_never_applied_in_silence(build: str) -> None:
    with pytest.raises(PatchFailed) as raised:
        fate("vllm/envs.py", build, added=("vllm/new.json",))
    assert raised.value.details == (f"one: vllm/envs.py without {build}",)
    assert "overlay.python-alone" in raised.value.remedy


def test_half_of_a_patch_with_a_reason() -> None:
    got = fate("vllm/envs.py", "setup.py", pins=pin(**{"python-alone": {"one": "needs nothing"}}))
    assert (got.status, got.reason) == ("applied in part", "needs nothing")
    assert (got.files, list(got.not_applied)) == (("vllm/envs.py",), ["setup.py"])


def test_a_reason_for_nothing_is_a_fault_of_the_pins() -> None:
    with pytest.raises(PinsFault) as raised:
        fate("vllm/envs.py", pins=pin(**{"python-alone": {"one": "x"}}))
    assert "overlay.python-alone names one" in raised.value.what
