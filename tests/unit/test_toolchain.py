"""The toolchain file and the environment of vLLM's build."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sm121.compile import toolchain
from sm121.compile.stage import forget_generated
from sm121.compile.toolchain import (
    NVCC_PREFIX_MAP,
    Tools,
    build_environment,
    compiler_cache,
    prefix_maps,
    toolchain_text,
)
from sm121.toolkit.machine import Compilers

HOME = Path(tempfile.mkdtemp(prefix="sm121-home-"))
PREFIXES = {"/b/tree": "build", "/b/tree/src": "vllm", "/b/cuda": "cuda"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "host_machine", lambda: "x86_64")


def tools(machine: str) -> Tools:
    return Tools(
        machine=machine,
        cuda=Path("/b/cuda"),
        torch=Path("/b/site"),
        python_include=Path("/b/python"),
        python_version="3.12",
        environment=Path("/b/env"),
        compilers=Compilers(cc=Path("/usr/bin/the-gcc"), cxx=Path("/usr/bin/the-g++"), version="12", libc="glibc 2.36"),
    )  # fmt: skip


@pytest.mark.usefixtures("host")
def test_cross_names_the_target_and_its_soabi() -> None:
    lines = toolchain_text(tools("aarch64"), prefixes=PREFIXES, variables={}).splitlines()
    for wanted in (
        "set(CMAKE_SYSTEM_NAME Linux)",
        "set(CMAKE_SYSTEM_PROCESSOR aarch64)",
        "set(Python_SOABI cpython-312-aarch64-linux-gnu)",
        "set(Python_SOSABI abi3)",
    ):
        assert wanted in lines


@pytest.mark.usefixtures("host")
def test_native_is_not_a_cross_build_for_cmake() -> None:
    text = toolchain_text(tools("x86_64"), prefixes=PREFIXES, variables={})
    assert "CMAKE_SYSTEM" not in text
    assert "SOABI" not in text
    assert "TRY_COMPILE" not in text


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_both_ways_have_compilers_torch_and_cuda_of_the_target(machine: str) -> None:
    lines = toolchain_text(tools(machine), prefixes=PREFIXES, variables={}).splitlines()
    for wanted in (
        "set(CMAKE_C_COMPILER /usr/bin/the-gcc)",
        "set(CMAKE_CXX_COMPILER /usr/bin/the-g++)",
        "set(CMAKE_CUDA_COMPILER /b/cuda/bin/nvcc)",
        "set(CMAKE_CUDA_HOST_COMPILER /usr/bin/the-g++)",
        "set(Torch_DIR /b/site/torch/share/cmake/Torch)",
        "set(Caffe2_DIR /b/site/torch/share/cmake/Caffe2)",
        "set(Python_INCLUDE_DIR /b/python)",
        "set(CUDA_TOOLKIT_ROOT_DIR /b/cuda)",
        "set(CMAKE_SKIP_RPATH ON)",
    ):
        assert wanted in lines


def test_paths_are_mapped_absolute_and_as_ccache_makes_them() -> None:
    """ccache compiles by paths relative to ninja's folder; both must leave the same bytes."""
    maps = prefix_maps(
        {Path("/b/tree/src"): "vllm", Path("/b/cuda"): "cuda"}, ninja_tree=Path("/b/tree/ninja-1a")
    )
    assert maps == {
        "/b/tree/src": "vllm", "/b/cuda": "cuda", "../../src": "vllm", "../../../cuda": "cuda",
    }  # fmt: skip


@pytest.mark.usefixtures("host")
def test_build_paths_are_mapped_the_longest_last() -> None:
    """GCC takes the last option that matches: the shorter prefix must not win."""
    lines = toolchain_text(tools("x86_64"), prefixes=PREFIXES, variables={}).splitlines()
    (cxx,) = (line for line in lines if line.startswith("set(CMAKE_CXX_FLAGS_INIT"))
    assert cxx.index("/b/tree=build") < cxx.index("/b/tree/src=vllm")
    assert cxx.count("-ffile-prefix-map=") == 3
    (cuda,) = (line for line in lines if line.startswith("set(CMAKE_CUDA_FLAGS_INIT"))
    inside = cuda.split('"')[1]
    assert inside.startswith("-Xcompiler=")
    assert " " not in inside


@pytest.mark.usefixtures("host")
def test_linker_flags_are_the_same_for_every_distribution() -> None:
    used = tools("x86_64")
    text = toolchain_text(used, prefixes=PREFIXES, variables={})
    # Crossing, CMake can't find out where CUDA's static libraries are.
    assert text.count(f"-Wl,--as-needed,-s,--build-id=sha1 -L{used.cuda}/lib64") == 2


@pytest.mark.usefixtures("host")
def test_third_party_folders_are_named_to_cmake() -> None:
    text = toolchain_text(
        tools("aarch64"), prefixes={}, variables={"CUTLASS_INCLUDE_DIR": Path("/b/cutlass/include")}
    )
    assert "set(CUTLASS_INCLUDE_DIR /b/cutlass/include)\n" in text


