"""The dynamic part with a real interpreter: isolation, failures, crashes."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from make import context, wheel, write_wheel

from sm121.abi.dynamic import (
    Python,
    check_imports,
    clean_environment,
    extension_modules,
    run_imports,
    unpack_site,
)
from sm121.abi.source import Malformed

pytestmark = [pytest.mark.compiler, pytest.mark.timeout(300)]

HERE = Python(command=(sys.executable,), environment=clean_environment())
C = """
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "%s", 0, -1, 0};
extern int %s(int);
PyMODINIT_FUNC PyInit_%s(void) { if (%s) return 0; return PyModule_Create(&d); }
"""


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """Extension modules for this machine: a good one, and one with an undefined symbol."""
    folder = tmp_path_factory.mktemp("native")

    def build(name, function, condition):
        source = folder / f"{name}.c"
        source.write_text(C % (name, function, name, condition))
        out = folder / f"{name}.abi3.so"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", source, "-o", out], check=True
        )  # fmt: skip
        return out.read_bytes()

    return {
        "pkg/__init__.py": b"",
        "pkg/good.abi3.so": build("good", "abs", "abs(0)"),
        "pkg/broken.abi3.so": build("broken", "cutlass_moe_mm_sm100", "cutlass_moe_mm_sm100(0)"),
        "pkg/crash.py": b"import os; os.abort()\n",
        "pkg/raising.py": b"raise RuntimeError('no operator')\n",
        "pkg/last.py": b"",
    }


def test_every_module_has_a_verdict(native, tmp_path):
    path = write_wheel(tmp_path, "pkg-1-cp311-abi3-linux_x86_64.whl", native)
    site = tmp_path / "site"
    unpack_site([path], site)
    names = ["pkg.good", "pkg.broken", "pkg.crash", "pkg.raising", "pkg.last"]
    found = run_imports(HERE, site, names)
    assert set(found) == set(names)
    assert (found["pkg.good"], found["pkg.last"]) == ("", "")
    assert "undefined symbol: cutlass_moe_mm_sm100" in found["pkg.broken"]  # cases.md 5
    assert "interpreter died" in found["pkg.crash"]
    assert found["pkg.raising"] == "RuntimeError: no operator"


def test_a_stale_folder_does_not_shadow_the_wheel(tmp_path, monkeypatch):  # cases.md 24
    path = write_wheel(
        tmp_path, "vllm-1-py3-none-any.whl", {"vllm/__init__.py": b"", "vllm/x.py": b""}
    )
    site = tmp_path / "site"
    unpack_site([path], site)
    stale = tmp_path / "work/vllm"
    stale.mkdir(parents=True)
    (stale / "__init__.py").write_text("raise RuntimeError('the stale one')")
    monkeypatch.chdir(stale.parent)
    monkeypatch.setenv("PYTHONPATH", str(stale.parent))
    assert run_imports(HERE, site, ["vllm.x"]) == {"vllm.x": ""}


def test_a_module_from_elsewhere_is_a_failure(tmp_path):
    (tmp_path / "site").mkdir()
    found = run_imports(HERE, tmp_path / "site", ["json.decoder"])
    assert "not from the wheelhouse" in found["json.decoder"]


def test_operators_and_first(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "torch.py").write_text("class ops:\n  class _C:\n    rms_norm = 1\n")
    found = run_imports(HERE, site, [], first=["torch"], operators=["_C.rms_norm", "_C.gone"])
    assert found["torch.ops._C.rms_norm"] == ""
    assert "AttributeError" in found["torch.ops._C.gone"]


def test_no_interpreter_is_said(tmp_path):
    false = Python(command=("/bin/false",), environment={})
    assert "did not start" in run_imports(false, tmp_path, ["a"])["a"]


def test_findings(native):
    one = wheel("pkg-1-cp311-abi3-linux_aarch64.whl", native)
    ctx = context(one)
    assert extension_modules(ctx) == ["pkg.broken", "pkg.good"]
    found, not_run = check_imports(ctx, {"pkg.broken": "ImportError: x"})
    assert [(f.kind, f.file) for f in found] == [("import", "pkg/broken.abi3.so")]
    assert [n.check for n in not_run] == ["import pkg.good"]


def test_unpack_refuses_what_leaves(tmp_path):
    import zipfile

    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../evil.py", "")
    with pytest.raises(Malformed, match="outside"):
        unpack_site([path], tmp_path / "site")
    assert not Path(tmp_path / "evil.py").exists()
