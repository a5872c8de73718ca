"""DeepGEMM's library: its compiler and the Python that answers for the target."""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from sm121.compile import compile_and_link
from sm121.compile.compile_and_link import commands
from sm121.compile.deepgemm import deepgemm_environment
from sm121.compile.toolchain import Tools
from sm121.toolkit.machine import find_compilers
from sm121.toolkit.python import Interpreter, find_interpreter
from support.tools import run

pytestmark = pytest.mark.compiler
OTHER = "aarch64" if platform.machine() == "x86_64" else "x86_64"
ASKED = "import sysconfig, json; print(json.dumps([sysconfig.get_config_var(n) for n in ('SOABI', 'EXT_SUFFIX', 'INCLUDEPY')]))"


def test_one_command_becomes_two() -> None:
    compiling, linking = commands(
        [
            "o/x.o",
            "--",
            "launch",
            "--",
            "c++",
            "--",
            "-Imine",
            "--",
            "-Lmine",
            "--",
            "-shared",
            "-fPIC",
            "-O3",
            "-Itheirs",
            "src/x.cpp",
            "-Ltheirs",
            "-ltorch",
            "-o",
            "out/_C.so",
        ]
    )
    assert compiling == [
        "launch",
        "c++",
        "-Imine",
        "-fPIC",
        "-O3",
        "-Itheirs",
        "-c",
        "src/x.cpp",
        "-o",
        "o/x.o",
    ]
    assert linking == [
        "c++",
        "-fPIC",
        "-Lmine",
        "o/x.o",
        "-shared",
        "-Ltheirs",
        "-ltorch",
        "-o",
        "out/_C.so",
    ]


def test_other_commands_are_refused() -> None:
    with pytest.raises(ValueError, match="not a shared library of one source"):
        commands(
            ["o", "--", "--", "c++", "--", "--", "--", "-shared", "a.cpp", "b.cpp", "-o", "c.so"]
        )


def tools(machine: str, folder: Path) -> Tools:
    return Tools(
        machine=machine, cuda=folder / "cuda", torch=folder / "site", python_include=folder,
        python_version="3.11", environment=folder / "env", compilers=find_compilers(machine),
    )  # fmt: skip


@pytest.fixture
def interpreter() -> Interpreter:
    return find_interpreter([f"{sys.version_info[0]}.{sys.version_info[1]}"])


@pytest.mark.parametrize("machine", [platform.machine(), OTHER])
def test_python_answers_as_the_targets(
    machine: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    variables = deepgemm_environment(
        tools(machine, tmp_path), interpreter, work=tmp_path, prefixes={}, launcher=(),
        log=tmp_path / "log",
    )  # fmt: skip
    said = run(variables["DEEPGEMM_PYTHON_INTERPRETERS"], "-c", ASKED, env={}).stdout
    soabi, suffix, include = json.loads(said)
    tag = interpreter.version.replace(".", "")
    assert soabi == f"cpython-{tag}-{machine}-linux-gnu"
    assert suffix == f".{soabi}.so"
    assert Path(include, "Python.h").is_file()
    assert (Path(include) == interpreter.include) is (machine == platform.machine())


def test_scripts_that_a_killed_run_left_without_their_mode_can_be_run(
    interpreter: Interpreter, tmp_path: Path
) -> None:
    """Their text is as it should be, and so are their times: they are not written again."""

    def make() -> list[Path]:
        variables = deepgemm_environment(
            tools(platform.machine(), tmp_path), interpreter, work=tmp_path, prefixes={},
            launcher=(), log=tmp_path / "log",
        )  # fmt: skip
        return [Path(variables[name]) for name in ("CXX", "DEEPGEMM_PYTHON_INTERPRETERS")]

    scripts = make()
    written = [script.stat().st_mtime_ns for script in scripts]
    for script in scripts:
        script.chmod(0o644)
    assert make() == scripts
    assert all(script.stat().st_mode & 0o777 == 0o755 for script in scripts)
    assert [script.stat().st_mtime_ns for script in scripts] == written


def test_compiler_makes_a_library_without_build_paths(
    interpreter: Interpreter, tmp_path: Path
) -> None:
    """Our torch goes first; the launcher sees an ordinary compile."""
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    for folder, value in (("site/torch/include", 42), ("theirs", 1)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "answer.h").write_text(f"#define ANSWER {value}\n")
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\necho "$@" > seen\nexec "$@"\n')
    launcher.chmod(0o755)
    source = tmp_path / "src/x.cpp"
    source.parent.mkdir()
    source.write_text(
        '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
        'extern "C" const char *where() { return __FILE__; }\n'
    )
    variables = deepgemm_environment(
        tools(platform.machine(), tmp_path), interpreter, work=tmp_path / "work",
        prefixes={str(tmp_path): "build"}, launcher=[launcher], log=tmp_path / "log",
    )  # fmt: skip
    run(
        variables["CXX"], "-shared", "-fPIC", f"-I{tmp_path}/theirs", source, "-o", tmp_path / "_C.so",
        cwd=tmp_path,
    )  # fmt: skip
    library = ctypes.CDLL(str(tmp_path / "_C.so"))
    library.where.restype = ctypes.c_char_p
    assert (library.answer(), library.where()) == (42, b"build/src/x.cpp")
    assert str(tmp_path).encode() not in (tmp_path / "_C.so").read_bytes()
    assert " -c " in (tmp_path / "seen").read_text()
    assert "CMakeFiles/_deep_gemm_C.dir/python_api.cpp.o" in (tmp_path / "seen").read_text()


def test_failed_compile_is_a_failure() -> None:
    done = subprocess.run(
        [sys.executable, "-IS", compile_and_link.__file__, "x.o", "--", "--", "false", "--", "--",
         "--", "-shared", "x.cpp", "-o", "x.so"],
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