def environment(**changes: object) -> dict[str, str]:
    arguments: dict[str, object] = {
        "toolchain": Path("/b/tree/toolchain.cmake"),
        "components": ("spinloop", "fs_io_C"),
        "arch": "12.1a",
        "jobs": 3,
        "version": "0.26.0+sm121.smoke.1a2b3c4d",
        "epoch": 1784975693,
        "cache_base": Path("/b"),
        "home": HOME,
        "sources": {"VLLM_CUTLASS_SRC_DIR": Path("/b/cutlass")},
        "ccache_dir": Path("/c/ccache"),
        "replaced": ("vllm", "cuda"),
        "ninja": Path("/b/ninja"),
        "settings": Path("/b/log/launch.json"),
        **changes,
    }
    return build_environment(tools("aarch64"), **arguments)  # type: ignore[arg-type]


def test_setup_gets_what_it_was_asked_to_build() -> None:
    result = environment()
    expected = {
        "TORCH_CUDA_ARCH_LIST": "12.1a",
        "VLLM_BUILD_COMPONENTS": "spinloop,fs_io_C",
        "VLLM_VERSION_OVERRIDE": "0.26.0+sm121.smoke.1a2b3c4d",
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_CUTLASS_SRC_DIR": "/b/cutlass",
        "MAX_JOBS": "3",
        "SOURCE_DATE_EPOCH": "1784975693",
        "CUDA_HOME": "/b/cuda",
        "CMAKE_TOOLCHAIN_FILE": "/b/tree/toolchain.cmake",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    assert {name: result.get(name) for name in expected} == expected


def test_nothing_of_the_user_leaks_into_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CFLAGS", "CXXFLAGS", "LD_LIBRARY_PATH", "PYTHONPATH", "CMAKE_ARGS",
                 "TORCH_CUDA_ARCH_LIST", "VLLM_USE_PRECOMPILED", "CUDA_HOME", "MAX_JOBS"):  # fmt: skip
        monkeypatch.setenv(name, "of-the-user")
    assert "of-the-user" not in environment().values()


def test_home_of_the_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """distutils and ccache take configuration from there."""
    monkeypatch.setenv("HOME", "/home/of-the-user")
    assert environment()["HOME"] == str(HOME)
    assert not list(HOME.iterdir())


def test_path_starts_with_our_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(["/opt/first", "", "/usr/bin", "/bin"]))
    path = environment()["PATH"].split(os.pathsep)
    assert path == ["/b/env/bin", "/b/cuda/bin", "/opt/first", "/usr/bin", "/bin"]


def test_compiler_cache_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CCACHE_DISABLE", raising=False)
    assert "CCACHE_DISABLE" not in environment()
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    assert environment()["CCACHE_DISABLE"] == "1"


def test_cache_key_holds_what_paths_are_replaced_by_and_not_the_paths() -> None:
    """cases.md 23. The prefix maps are left out of the key, so the names must be in it."""
    first, renamed = environment(), environment(replaced=("vllm", "nvidia"))
    assert first["CCACHE_IGNOREOPTIONS"] == f"{NVCC_PREFIX_MAP}*"
    assert NVCC_PREFIX_MAP in toolchain_text(tools("aarch64"), prefixes={"/b": "b"}, variables={})
    assert first["CCACHE_NAMESPACE"] != renamed["CCACHE_NAMESPACE"]
    assert first["CCACHE_NAMESPACE"] == environment(replaced=("cuda", "vllm"))["CCACHE_NAMESPACE"]


def test_store_that_machines_share_is_the_users_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CCACHE_REMOTE_STORAGE" not in environment()
    monkeypatch.setenv("CCACHE_REMOTE_STORAGE", "file:/nfs/ccache")
    assert environment()["CCACHE_REMOTE_STORAGE"] == "file:/nfs/ccache"


def test_launcher_and_sorted_ninja_are_what_cmake_uses() -> None:
    text = toolchain_text(
        tools("aarch64"), prefixes={}, variables={}, launcher=["/p", "-IS", "/l.py"]
    )
    for language in ("C", "CXX", "CUDA"):
        name = f"CMAKE_{language}_COMPILER_LAUNCHER"
        assert f"set({name} /p -IS /l.py $CACHE{{{name}}})" in text
    assert environment()["CMAKE_ARGS"] == "-DCMAKE_MAKE_PROGRAM=/b/ninja"
    assert environment()["SM121_LAUNCH"] == "/b/log/launch.json"


def test_system_folders_are_always_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md 20: an ssh shell may have no PATH worth the name."""
    monkeypatch.setenv("PATH", "")
    path = environment()["PATH"].split(os.pathsep)
    assert path == ["/b/env/bin", "/b/cuda/bin", "/usr/bin", "/bin"]


def test_compiler_cache_is_the_one_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_cache(str(tmp_path)) is None
    (tmp_path / "ccache").write_text("#!/bin/sh\n")
    (tmp_path / "ccache").chmod(0o755)
    assert compiler_cache(str(tmp_path)) == "ccache"


def test_cmake_forgets_that_it_has_generated_what_is_gone(tmp_path: Path) -> None:
    """It runs a generating script only if the script's hash is not the one that it remembers."""
    cache = tmp_path / "temp.linux/CMakeCache.txt"
    cache.parent.mkdir()
    cache.write_text(
        "//x\nMOE_MARLIN_GEN_SCRIPT_HASH_AND_ARCH:STRING=82e9(ARCH:12.0)\nCMAKE_BUILD_TYPE:STRING=Release\n"
    )
    forget_generated(tmp_path)
    assert cache.read_text() == "//x\nCMAKE_BUILD_TYPE:STRING=Release\n"
    before = cache.stat()
    forget_generated(tmp_path)
    assert (cache.stat().st_ino, cache.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
