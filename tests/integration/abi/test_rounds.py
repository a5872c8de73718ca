"""Modules that can't be imported as they lie there: each kind, good and damaged, natively.

Good ones of each kind are what real packages do; their names are in the tests.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from make import context, wheel, write_wheel

from sm121.abi.context import matches
from sm121.abi.dynamic import Python, clean_environment, unpack_site
from sm121.abi.interpreter import Interpreter
from sm121.abi.live import Stage, with_dynamic
from sm121.abi.modules import extension_modules, import_roots
from sm121.abi.policy.load import load_policy
from sm121.abi.rounds import import_all
from sm121.abi.verdicts import judge_imports
from sm121.abi.verify import verify
from sm121.files import HashMemory
from sm121.lock.pylock import Target

pytestmark = [pytest.mark.compiler, pytest.mark.timeout(300)]

HERE = Python(command=(sys.executable,), environment=clean_environment())
MACHINE = sysconfig.get_platform().removeprefix("linux-")
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
TARGET = Target.make(f"linux-{MACHINE}", python=PYTHON, glibc="2.36")
WHEEL = f"pkg-1-cp311-abi3-linux_{MACHINE}.whl"
C = """
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdlib.h>
static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "%(init)s", 0, -1, 0};
extern int %(function)s(int);
static int (*volatile used)(int) = %(function)s;
PyMODINIT_FUNC PyInit_%(init)s(void) { %(body)s return PyModule_Create(&d); }
"""
GONE = "cutlass_moe_mm_sm100"  # nobody has it


@pytest.fixture
def build(tmp_path):
    """An extension module for this machine. function: a symbol that it needs. needs: a library
    that it is linked to. Or a library without any init."""

    def run(source, *flags):
        count = len(list(tmp_path.glob("*.c")))
        file, out = tmp_path / f"{count}.c", tmp_path / f"{count}.so"
        file.write_text(source)
        include = f"-I{sysconfig.get_path('include')}"
        subprocess.run(["gcc", "-shared", "-fPIC", include, file, "-o", out, *flags], check=True)
        return out

    def extension(init, *, function="abs", body="", flags=()):
        return run(C % {"init": init, "function": function, "body": body}, *flags).read_bytes()

    extension.library = run
    return extension


def imported(tmp_path, files, *, driver="stub", name=WHEEL, policy=None):
    """Rows by module, findings that are faults, and what was not run, of a wheel of these files."""
    one = wheel(name, files)
    policy = policy or load_policy()
    ctx = context(one, policy=policy, target=TARGET)
    site = tmp_path / "site"
    unpack_site([write_wheel(tmp_path, name, files)], site)
    modules = extension_modules(ctx, import_roots(site))
    found = import_all(HERE, site, modules, policy, driver=driver)
    rows, findings, not_run = judge_imports(ctx, modules, found)
    faults = [f for f in findings if f.severity == "fault"]
    return {row.module: row for row in rows}, faults, not_run


class TestLoadedByItsPackage:
    """cv2: its package imports the file as top-level `cv2`, and a second time is refused."""

    INIT = """
