"""Real compilers: the driver stub, headers for crossing, versions that are refused."""

from __future__ import annotations

import ctypes
import platform
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from sm121.errors import CheckFailed, CompilerMissing
from sm121.toolkit import machine
from sm121.toolkit.driver_stub import build_stub, exported_names
from sm121.toolkit.machine import Compilers, find_compilers, host_compilers, host_machine
from sm121.toolkit.python import Interpreter, cross_headers, find_interpreter
from support.tools import run, tool

pytestmark = pytest.mark.compiler
OTHER = "aarch64" if platform.machine() == "x86_64" else "x86_64"


@pytest.fixture(scope="module")
def cross() -> Compilers:
    return find_compilers(OTHER)


@pytest.fixture(scope="module")
def native() -> Compilers:
    return find_compilers(host_machine())


# --- the driver stub ----------------------------------------------------------------

# As `cumem_allocator` is linked: C++ code that calls the driver, --as-needed.
USER = "int cuMemRelease(unsigned long long); int f(void) { return cuMemRelease(1); }\n"
HEADER = "CUresult CUDAAPI cuMemRelease(int);\n#define cuMemAlloc cuMemAlloc_v2\n" + "".join(
    f"CUresult CUDAAPI cuFiller{n}(void);\n" for n in range(120)
)


def needed(library: Path) -> list[str]:
    dynamic = run(tool("readelf", "binutils"), "-d", library).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)


def link(compilers: Compilers, stub: Path, folder: Path) -> Path:
    source, output = folder / "user.c", folder / "user.so"
    source.write_text(USER)
    run(
        compilers.cc, "-shared", "-fPIC", "-nostdlib", "-o", output, source,
        f"-L{stub.parent}", "-Wl,--as-needed", "-lcuda",
    )  # fmt: skip
    return output


