"""Step `extensions` by the verb, natively: a wheelhouse whose modules are of every kind passes, with
what could not be run said; one damaged file of any kind fails it."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import jsonschema
import pytest

from sm121.__main__ import main
from sm121.target.model import SCHEMA_FILE
from support.environments import wheelhouse
from support.wheelhouses import HERE, finish, uv_wheel
from support.wheels import make_wheel

pytestmark = [pytest.mark.compiler, pytest.mark.timeout(300)]

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
C = """
#include <Python.h>
static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "x", 0, -1, 0};
extern int %(function)s(int);
static int (*volatile used)(int) = %(function)s;
PyMODINIT_FUNC PyInit_%(init)s(void) { %(body)s return PyModule_Create(&d); }
"""
# As opencv-python's package does it, and its file refuses a second time.
CV = """
import importlib, os, sys
sys.path.insert(0, os.path.dirname(__file__))
package = sys.modules.pop("cv2")
_native = importlib.import_module("cv2")
sys.modules["cv2"] = package
del sys.path[0]
"""
ONCE = 'if (getenv("SM121_SECOND")) return 0; setenv("SM121_SECOND", "1", 1);'
ABORTS = 'if (!PyImport_ImportModule("cutlass")) abort();'
CODEC = "import ctypes\nctypes.CDLL('libnvidia-encode.so.1')\n"
CUTLASS = "nvidia_cutlass_dsl/python_packages/cutlass"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# Path without suffix → init, body, function.
KINDS = {
    "plain/x": ("x", "", "abs"),
    "cv2/cv2": ("cv2", ONCE, "abs"),
    f"{CUTLASS}/_ir": ("_ir", ABORTS, "abs"),
    "torchcodec/libtorchcodec_pybind_ops": ("core_ops", "", "abs"),
    "cuda/core/cu13/_tensor_bridge": ("_tensor_bridge", "", "torch_like"),
    "PyNvVideoCodec/codec_130": ("_codec", "", "abs"),
}


def shared(folder: Path, text: str) -> bytes:
    source, out = folder / "x.c", folder / "x.so"
    source.write_text(text)
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["gcc", "-shared", "-fPIC", include, source, "-o", out], check=True)
    return out.read_bytes()


def house_of(folder: Path, damaged: str = "") -> Path:
    """A wheelhouse with a module of each kind, one of them with a symbol that nobody has."""
    wheels = folder / "wheels"
    files: dict[str, str | bytes] = {
        "plain/__init__.py": "", "cv2/__init__.py": CV, "torchcodec/__init__.py": "",
        "PyNvVideoCodec/__init__.py": CODEC, f"{CUTLASS}/__init__.py": "",
        "cutlass.pth": "nvidia_cutlass_dsl/python_packages\n",
    }  # fmt: skip
    for path, (init, body, function) in KINDS.items():
        needed = "nobody_has_it" if path == damaged else function
        text = C % {"init": init, "body": body, "function": needed}
        files[path + SUFFIX] = shared(folder, text)
    library = shared(folder, "int torch_like(int x) { return x; }")
    torch = {"torch/__init__.py": "", "torch/lib/libtorch.so": library}
    tag = f"{TAG}-{TAG}-linux_{HERE['target'].removeprefix('linux-')}"
    made = [
        make_wheel(wheels, torch, name="torch", version="2.11.0"),
        make_wheel(wheels, files, name="kinds", version="1", tag=tag),
        uv_wheel(wheels),
    ]
    return finish(wheelhouse(folder / "wheelhouse", made, **HERE))


def step(house: Path, out: Path, *, code: int) -> tuple[dict, dict]:
    """The row, and the whole report."""
    assert main(["verify-target", str(house), f"--json={out}", "--only", "extensions"]) == code
    report = json.loads(out.read_text())
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))
    return next(row for row in report["rows"] if row["step"] == "extensions"), report


def test_each_kind_passes_or_is_said_not_to_have_run(checkout: Path, tmp_path: Path) -> None:
    row, report = step(house_of(tmp_path), tmp_path / "r.json", code=0)
    assert row["verdict"] == "pass"
    assert {name: text.partition(":")[0] for name, text in row["facts"].items()} == {
        "plain.x": "pass", "cv2.cv2": "pass", "cutlass._ir": "pass", "torchcodec.libtorchcodec_pybind_ops": "pass",
        "cuda.core.cu13._tensor_bridge": "pass", "PyNvVideoCodec.codec_130": "not run",
    }  # fmt: skip
    assert "1 not run: PyNvVideoCodec.codec_130: needs libnvidia-encode.so.1" in row["text"]
    assert "PyNvVideoCodec" not in row["text"].partition("not run")[0]
    assert any("could not be imported here: 1," in one for one in report["unproved"])


@pytest.mark.parametrize("damaged", KINDS)
def test_a_damaged_one_fails_the_step(checkout: Path, tmp_path: Path, damaged: str) -> None:
    row, _ = step(house_of(tmp_path, damaged), tmp_path / "r.json", code=1)
    assert row["verdict"] == "fail"
    assert "undefined symbol: nobody_has_it" in row["text"]
    failed = [name for name, text in row["facts"].items() if text.startswith("fail: ")]
    assert len(failed) == 1
    assert failed[0].rpartition(".")[2] == damaged.rpartition("/")[2]