import importlib, os, sys
here = os.path.dirname(__file__)
sys.path.insert(0, here)
package = sys.modules.pop("pkg")
_native = importlib.import_module("pkg")
sys.modules["pkg"] = package
sys.path.remove(here)
"""
    ONCE = (
        'if (getenv("SM121_SECOND")) { PyErr_SetString(PyExc_ImportError, "recursion is detected");'
        ' return 0; } setenv("SM121_SECOND", "1", 1);'
    )

    def test_is_imported_with_it(self, tmp_path, build):
        files = {
            "pkg/__init__.py": self.INIT.encode(),
            "pkg/pkg.abi3.so": build("pkg", body=self.ONCE),
        }
        rows, faults, _ = imported(tmp_path, files)
        assert faults == []
        assert rows["pkg.pkg"].result == "pass"
        assert rows["pkg.pkg"].text == "loaded by its package, as pkg._native"

    def test_and_fails_with_it(self, tmp_path, build):
        files = {
            "pkg/__init__.py": self.INIT.encode(),
            "pkg/pkg.abi3.so": build("pkg", function=GONE),
        }
        rows, (fault,), _ = imported(tmp_path, files)
        assert rows["pkg.pkg"].result == "fail"
        assert f"undefined symbol: {GONE}" in fault.text

    def test_one_that_the_package_only_opens_was_not_imported(self, tmp_path, build):
        """Opened by ctypes, its init was not run; and it is one that fails."""
        init = b"import ctypes, os\nctypes.CDLL(os.path.join(os.path.dirname(__file__), 'pkg.abi3.so'))\n"
        files = {"pkg/__init__.py": init, "pkg/pkg.abi3.so": build("pkg", body="return 0;")}
        _, (fault,), _ = imported(tmp_path, files)
        assert "SystemError" in fault.text


class TestOnThePathOfAPthFile:
    """nvidia-cutlass-dsl: cutlass lies below a folder that a .pth file names, and its compiler
    aborts under any other name."""

    BODY = (
        'PyObject *p = PyImport_ImportModule("cutlike"); if (!p) abort();'
        "PyObject *made = PyModule_Create(&d);"
    )

    def files(self, build, **more):
        return {
            "nvidia_like.pth": b"nvidia_like/python_packages\n",
            "nvidia_like/python_packages/cutlike/__init__.py": b"",
            "nvidia_like/python_packages/cutlike/_ir.abi3.so": build("_ir", **more),
        }

    def test_has_its_name_from_there(self, tmp_path, build):
        rows, faults, _ = imported(tmp_path, self.files(build, body=self.BODY))
        assert faults == []
        assert {n: (r.result, r.text) for n, r in rows.items()} == {"cutlike._ir": ("pass", "")}

    def test_without_the_pth_file_it_is_a_fault(self, tmp_path, build):
        files = self.files(build, body=self.BODY)
        del files["nvidia_like.pth"]
        _, (fault,), _ = imported(tmp_path, files)
        assert "interpreter died" in fault.text

    def test_damaged(self, tmp_path, build):
        _, (fault,), _ = imported(tmp_path, self.files(build, function=GONE))
        assert f"undefined symbol: {GONE}" in fault.text


class TestInitOfAnotherName:
    """torchcodec.libtorchcodec_pybind_ops has PyInit_core_pybind_ops."""

    def test_is_loaded_by_file(self, tmp_path, build):
        files = {"pkg/__init__.py": b"", "pkg/libops.abi3.so": build("core_ops")}
        rows, faults, _ = imported(tmp_path, files)
        assert faults == []
        assert rows["pkg.libops"].result == "pass"
        assert "core_ops" in rows["pkg.libops"].text

    @pytest.mark.parametrize(
        ("damage", "says"),
        [({"function": GONE}, GONE), ({"body": "return 0;"}, "SystemError"), ({"body": "abort();"}, "died")],
    )  # fmt: skip
    def test_damaged(self, tmp_path, build, damage, says):
        files = {"pkg/__init__.py": b"", "pkg/libops.abi3.so": build("core_ops", **damage)}
        _, (fault,), _ = imported(tmp_path, files)
        assert says in fault.text


class TestOpenedBefore:
    """cuda.core's _tensor_bridge has symbols of torch and no NEEDED entry: its package makes torch's
    libraries global before, and policy says so (`preload`)."""

    PATH = "cuda/core/cu13/_tensor_bridge.abi3.so"

    def files(self, build, function):
        library = build.library("int torch_like(int x) { return x; }")
        return {
            "torch/lib/libtorch.so": library.read_bytes(),
            self.PATH: build("_tensor_bridge", function=function),
            "other/same.abi3.so": build("same"),
        }

    def test_with_what_policy_says(self, tmp_path, build):
        rows, faults, _ = imported(tmp_path, self.files(build, "torch_like"))
        assert faults == []
        row = rows["cuda.core.cu13._tensor_bridge"]
        assert row.result == "pass"
        assert "torch/lib/libtorch.so opened before" in row.text
        assert "cuda.core imports this module only after" in row.text
        assert rows["other.same"].text == ""

    def test_another_module_is_not_helped(self, tmp_path, build):
        files = self.files(build, "torch_like") | {
            "pkg/x.abi3.so": build("x", function="torch_like")
        }
        rows, (fault,), _ = imported(tmp_path, files)
        assert rows["pkg.x"].result == "fail"
        assert "undefined symbol: torch_like" in fault.text

    def test_damaged(self, tmp_path, build):
        rows, (fault,), _ = imported(tmp_path, self.files(build, GONE))
        assert rows["cuda.core.cu13._tensor_bridge"].result == "fail"
        assert f"undefined symbol: {GONE}" in fault.text

    @pytest.mark.parametrize("function", ["torch_like", GONE])
    def test_two_rules_for_one_file(self, tmp_path, build, function):
        """One that passed is not judged again by what another rule opens."""
        policy = load_policy()
        (rule,) = (rule for rule in policy.preload if matches(self.PATH, rule.for_files))
        other = rule.model_copy(update={"opens": ("other/lib*.so",), "why": "the other rule"})
        files = self.files(build, function) | {
            "other/libempty.so": build.library("int empty;").read_bytes()
        }
        for more in ((other, *policy.preload), (*policy.preload, other)):
            changed = policy.model_copy(update={"preload": more})
            rows, faults, _ = imported(tmp_path, files, policy=changed)
            row = rows["cuda.core.cu13._tensor_bridge"]
            assert row.result == ("pass" if function == "torch_like" else "fail")
            assert bool(faults) == (row.result == "fail")

    def test_a_library_that_cannot_be_opened(self, tmp_path, build):
        """Told of with the module, which is of a wheel and a file."""
        files = self.files(build, "torch_like") | {"torch/lib/libtorch.so": b"no ELF file"}
        rows, (fault,), _ = imported(tmp_path, files)
        assert set(rows) == {"cuda.core.cu13._tensor_bridge", "other.same"}
        assert fault.file == self.PATH
        assert "undefined symbol: torch_like" in fault.text
        assert "torch/lib/libtorch.so can't be opened: OSError: " in fault.text
        assert "with nothing of what policy names opened before" in fault.text


class TestDriver:
    """PyNvVideoCodec opens the driver's libnvidia-encode.so.1 when it is imported."""

    def init(self, library="libnvidia-encode.so.1"):
        return (
            f"import ctypes\ntry:\n    ctypes.CDLL({library!r})\n"
            "except OSError as error:\n"
            "    raise RuntimeError(f'{error}\\n\\n=== TROUBLESHOOTING') from error\n"
        ).encode()

    def test_is_not_run_and_no_pass(self, tmp_path, build):
        files = {"pkg/__init__.py": self.init(), "pkg/codec_130.abi3.so": build("_codec")}
        rows, faults, not_run = imported(tmp_path, files)
        assert faults == []
        row = rows["pkg.codec_130"]
        assert row.result == "not run"
        assert row.text == (
            "needs libnvidia-encode.so.1 of the GPU's driver, which is not here; its file was opened, "
            "and every symbol found"
        )
        assert [(n.check, n.reason) for n in not_run] == [("import pkg.codec_130", row.text)]

    def test_one_that_is_linked_to_it(self, tmp_path, build):
        stub = build.library("int cuvid(int x) { return x; }", "-Wl,-soname,libnvcuvid.so.1")
        flags = ["-Wl,--no-as-needed", str(stub)]
        files = {"pkg/__init__.py": b"", "pkg/x.abi3.so": build("x", flags=flags)}
        rows, faults, _ = imported(tmp_path, files)
        assert faults == []
        assert rows["pkg.x"].result == "not run"
        assert "libnvcuvid.so.1" in rows["pkg.x"].text
        assert rows["pkg.x"].text.endswith("nor can its file be opened")

    def test_damaged(self, tmp_path, build):
        """That it needs the driver does not hide a symbol that it lacks."""
        files = {
            "pkg/__init__.py": self.init(),
            "pkg/codec.abi3.so": build("_codec", function=GONE),
        }
        rows, (fault,), _ = imported(tmp_path, files)
        assert rows["pkg.codec"].result == "fail"
        assert f"undefined symbol: {GONE}" in fault.text

    @pytest.mark.parametrize("library", ["libnvidia-encode.so.9", "libgone.so.1"])
    def test_another_library_is_missing(self, tmp_path, build, library):
        files = {"pkg/__init__.py": self.init(library), "pkg/codec.abi3.so": build("_codec")}
        _, (fault,), _ = imported(tmp_path, files)
        assert library in fault.text

    @pytest.mark.parametrize(
        ("library", "driver", "says"),
        [("libcuda.so.1", "none", "nor a stub for it"), ("libnvcuvid.so.1", "real", "which this machine's lacks")],
    )  # fmt: skip
    def test_which_driver_there_is(self, tmp_path, build, library, driver, says):
        files = {"pkg/__init__.py": self.init(library), "pkg/codec.abi3.so": build("_codec")}
        rows, faults, _ = imported(tmp_path, files, driver=driver)
        assert faults == []
        assert rows["pkg.codec"].result == "not run"
        assert says in rows["pkg.codec"].text

    @pytest.mark.parametrize("driver", ["stub", "real"])
    def test_libcuda_that_has_to_be_there(self, tmp_path, build, driver):
        files = {"pkg/__init__.py": self.init("libcuda.so.1"), "pkg/codec.abi3.so": build("_codec")}
        rows, (fault,), _ = imported(tmp_path, files, driver=driver)
        assert rows["pkg.codec"].result == "fail"
        assert "libcuda.so.1" in fault.text


