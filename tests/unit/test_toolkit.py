"""Names of the driver stub, linker names, compilers that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm121.errors import CheckFailed, CompilerMissing, DiskFull, ToolFailed
from sm121.toolkit import machine, python
from sm121.toolkit.cuda import link_names
from sm121.toolkit.driver_stub import exported_names
from sm121.toolkit.machine import find_compilers, install_hint, require_programs

SNIPPET = """
/* CUresult CUDAAPI cuInOldComment(void); */
// CUresult CUDAAPI cuInLineComment(void);
#define cuMemAlloc                          cuMemAlloc_v2
  #  define cuStreamBeginCapture  cuStreamBeginCapture_v2
#define cuMemcpy   __CUDA_API_PTDS(cuMemcpy)
#define CUDA_VERSION 13000
typedef CUresult (CUDAAPI *CUsomething)(void);
CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size);
CUresult CUDAAPI
    cuMemRelease (CUmemGenericAllocationHandle handle);
cudaError_t cudaMalloc(void);
"""


def padded(snippet: str, count: int = 100) -> str:
    return snippet + "".join(f"CUresult CUDAAPI cuFiller{n}(void);\n" for n in range(count))


def test_names_are_declared_versioned_and_per_thread_ones() -> None:
    names = exported_names(padded(SNIPPET))
    assert {n for n in names if "Filler" not in n} == {
        "cuMemAlloc_v2", "cuStreamBeginCapture_v2", "cuMemcpy", "cuMemCreate", "cuMemRelease",
    }  # fmt: skip
    assert names == sorted(names)


def test_header_with_few_names_is_refused() -> None:
    """A stub without names links, and loses NEEDED: better stop here."""
    with pytest.raises(CheckFailed, match="only 5 driver functions"):
        exported_names(SNIPPET)


def test_linker_names_are_made_beside_the_versioned_files(tmp_path: Path) -> None:
    for name in ("libcudart.so.13", "libnvrtc-builtins.so.13.0", "libx.a", "libown.so.1"):
        (tmp_path / name).write_text(name)
    (tmp_path / "libown.so").write_text("already here")
    link_names(tmp_path)
    assert (tmp_path / "libcudart.so").readlink() == Path("libcudart.so.13")
    assert (tmp_path / "libnvrtc-builtins.so").read_text() == "libnvrtc-builtins.so.13.0"
    assert (tmp_path / "libown.so").read_text() == "already here"
    assert not (tmp_path / "libx.so").exists()


# --- compilers that are missing -----------------------------------------------------


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "host_machine", lambda: "x86_64")
    return tmp_path


def put_program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("target", "name", "package"),
    [
        ("aarch64", "aarch64-linux-gnu-gcc", "g++-aarch64-linux-gnu"),
        ("x86_64", "gcc", "g++"),
    ],
)
def test_missing_compiler_comes_with_the_install_command(
    empty_path: Path, target: str, name: str, package: str
) -> None:
    put_program(empty_path, "apt-get")
    with pytest.raises(CompilerMissing, match=f": {name} was not found") as raised:
        find_compilers(target)
    assert raised.value.exit_code == 3
    assert f"apt-get install -y {package}, or" in raised.value.remedy
    assert "SM121_CXX" in raised.value.remedy
    assert ("cross compiler" in raised.value.cause) == (target == "aarch64")


def test_missing_cplusplus_alone_is_found_too(empty_path: Path) -> None:
    put_program(empty_path, "aarch64-linux-gnu-gcc")
    with pytest.raises(CompilerMissing, match=r"aarch64-linux-gnu-g\+\+"):
        find_compilers("aarch64")


def test_missing_program_of_upstreams_build_is_told_before_it_runs(empty_path: Path) -> None:
    put_program(empty_path, "apt-get")
    programs = {"patch": "CMake mends a header with it"}
    with pytest.raises(CompilerMissing, match=r"^patch was not found") as raised:
        require_programs(programs)
    assert raised.value.exit_code == 3
    assert raised.value.cause == "CMake mends a header with it"
    assert "apt-get install -y patch" in raised.value.remedy
    put_program(empty_path, "patch")
    require_programs(programs)
    require_programs({})


def test_install_command_of_this_distribution(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "geteuid", lambda: 1000)
    assert install_hint("g++", "gcc-c++") == "install g++ (Debian's name) with your package manager"
    put_program(empty_path, "dnf")
    assert install_hint("g++", "gcc-c++") == "sudo dnf install -y gcc-c++"
    put_program(empty_path, "apt-get")
    assert install_hint("g++", "gcc-c++") == "sudo apt-get install -y g++"
    monkeypatch.setattr(machine.os, "geteuid", lambda: 0)
    assert install_hint("g++", "gcc-c++") == "apt-get install -y g++"


def test_full_disk_while_installing_is_one_and_leaves_no_heap_of_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv never looks for the temporary folders of a run that ended in the middle."""
    left = tmp_path / "env/uv-cache/.tmpAbc"
    left.mkdir(parents=True)

    def run(argv: Sequence[object], **_: object) -> None:
        if "install" in argv:
            raise ToolFailed(
                "uv failed", returncode=2, tail=["cause: No space left on device (os error 28)"]
            )

    monkeypatch.setattr(python.proc, "run", run)
    monkeypatch.setattr(python, "uv_binary", lambda: "uv")
    folder = tmp_path / "env/1.2.3"
    folder.mkdir()
    interpreter = SimpleNamespace(executable=Path("/python"))
    with pytest.raises(DiskFull, match="No space left") as raised:
        python.make_environment(folder, interpreter, [], log=tmp_path / "log")
    assert (raised.value.exit_code, left.exists()) == (3, False)