@pytest.mark.parametrize("which", ["cross", "native"])
def test_stub_keeps_the_driver_needed(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    compilers = request.getfixturevalue(which)
    (tmp_path / "cuda.h").write_text(HEADER)
    stub = tmp_path / "lib/stubs/libcuda.so"
    names = build_stub(tmp_path / "cuda.h", stub, compilers, log=tmp_path / "log")
    assert {"cuMemRelease", "cuMemAlloc_v2"} <= set(names)
    dynamic = run(tool("readelf", "binutils"), "-d", stub).stdout
    assert "Library soname: [libcuda.so.1]" in dynamic
    assert needed(link(compilers, stub, tmp_path)) == ["libcuda.so.1"]
    assert [p.name for p in stub.parent.iterdir()] == ["libcuda.so"]


def test_empty_stub_loses_it(cross: Compilers, tmp_path: Path) -> None:
    """The fault that the real names are for: it links, and NEEDED is gone."""
    (tmp_path / "empty.c").write_text("")
    run(
        cross.cc, "-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libcuda.so.1",
        "-o", tmp_path / "libcuda.so", tmp_path / "empty.c",
    )  # fmt: skip
    assert needed(link(cross, tmp_path / "libcuda.so", tmp_path)) == []


def test_stub_answers_with_the_drivers_own_error(native: Compilers, tmp_path: Path) -> None:
    (tmp_path / "cuda.h").write_text(HEADER)
    build_stub(tmp_path / "cuda.h", tmp_path / "libcuda.so", native, log=tmp_path / "log")
    assert ctypes.CDLL(str(tmp_path / "libcuda.so")).cuMemRelease(1) == 34


@pytest.mark.network
def test_stub_of_the_real_header_has_what_vllm_calls(
    locked_wheel, pristine_tree: Path, cross: Compilers, tmp_path: Path
) -> None:
    # cuda.h is in the runtime's or the crt's wheel, by release: look where the toolkit looks.
    for distribution in ("nvidia-cuda-runtime", "nvidia-cuda-crt"):
        wheel = locked_wheel(distribution, kind="host")
        with zipfile.ZipFile(wheel) as archive:
            found = [n for n in archive.namelist() if n.endswith("/include/cuda.h")]
            if found:
                (tmp_path / "cuda.h").write_bytes(archive.read(found[0]))
                break
    else:
        pytest.fail("no wheel of the lock has cuda.h")
    stub = tmp_path / "libcuda.so"
    names = set(build_stub(tmp_path / "cuda.h", stub, cross, log=tmp_path / "log"))
    assert len(names) > 400
    exported = {
        line.split()[-1]
        for line in run(tool("nm", "binutils"), "-D", "--defined-only", stub).stdout.splitlines()
    }
    assert exported == names
    source = (pristine_tree / "csrc/cumem_allocator.cpp").read_text()
    called = set(re.findall(r"\b(cu(?:Mem|Ctx|Device|Get|Stream|Init)\w*)\(", source))
    assert "cuMemCreate" in called
    versions = {n.removesuffix("_v2") for n in names} | names
    assert called <= versions
    assert {"cuMemCreate", "cuMemAlloc_v2", "cuMemRelease"} <= exported
    assert needed(link(cross, stub, tmp_path)) == ["libcuda.so.1"]


def test_exported_names_compile_as_c(native: Compilers, tmp_path: Path) -> None:
    (tmp_path / "cuda.h").write_text(HEADER)
    assert exported_names(HEADER) == build_stub(
        tmp_path / "cuda.h", tmp_path / "x.so", native, log=tmp_path / "log"
    )


# --- headers for crossing -----------------------------------------------------------


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return find_interpreter(["3.12", "3.11"])


def test_headers_of_this_machine_describe_the_target(
    interpreter: Interpreter, cross: Compilers, tmp_path: Path
) -> None:
    out = tmp_path / "python"
    cross_headers(interpreter, out, cross, log=tmp_path / "log")
    config = (out / "pyconfig.h").read_text()
    assert re.search(r"^#define SIZEOF_LONG 8$", config, re.MULTILINE)
    assert not re.search(r"^#define HAVE_GCC_ASM_FOR_X", config, re.MULTILINE)
    assert not (out / "sm121_probe.c").exists()
    source = tmp_path / "x.c"
    source.write_text("#include <Python.h>\nPy_ssize_t size = sizeof(PyObject);\n")
    run(cross.cc, f"-I{out}", "-fsyntax-only", source)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("#define SIZEOF_LONG 8", "#define SIZEOF_LONG 4"),
        ("#define SIZEOF_WCHAR_T 4", "#define SIZEOF_WCHAR_T 2"),
        ("#define SIZEOF_VOID_P 8", "#define SIZEOF_VOID_P 4"),
        ("#define ALIGNOF_LONG 8", "#define ALIGNOF_LONG 4"),
        ("#define SIZEOF_LONG_DOUBLE 16", "#define SIZEOF_LONG_DOUBLE 8"),
    ],
)
def test_wrong_size_is_refused_here_and_not_by_a_crash_there(
    interpreter: Interpreter, cross: Compilers, tmp_path: Path, old: str, new: str
) -> None:
    right = tmp_path / "right"
    cross_headers(interpreter, right, cross, log=tmp_path / "log")
    text = (right / "pyconfig.h").read_text()
    assert old in text
    lie = tmp_path / "pyconfig.h"
    lie.write_text(text.replace(old, new))
    with pytest.raises(CheckFailed, match="does not describe the target") as raised:
        cross_headers(
            replace(interpreter, config_h=lie), tmp_path / "out", cross, log=tmp_path / "log2"
        )
    assert str(tmp_path / "log2") in raised.value.cause
    assert new.split()[1] in (tmp_path / "log2").read_text()


def test_header_without_sizes_is_refused(
    interpreter: Interpreter, cross: Compilers, tmp_path: Path
) -> None:
    lie = tmp_path / "pyconfig.h"
    lie.write_text("#define SIZEOF_LONG 8\n")
    with pytest.raises(CheckFailed):
        cross_headers(
            replace(interpreter, config_h=lie), tmp_path / "out", cross, log=tmp_path / "log"
        )


# --- interpreters and compilers -----------------------------------------------------


def test_chosen_interpreter_is_used_or_refused_by_name(tmp_path: Path) -> None:
    found = find_interpreter(["3.12", "3.11"])
    again = find_interpreter([found.version], environment={"SM121_PYTHON": str(found.executable)})
    assert again.executable == found.executable
    with pytest.raises(CompilerMissing, match=r"No CPython 2\.0 with headers") as raised:
        find_interpreter(["2.0"], environment={"SM121_PYTHON": str(found.executable)})
    assert str(found.executable) in raised.value.cause
    assert "SM121_PYTHON" in raised.value.remedy