def test_what_is_remembered_is_of_these_libraries_of_the_driver(tmp_path, build, monkeypatch):
    """A container gets NVENC between two runs of verify-abi."""
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.setattr("sm121.abi.driver._FOLDERS", (str(folder),))
    (folder / "libcuda.so.1").touch()
    library = folder / "libnvidia-encode.so.1"
    init = (
        "import ctypes, os\n"
        f"ctypes.CDLL({str(library)!r} if os.path.exists({str(library)!r}) else {library.name!r})\n"
    )
    files = {"pkg/__init__.py": init.encode(), "pkg/codec.abi3.so": build("_codec")}
    path = write_wheel(tmp_path, WHEEL, files)
    policy, memory = load_policy(), HashMemory(tmp_path / "hashes.json")
    report = verify([path], policy=policy, target=TARGET, arch="12.1a", cache=tmp_path / "cache")
    python = Interpreter(how="native", version=PYTHON, program=Path(sys.executable))
    stage = Stage(
        context=context(wheel(WHEEL, files), policy=policy, target=TARGET), interpreter=python,
        judged=(path,), around=(), complete=True, stub=None, scratch=tmp_path / "scratch",
    )  # fmt: skip

    def row():
        known = with_dynamic(report, stage, cache=tmp_path / "cache", memory=memory)
        (only,) = known.ran.imports
        return only, known.ran.seconds

    first = row()
    assert first[0].result == "not run"
    assert first == row()
    shutil.copyfile(build.library("int encode(int x) { return x; }"), library)
    assert row()[0].result == "pass"
    library.unlink()
    assert row() == first


