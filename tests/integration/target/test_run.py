"""The list followed natively, on wheelhouses of tiny wheels that the real install.py installs."""

from __future__ import annotations

import json
import os
import platform
import zipfile
from pathlib import Path

import jsonschema
import pytest

from sm121.__main__ import main
from sm121.files import remove_tree
from sm121.target.model import SCHEMA_FILE
from support.environments import sums, wheelhouse
from support.wheelhouses import HERE, finish, uv_wheel
from support.wheels import make_wheel

pytestmark = pytest.mark.timeout(300)

# Stands in for a package that is only imported: it leaves a mark where it was imported from.
IMPORTED = "import pathlib\npathlib.Path({mark!r}).touch()\n"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "imported"


@pytest.fixture
def house(tmp_path: Path, mark: Path) -> Path:
    """torch that says it is a CPU build, tilelang, tvm-ffi that crashes, and uv."""
    wheels = tmp_path / "wheels"
    made = [
        make_wheel(
            wheels, {"torch/__init__.py": IMPORTED.format(mark=str(mark)) + "__version__ = '2.11.0+cpu'\n",
                     "torch/version.py": "cuda = None\n", "torch/lib/libdata.so": b"data" * 99},
            name="torch", version="2.11.0",
        ),
        make_wheel(
            wheels, {"tilelang/__init__.py": "__version__ = '0.1.9'\n"}, name="tilelang", version="0.1.9",
            requires=["apache-tvm-ffi"],
        ),
        make_wheel(
            wheels, {"tvm_ffi/__init__.py": "import os\nos.abort()\n"}, name="apache_tvm_ffi", version="0.1.9"
        ),
        uv_wheel(wheels),
    ]  # fmt: skip
    return finish(wheelhouse(tmp_path / "wheelhouse", made, **HERE))


def verdicts(house: Path, out: Path, *options: str, code: int) -> dict:
    assert main(["verify-target", str(house), f"--json={out}", *options]) == code
    report = json.loads(out.read_text())
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))
    return report


def test_each_step_has_its_verdict(checkout: Path, house: Path, tmp_path: Path, capsys) -> None:
    report = verdicts(house, tmp_path / "r.json", code=1)
    rows = {row["step"]: row for row in report["rows"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "checksums": "pass", "binaries": "fail", "install": "pass", "extensions": "not run",
        "torch": "fail", "torchvision": "not run", "torchaudio": "not run", "tvm-ffi": "fail",
        "cutedsl": "not run", "tilelang": "pass", "flashinfer": "not run", "vllm": "not run",
        "gates": "not run",
    }  # fmt: skip
    assert {rows[name]["how"] for name in ("checksums", "binaries")} == {"static"}
    assert {rows[name]["how"] for name in ("install", "torch", "tilelang")} == {"native"}
    assert "wanted a CUDA build" in rows["binaries"]["text"]
    assert rows["torch"]["text"] == "torch 2.11.0+cpu is a CPU build"
    assert "died" in rows["tvm-ffi"]["text"]
    assert rows["torchvision"]["text"] == "not in this wheelhouse: torchvision"
    assert report["machine"]["machine"] == platform.machine()
    assert report["machine"]["how"] == "native"
    said = capsys.readouterr().err
    assert "error: The wheelhouse did not pass: binaries, torch, tvm-ffi." in said
    assert (checkout / "build/target/env/bin/python").exists()


def test_the_environment_of_an_earlier_run_is_used_again(
    checkout: Path, house: Path, tmp_path: Path
) -> None:
    facts = []
    for _ in range(2):
        report = verdicts(house, tmp_path / "r.json", "--only", "tilelang", code=0)
        facts += [row["facts"]["reused"] for row in report["rows"] if row["step"] == "install"]
    assert facts == ["false", "true"]
    assert {r["step"] for r in report["rows"] if r["verdict"] == "pass"} == {
        "checksums", "install", "tilelang",
    }  # fmt: skip


def test_one_byte_is_enough_and_nothing_is_imported(
    checkout: Path, house: Path, mark: Path, tmp_path: Path
) -> None:
    verdicts(house, tmp_path / "r.json", "--only", "tilelang", code=0)
    remove_tree(checkout / "build/target")
    mark.unlink(missing_ok=True)
    (wheel,) = house.glob("torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = archive.getinfo("torch/lib/libdata.so")
    data = bytearray(wheel.read_bytes())
    data[member.header_offset + 30 + len(member.filename) + member.compress_size // 2] ^= 1
    before = wheel.stat()
    wheel.write_bytes(data)
    # Not even its time tells.
    os.utime(wheel, ns=(before.st_atime_ns, before.st_mtime_ns))
    report = verdicts(house, tmp_path / "r.json", code=1)
    assert [r["step"] for r in report["rows"] if r["verdict"] == "fail"] == ["checksums"]
    assert {r["verdict"] for r in report["rows"][1:]} == {"not run"}
    assert wheel.name in report["rows"][0]["text"]
    assert report["machine"] is None
    assert not mark.exists()
    assert not (checkout / "build/target/env").exists()


def test_install_py_refuses_and_says_why(checkout: Path, house: Path, tmp_path: Path) -> None:
    manifest = house / "manifest.json"
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**data, "glibc": "2.99"}))
    sums(house)
    report = verdicts(house, tmp_path / "r.json", code=1)
    rows = {row["step"]: row for row in report["rows"]}
    assert rows["install"]["verdict"] == "fail"
    assert "needs glibc 2.99" in rows["install"]["text"]
    assert rows["torch"]["text"] == "install.py did not make an environment"


def test_nothing_run_is_no_pass(checkout: Path, house: Path, tmp_path: Path, capsys) -> None:
    """The verdict of Dockerfile.verify is the exit status: a Python that does not fit is not 0."""
    manifest = house / "manifest.json"
    wanted = "3.12" if HERE["python"] == "3.11" else "3.11"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "python": wanted}))
    sums(house)
    report = verdicts(house, tmp_path / "r.json", "--only", "tilelang", code=3)
    assert {r["step"] for r in report["rows"] if r["verdict"] == "pass"} == {"checksums"}
    assert report["result"] == "not run"
    assert f"The wheelhouse is for CPython {wanted}, here is" in capsys.readouterr().err


def test_another_install_py_installs_anew(checkout: Path, house: Path, tmp_path: Path) -> None:
    facts = []
    for _ in range(2):
        report = verdicts(house, tmp_path / "r.json", "--only", "tilelang", code=0)
        facts += [row["facts"]["reused"] for row in report["rows"] if row["step"] == "install"]
        with (house / "install.py").open("a") as file:
            file.write("# another one\n")
        sums(house)
    assert facts == ["false", "false"]


def test_a_folder_that_is_no_wheelhouse(checkout: Path, tmp_path: Path, capsys) -> None:
    assert main(["verify-target", str(tmp_path)]) == 2
    assert "is no wheelhouse" in capsys.readouterr().err
