"""The dynamic part with a real interpreter: isolation, failures, crashes."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from make import context, wheel, write_wheel

from sm121.abi.dynamic import Python, clean_environment, run_imports, unpack_site
from sm121.abi.modules import Extension, extension_modules
from sm121.abi.report import ImportRow
from sm121.abi.source import Malformed
from sm121.abi.verdicts import judge_imports

pytestmark = [pytest.mark.compiler, pytest.mark.timeout(300)]

HERE = Python(command=(sys.executable,), environment=clean_environment())
C = """
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "%s", 0, -1, 0};
extern int %s(int);
PyMODINIT_FUNC PyInit_%s(void) { if (%s) return 0; return PyModule_Create(&d); }
"""


def modules(*names):
    """Modules that are Python files."""
    return [Extension(name=name, file=f"{name.replace('.', '/')}.py") for name in names]


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
        "pkg/talking.py": b"print('no newline', end='')\n",
        "pkg/last.py": b"",
    }


def test_every_module_has_a_verdict(native, tmp_path):
    path = write_wheel(tmp_path, "pkg-1-cp311-abi3-linux_x86_64.whl", native)
    site = tmp_path / "site"
    unpack_site([path], site)
    built = [Extension(name=f"pkg.{n}", file=f"pkg/{n}.abi3.so") for n in ("good", "broken")]
    asked = [*built, *modules("pkg.crash", "pkg.raising", "pkg.talking", "pkg.last")]
    found = run_imports(HERE, site, asked)
    assert [one.name for one in asked] == list(found)
    assert {n for n, row in found.items() if row.result == "pass"} == {
        "pkg.good", "pkg.talking", "pkg.last",
    }  # fmt: skip
    assert "undefined symbol: cutlass_moe_mm_sm100" in found["pkg.broken"].text  # cases.md 5
    assert "interpreter died" in found["pkg.crash"].text
    assert found["pkg.raising"].text == "RuntimeError: no operator"


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
    (row,) = run_imports(HERE, site, modules("vllm.x")).values()
    assert row == ImportRow(module="vllm.x", result="pass", text="")


def test_a_module_from_elsewhere_is_a_failure(tmp_path):
    (tmp_path / "site").mkdir()
    (row,) = run_imports(HERE, tmp_path / "site", modules("json.decoder")).values()
    assert row.result == "fail"
    assert row.text.startswith("ImportError: came from ")


def test_operators_and_first(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "torch.py").write_text("class ops:\n  class _C:\n    rms_norm = 1\n")
    found = run_imports(HERE, site, first=["torch"], operators=["_C.rms_norm", "_C.gone"])
    assert found["torch.ops._C.rms_norm"].result == "pass"
    assert found["torch.ops._C.gone"].result == "fail"
    assert "AttributeError" in found["torch.ops._C.gone"].text


def test_a_module_may_do_what_it_likes_with_standard_output(tmp_path):
    """It puts another into its place, or closes it."""
    site = tmp_path / "site"
    site.mkdir()
    for name, text in {
        "rebound": "import io, sys; sys.stdout = sys.stderr = io.StringIO()",
        "none": "import sys; sys.stdout = None",
        "closed": "import os, sys; sys.stdout.close(); os.close(1)",
        "turned": "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
    }.items():
        (site / f"{name}.py").write_text(text)
        found = run_imports(HERE, site, modules(name, "last"))
        assert found[name] == ImportRow(module=name, result="pass", text="")
        assert found["last"].text.startswith("ModuleNotFoundError")


def test_a_line_that_looks_like_a_verdict_is_the_modules_fault(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "odd.py").write_text("print('sm121-import and so on')")
    (site / "last.py").write_text("")
    found = run_imports(HERE, site, modules("odd", "last"))
    assert found["odd"].result == "fail"
    assert found["odd"].text.endswith("sm121-import and so on")
    assert found["last"].result == "pass"


def test_no_interpreter_is_said(tmp_path):
    false = Python(command=("/bin/false",), environment={})
    (row,) = run_imports(false, tmp_path, modules("a")).values()
    assert row.result == "fail"
    assert "did not start" in row.text


def test_findings(native):
    one = wheel("pkg-1-cp311-abi3-linux_aarch64.whl", native)
    ctx = context(one)
    known = extension_modules(ctx)
    assert [one.name for one in known] == ["pkg.broken", "pkg.good"]
    row = ImportRow(module="pkg.broken", result="fail", text="ImportError: x")
    rows, found, not_run = judge_imports(ctx, known, {"pkg.broken": row})
    assert rows == [row]
    assert [(f.kind, f.severity, f.file) for f in found] == [
        ("import", "fault", "pkg/broken.abi3.so")
    ]
    assert [n.check for n in not_run] == ["import pkg.good"]


def test_unpack_refuses_what_leaves(tmp_path):
    import zipfile

    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../evil.py", "")
    with pytest.raises(Malformed, match="outside"):
        unpack_site([path], tmp_path / "site")
    assert not Path(tmp_path / "evil.py").exists()