class TestUnimported:
    """cuda.core has modules for two releases of CUDA and hides those of the other one."""

    HIDE = b"from cuda.core import cu13\n__path__ = [__path__[0] + '/cu13']\n"

    def files(self, build, *, init=HIDE, **more):
        return {
            "cuda/core/__init__.py": init,
            "cuda/core/cu13/_event.abi3.so": build("_event"),
            "cuda/core/_resource_handles.abi3.so": build("_resource_handles"),
            "cuda/core/cu13/_resource_handles.abi3.so": build("_resource_handles"),
            "cuda/core/cu12/_event.abi3.so": build("_event", **more),
        }

    def test_is_not_run_with_the_reason(self, tmp_path, build):
        files = self.files(build)
        rows, faults, not_run = imported(tmp_path, files)
        assert faults == []
        assert {n: r.result for n, r in rows.items()} == {
            "cuda.core.cu12._event": "not run", "cuda.core.cu13._event": "pass",
            "cuda.core._resource_handles": "not run", "cuda.core.cu13._resource_handles": "pass",
        }  # fmt: skip
        reasons = {one.check: one.reason for one in not_run}
        assert (
            "makes the folder of that CUDA its own" in reasons["import cuda.core._resource_handles"]
        )
        reason = reasons["import cuda.core.cu12._event"]
        assert "takes those of the cuda-bindings that is installed" in reason
        assert reason.endswith("its file was opened, and every symbol found")

    def test_that_may_be_imported_is_imported(self, tmp_path, build):
        rows, _, not_run = imported(tmp_path, self.files(build, init=b""))
        assert {row.result for row in rows.values()} == {"pass"}
        assert not_run == []

    def test_damaged(self, tmp_path, build):
        rows, (fault,), _ = imported(tmp_path, self.files(build, function=GONE))
        assert rows["cuda.core.cu12._event"].result == "fail"
        assert f"undefined symbol: {GONE}" in fault.text

    def test_another_failure_is_not_excused(self, tmp_path, build):
        _, (fault,), _ = imported(tmp_path, self.files(build, init=b"", body="return 0;"))
        assert "cu12" in fault.file
        assert "SystemError" in fault.text


