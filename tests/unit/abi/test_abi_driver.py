"""What of the GPU's driver is in the fingerprints of what was imported."""

from pathlib import Path

import pytest

from sm121.abi.driver import driver_identity, driver_kind
from sm121.abi.interpreter import Interpreter
from sm121.abi.policy.load import load_policy

MACHINE = "aarch64"


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.setattr("sm121.abi.driver._FOLDERS", (str(folder),))
    return folder


def python(how):
    return Interpreter(how=how, version="3.12", program=Path("python3.12"))


def identity(how, stub=None, sha256=""):
    return driver_identity(python(how), MACHINE, load_policy(), stub=stub, sha256=sha256)


def test_each_library_counts_natively(libraries):
    seen = [identity("native")]
    for name in ("libcuda.so.1", "libnvidia-encode.so.1", "libnvcuvid.so.1", "libnvidia-ml.so.1"):
        (libraries / name).touch()
        seen.append(identity("native"))
    assert len(set(seen)) == len(seen)
    assert seen[0] == "none"
    assert seen[2] == "real libnvidia-encode.so.1"
    (libraries / "libother.so.1").touch()
    assert identity("native") == seen[-1]


def test_a_stub_counts_by_content_where_it_is_used(libraries, tmp_path):
    stub = tmp_path / "libcuda.so"
    assert identity("native", stub, "a") != identity("native", stub, "b")
    assert identity("native", stub, "a") != identity("native")
    (libraries / "libcuda.so.1").touch()
    assert identity("native", stub, "a") == identity("native", stub, "b") == "real"


def test_this_machines_are_not_in_a_root_of_the_target(libraries, tmp_path):
    (libraries / "libcuda.so.1").touch()
    (libraries / "libnvidia-encode.so.1").touch()
    assert identity("emulated", tmp_path / "libcuda.so", "a") == "stub a"
    assert driver_kind(python("emulated"), MACHINE, None) == "none"