def fake_compiler(folder: Path, version: str) -> None:
    for name in (f"{OTHER}-linux-gnu-gcc", f"{OTHER}-linux-gnu-g++"):
        macros = "#define __GLIBC__ 2\\n#define __GLIBC_MINOR__ 39"
        (folder / name).write_text(
            f"#!/bin/sh\ncase $1 in -E) printf '{macros}\\n';; *) echo {version};; esac\n"
        )
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("version", ["11.3.0", "12.2.0", "13.3.0", "15.2.1"])
def test_compiler_of_a_good_version_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    fake_compiler(tmp_path, version)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = find_compilers(OTHER)
    assert (found.version, found.libc) == (version, "glibc 2.39")
    assert found.cxx == tmp_path / f"{OTHER}-linux-gnu-g++"


@pytest.mark.parametrize("version", ["11.2.0", "9.4.0", "16.1.0", "nonsense"])
def test_compiler_that_vllm_or_nvcc_would_refuse_is_refused_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    fake_compiler(tmp_path, version)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(CompilerMissing, match=f"is version {re.escape(version)}") as raised:
        find_compilers(OTHER)
    assert raised.value.exit_code == 3
    assert "11.3" in raised.value.cause
    assert "SM121_CXX" in raised.value.remedy


def test_compilers_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cross: Compilers
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(machine, "host_machine", lambda: OTHER)
    monkeypatch.setenv("SM121_CC", str(cross.cc))
    monkeypatch.setenv("SM121_CXX", str(cross.cxx))
    assert find_compilers(OTHER).cxx == cross.cxx


def name_compilers(folder: Path, monkeypatch: pytest.MonkeyPatch, triple: str) -> Path:
    """Compilers that print a triple, named by the variables; returns the C++ one."""
    for variable, name in (("SM121_CC", "my-cc"), ("SM121_CXX", "my-c++")):
        (folder / name).write_text(
            "#!/bin/sh\ncase $1 in\n"
            f"-dumpmachine) echo {triple};;\n"
            "-E) printf '#define __GLIBC__ 2\\n#define __GLIBC_MINOR__ 39\\n';;\n"
            "*) echo 12.2.0;;\nesac\n"
        )
        (folder / name).chmod(0o755)
        monkeypatch.setenv(variable, str(folder / name))
    return folder / "my-c++"


@pytest.mark.parametrize("rest", ["linux-gnu", "unknown-linux-gnu", "redhat-linux", "pc-linux-gnu"])
def test_named_compilers_are_the_targets_and_not_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: Compilers, rest: str
) -> None:
    cxx = name_compilers(tmp_path, monkeypatch, f"{OTHER}-{rest}")
    assert find_compilers(OTHER).cxx == cxx
    assert host_compilers() == native


@pytest.mark.parametrize("rest", ["linux-gnu", "pc-linux-gnu", "unknown-linux-gnu"])
def test_named_compilers_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    cxx = name_compilers(tmp_path, monkeypatch, f"{host_machine()}-{rest}")
    assert find_compilers(host_machine()).cxx == host_compilers().cxx == cxx


def test_one_of_the_two_may_be_named(
    monkeypatch: pytest.MonkeyPatch, cross: Compilers, native: Compilers
) -> None:
    monkeypatch.setenv("SM121_CC", "")
    monkeypatch.setenv("SM121_CXX", str(cross.cxx))
    assert (find_compilers(OTHER), host_compilers()) == (cross, native)


@pytest.mark.parametrize(
    ("triple", "says"),
    [(f"{host_machine()}-linux-gnu", host_machine()), ("", "no machine that it names")],
)
def test_named_compilers_for_another_machine_are_refused_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, triple: str, says: str
) -> None:
    """And not by the linker, after hours."""
    cxx = name_compilers(tmp_path, monkeypatch, triple)
    with pytest.raises(CompilerMissing, match=f"^No compiler for {OTHER}: ") as raised:
        find_compilers(OTHER)
    assert f"SM121_CC={tmp_path / 'my-cc'} makes code for {says}" in raised.value.what
    assert f"SM121_CXX={cxx} makes code for {says}" in raised.value.what
    assert f"{OTHER}-linux-gnu-g++" in raised.value.remedy


def test_the_cross_compiler_makes_code_for_the_target(cross: Compilers, tmp_path: Path) -> None:
    source = tmp_path / "x.cpp"
    source.write_text("int f() { return 1; }\n")
    run(cross.cxx, "-c", "-o", tmp_path / "x.o", source)
    assert "AArch64" in run(tool("readelf", "binutils"), "-h", tmp_path / "x.o").stdout