class TestBehindAnotherOfItsName:
    """Only the file whose suffix Python tries first is imported (the build's own, abi3, plain)."""

    def files(self, build, **more):
        return {
            "pkg/__init__.py": b"", f"pkg/x.cpython-{PYTHON.replace('.', '')}-{MACHINE}-linux-gnu.so": build("x"),
            "pkg/x.abi3.so": build("x", **more),
        }  # fmt: skip

    def test_is_not_run_and_its_file_is_opened(self, tmp_path, build):
        rows, faults, not_run = imported(tmp_path, self.files(build, body="return 0;"))
        assert faults == []
        assert {name: row.result for name, row in rows.items()} == {
            "pkg.x": "pass", "pkg.x (pkg/x.abi3.so)": "not run",
        }  # fmt: skip
        (one,) = not_run
        assert one.check == "import pkg.x (pkg/x.abi3.so)"
        assert one.reason.startswith("Python takes pkg/x.cpython-")
        assert one.reason.endswith("for pkg.x; its file was opened, and every symbol found")

    def test_damaged(self, tmp_path, build):
        rows, (fault,), _ = imported(tmp_path, self.files(build, function=GONE))
        assert rows["pkg.x"].result == "pass"
        assert fault.file == "pkg/x.abi3.so"
        assert f"undefined symbol: {GONE}" in fault.text

    def test_the_one_that_is_taken_is_damaged(self, tmp_path, build):
        files = self.files(build)
        path = next(path for path in files if "cpython" in path)
        files[path] = build("x", function=GONE)
        rows, (fault,), _ = imported(tmp_path, files)
        assert rows["pkg.x"].result == "fail"
        assert fault.file == path


