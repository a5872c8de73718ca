"""DeepGEMM's host library, which vLLM builds by a script of its own, for one CPython.

tools/build_deepgemm_C.py takes the compiler from CXX, torch from the Python that runs it, and the
name and headers of the extension from a Python of the target (DEEPGEMM_PYTHON_INTERPRETERS). Both
programs are ours here: a compiler that takes the *target's* torch and the flags of all other
libraries (no build path, no RPATH, stripped), and the build host's CPython that answers as the
target's would, by the variable that CPython has for cross builds (_PYTHON_SYSCONFIGDATA_NAME).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from pprint import pformat

from sm121.compile import compile_and_link
from sm121.compile.toolchain import LINK_FLAGS, Tools, prefix_flags, prefix_maps
from sm121.files import fresh_directory, write_atomic
from sm121.proc import pasteable
from sm121.toolkit.deepgemm import COMPONENT
from sm121.toolkit.python import Interpreter, cross_headers

_SYSCONFIG = "_sysconfigdata_sm121"


def deepgemm_environment(
    tools: Tools,
    interpreter: Interpreter,
    *,
    work: Path,
    prefixes: Mapping[str, str],
    launcher: Sequence[str | Path],
    log: Path,
) -> dict[str, str]:
    """Variables for tools/build_deepgemm_C.py. work: folder for what they name."""
    folder = work / "deepgemm"
    headers = interpreter.include
    if tools.cross:
        headers = folder / "python"
        with fresh_directory(headers) as fresh:
            cross_headers(interpreter, fresh, tools.compilers, log=log)
    # The script runs compilers where ninja does: in setup.py's build_temp.
    maps = {**prefixes, **prefix_maps({headers: "python"}, ninja_tree=work / "ninja")}
    torch = tools.torch / "torch"
    includes = [torch / "include", torch / "include/torch/csrc/api/include"]
    compiler = pasteable(
        [
            tools.environment / "bin/python", "-IS", compile_and_link.__file__,
            # As CMake would call it, so that it is recorded as an object of this component.
            f"CMakeFiles/{COMPONENT}.dir/python_api.cpp.o", "--", *launcher, "--",
            tools.compilers.cxx, "--", *prefix_flags(maps),
            *(f"-I{path}" for path in includes), "--", f"-L{torch / 'lib'}", *LINK_FLAGS, "--",
        ]
    )  # fmt: skip
    _script(folder / "c++", f'exec {compiler} "$@"')
    suffix = f"cpython-{interpreter.version.replace('.', '')}-{tools.machine}-linux-gnu"
    values = {"SOABI": suffix, "EXT_SUFFIX": f".{suffix}.so", "INCLUDEPY": str(headers)}
    write_atomic(folder / f"{_SYSCONFIG}.py", f"build_time_vars = {pformat(values)}\n")
    _script(
        folder / "python3",
        f"export _PYTHON_SYSCONFIGDATA_NAME={_SYSCONFIG} PYTHONPATH={pasteable([folder])}\n"
        f'exec {pasteable([interpreter.executable])} -S "$@"',
    )
    return {
        "CXX": str(folder / "c++"),
        "DEEPGEMM_PYTHON_INTERPRETERS": str(folder / "python3"),
    }


def _script(path: Path, text: str) -> None:
    """Make a shell script, written only if it differs: ninja looks at its time."""
    text = f"#!/bin/sh\n{text}\n"
    if not path.is_file() or path.read_text() != text:
        write_atomic(path, text)
    # Always: an earlier run may have been killed between the two.
    path.chmod(0o755)