class TestTk:
    """Pillow's module for Tk imports tkinter, which each Python without Tk refuses in its own words."""

    def imported(self, tmp_path, build, *, tkinter, **more):
        body = 'if (!PyImport_ImportModule("tkinter")) return 0;'
        files = {
            "PIL/__init__.py": b"", "tkinter/__init__.py": tkinter,
            "PIL/_imagingtk.abi3.so": build("_imagingtk", body=body, **more),
        }  # fmt: skip
        rows, faults, _ = imported(tmp_path, files)
        return rows["PIL._imagingtk"], faults

    @pytest.mark.parametrize(
        "says",
        [
            "No module named 'tkinter'", "No module named '_tkinter'",
            "libtk8.6.so: cannot open shared object file: No such file or directory",
            "libtcl8.6.so: cannot open shared object file: No such file or directory",
        ],
    )  # fmt: skip
    def test_is_not_installed(self, tmp_path, build, says):
        row, faults = self.imported(
            tmp_path, build, tkinter=f"raise ImportError({says!r})".encode()
        )
        assert faults == []
        assert row.result == "not run"
        assert "images for Tk" in row.text

    @pytest.mark.parametrize("says", ["No module named 'PIL._tkinter_finder'", "libX11.so.6: cannot open shared object file"])  # fmt: skip
    def test_another_failure_is_not_excused(self, tmp_path, build, says):
        row, (fault,) = self.imported(
            tmp_path, build, tkinter=f"raise ImportError({says!r})".encode()
        )
        assert row.result == "fail"
        assert says in fault.text

    def test_damaged(self, tmp_path, build):
        """That Tk is missing does not hide a symbol that it lacks."""
        row, (fault,) = self.imported(
            tmp_path, build, tkinter=b"raise ImportError(\"No module named '_tkinter'\")", function=GONE
        )  # fmt: skip
        assert row.result == "fail"
        assert f"undefined symbol: {GONE}" in fault.text


def test_what_policy_lets_fail_is_not_run_with_its_reason(tmp_path, build):
    """numba tries its threading layers in turn; TBB is not there."""
    stub = build.library("int tbb(int x) { return x; }", "-Wl,-soname,libtbb.so.12")
    flags = ["-Wl,--no-as-needed", str(stub)]
    files = {"numba/np/ufunc/tbbpool.abi3.so": build("tbbpool", flags=flags)}
    rows, faults, not_run = imported(tmp_path, files)
    assert faults == []
    row = rows["numba.np.ufunc.tbbpool"]
    assert row.result == "not run"
    assert "libtbb.so.12" in row.text
    assert "numba tries its threading layers" in row.text
    assert [n.reason for n in not_run] == [row.text]


@pytest.mark.parametrize(("body", "says"), [("abort();", "interpreter died"), ("return 0;", "SystemError")])  # fmt: skip
def test_an_init_that_fails_is_a_fault_in_any_wheel(tmp_path, build, body, says):
    files = {"pkg/__init__.py": b"", "pkg/x.abi3.so": build("x", body=body)}
    _, (fault,), _ = imported(tmp_path, files)
    assert says in fault.text


class TestDiedOnce:
    """qemu-user crashes now and then by itself; natively it is a file that aborts the first time."""

    def dies(self, tmp_path, what="import os; os.abort()", *, times=1):
        """Python that aborts as often. what: it does so by that."""
        mark = tmp_path / "died"
        return (
            "import pathlib\n"
            f"_mark = pathlib.Path({str(mark)!r})\n"
            "_died = len(_mark.read_text()) if _mark.exists() else 0\n"
            f"if _died < {times}:\n    _mark.write_text('x' * (_died + 1))\n    {what}\n"
        ).encode()

    def found(self, tmp_path, files, *, emulated=True, operators=()):
        """Rows by name, and findings that are faults."""
        ctx = context(wheel(WHEEL, files), policy=load_policy(), target=TARGET)
        site = tmp_path / "site"
        unpack_site([write_wheel(tmp_path, WHEEL, files)], site)
        modules = extension_modules(ctx, import_roots(site))
        rows = import_all(
            HERE, site, modules, ctx.policy, driver="stub", emulated=emulated, first=["torch"],
            operators=operators,
        )  # fmt: skip
        _, findings, _ = judge_imports(ctx, modules, rows)
        return rows, [f for f in findings if f.severity == "fault"]

    def files(self, build, torch, **more):
        return {
            "torch/__init__.py": torch, "pkg/__init__.py": b"", "pkg/x.abi3.so": build("x"),
            "pkg/y.abi3.so": build("y"), **more,
        }  # fmt: skip

    def test_what_comes_first(self, tmp_path, build):
        rows, faults = self.found(tmp_path, self.files(build, self.dies(tmp_path)))
        assert faults == []
        assert {name: row.result for name, row in rows.items()} == {
            "pkg.x": "pass", "pkg.y": "pass",
        }  # fmt: skip

    def test_what_comes_first_dies_twice(self, tmp_path, build):
        rows, faults = self.found(tmp_path, self.files(build, self.dies(tmp_path, times=2)))
        assert rows["torch"].result == "fail"
        assert sorted(f.names[0] for f in faults) == ["pkg.x", "pkg.y", "torch"]

    def test_natively_once_is_a_fault(self, tmp_path, build):
        files = self.files(build, self.dies(tmp_path))
        assert self.found(tmp_path, files, emulated=False)[1] != []

    def test_what_comes_first_and_fails_is_at_fault(self, tmp_path, build):
        """It has crashed, but what it says the second time is its own."""
        torch = self.dies(tmp_path) + b"raise ImportError('libgone')\n"
        rows, (fault,) = self.found(tmp_path, self.files(build, torch))
        assert fault.text == "torch: ImportError: libgone"
        assert rows["pkg.x"].result == "pass"

    @pytest.mark.parametrize("operators", [(), ("_C.here",)])
    def test_a_module(self, tmp_path, build, operators):
        files = self.files(build, b"class ops:\n  class _C:\n    here = 1\n")
        files["sub/__init__.py"] = self.dies(tmp_path)
        files["sub/z.abi3.so"] = build("z")
        rows, faults = self.found(tmp_path, files, operators=operators)
        assert faults == []
        assert {row.result for row in rows.values()} == {"pass"}
        assert len(rows) == 3 + len(operators)

    @pytest.mark.parametrize(("times", "result"), [(1, "pass"), (2, "fail")])
    def test_an_operator(self, tmp_path, build, times, result):
        torch = (
            b"class _C:\n  def __getattr__(self, name):\n    exec(" + repr(
                self.dies(tmp_path, times=times).decode()).encode() + b", {})\n    return 1\n"
            b"class ops:\n  _C = _C()\n"
        )  # fmt: skip
        rows, faults = self.found(tmp_path, self.files(build, torch), operators=["_C.here"])
        assert rows["torch.ops._C.here"].result == result
        assert [f.names for f in faults] == ([] if result == "pass" else [("torch.ops._C.here",)])
        assert rows["pkg.y"].result == "pass"

    def test_a_library_that_is_opened_before(self, tmp_path, build):
        """Its constructor aborts the first time."""
        mark = tmp_path / "opened"
        source = (
            "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
            "int torch_like(int x) { return x; }\n"
            "__attribute__((constructor)) static void start(void) {\n"
            f'  if (access("{mark}", F_OK)) {{ fclose(fopen("{mark}", "w")); abort(); }}\n}}\n'
        )
        path = "cuda/core/cu13/_tensor_bridge.abi3.so"
        files = self.files(build, b"") | {
            "torch/lib/libtorch.so": build.library(source).read_bytes(),
            path: build("_tensor_bridge", function="torch_like"),
        }
        rows, faults = self.found(tmp_path, files)
        assert mark.exists()
        assert faults == []
        assert rows["cuda.core.cu13._tensor_bridge"].result == "pass"
        assert "torch/lib/libtorch.so" not in rows
