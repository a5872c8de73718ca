"""Python on both sides: the build host's environment, and the target's headers."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.errors import CheckFailed, CompilerMissing, EnvironmentFault, ToolFailed, disk_full
from sm121.files import remove_tree
from sm121.index import uv_binary
from sm121.toolkit.machine import Compilers, install_hint

_PROBE = (
    "import json,sys,sysconfig as s;print(json.dumps({'version':'%d.%d'%sys.version_info[:2],"
    "'full':sys.version.split()[0],'executable':sys.executable,'include':s.get_path('include'),"
    "'platinclude':s.get_path('platinclude'),'config_h':s.get_config_h_filename(),"
    "'free_threaded':bool(s.get_config_var('Py_GIL_DISABLED')),'base':sys.base_prefix}))"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """A CPython on this machine: X.Y, X.Y.Z, where it is, and where its headers are."""

    version: str
    full: str
    executable: Path
    include: Path
    config_h: Path


def probe(executable: str | Path) -> Interpreter | None:
    """Ask an interpreter about itself; None if it has no headers or is free-threaded."""
    finished = proc.run([executable, "-I", "-c", _PROBE], check=False)
    if finished.returncode != 0:
        return None
    facts = json.loads(finished.output.splitlines()[-1])
    include = Path(facts["include"])
    if facts["free_threaded"] or not (include / "Python.h").is_file():
        return None
    return Interpreter(
        version=facts["version"],
        full=facts["full"],
        executable=Path(facts["executable"]),
        include=include,
        config_h=Path(facts["config_h"]),
    )


def find_interpreter(
    wanted: Sequence[str], *, environment: Mapping[str, str] = os.environ
) -> Interpreter:
    """An interpreter for the build host's environment, of one of the wanted versions.

    SM121_PYTHON decides if set; else the one that runs us, then pythonX.Y on PATH, then
    what uv knows of. Raises CompilerMissing when none of them has headers.
    """
    if chosen := environment.get("SM121_PYTHON"):
        candidates: list[str | Path] = [chosen]
    else:
        base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        candidates = [base, *(p for v in wanted if (p := shutil.which(f"python{v}")))]
    for candidate in candidates:
        if (found := probe(candidate)) and found.version in wanted:
            return found
    if not chosen:
        for version in wanted:
            finished = proc.run(
                [uv_binary(), "python", "find", "--no-project", version], check=False
            )
            path = finished.output.strip().splitlines()[-1:] or [""]
            if finished.returncode == 0 and (found := probe(path[0])):
                return found
    raise CompilerMissing(
        f"No CPython {' or '.join(wanted)} with headers was found.",
        cause=f"looked at {', '.join(str(c) for c in candidates)} and at what uv knows",
        remedy=f"`{install_hint('python3-dev', 'python3-devel')}`, or `uv python install "
        f"{wanted[0]}`, or set SM121_PYTHON.",
    )


def make_environment(
    folder: Path, interpreter: Interpreter, wheels: Sequence[Path], *, log: Path
) -> None:
    """A virtual environment with exactly these wheels, installed offline, at its final place
    (its scripts hold the path). The caller marks it as complete afterwards.

    Raises EnvironmentFault if its torch does not import, DiskFull if it found no room.
    """
    uv, cache = uv_binary(), folder.parent / "uv-cache"
    for left in cache.glob(".tmp*"):
        remove_tree(left)  # of a run that was killed or had no room; uv does not look for them
    proc.run([uv, "venv", "--clear", "--python", interpreter.executable, folder], log=log)
    listing = folder / "wheels.txt"
    listing.write_text("".join(f"{wheel}\n" for wheel in sorted(wheels)))
    try:
        proc.run(
            [
                uv, "pip", "install", "--python", folder / "bin/python", "--offline", "--no-deps",
                "--no-index", "--link-mode", "hardlink", "-r", listing,
            ],
            env={**os.environ, "UV_CACHE_DIR": str(cache)},
            log=log,
        )  # fmt: skip
    except ToolFailed as failure:
        if not (full := [line for line in failure.details if "No space left" in line]):
            raise
        raise disk_full("installing the build's Python environment", full[-1].strip()) from failure
    check = (
        "import torch; assert torch.version.cuda, 'a CPU build'; "
        "print(torch.__version__, torch.version.cuda)"
    )
    finished = proc.run([folder / "bin/python", "-I", "-c", check], check=False, log=log)
    if finished.returncode != 0:
        raise EnvironmentFault(
            "torch does not import in the build host's environment.",
            cause=f"see the end of {log}",
            remedy="vLLM's setup.py needs a CUDA build of torch that imports on this machine.",
        )


# What pyconfig.h says about types; the rest of it concerns CPython's own build.
_SIZES = re.compile(r"^#define\s+(SIZEOF_(\w+)|ALIGNOF_(\w+))\s+(\d+)\s*$", re.MULTILINE)
_C_TYPES = {
    "_BOOL": "_Bool", "DOUBLE": "double", "FLOAT": "float", "INT": "int", "LONG": "long",
    "LONG_DOUBLE": "long double", "LONG_LONG": "long long", "SHORT": "short",
    "SIZE_T": "size_t", "VOID_P": "void *", "WCHAR_T": "wchar_t", "MAX_ALIGN_T": "max_align_t",
    "OFF_T": "off_t", "TIME_T": "time_t", "PID_T": "pid_t", "UINTPTR_T": "uintptr_t",
}  # fmt: skip
# pyconfig.h facts of x86 alone (CPython's configure.ac); extensions don't read them.
_X86_ONLY = re.compile(
    r"^#define\s+(HAVE_GCC_ASM_FOR_X64|HAVE_GCC_ASM_FOR_X87|HAVE_IA64_HIGH_RES)\b.*$", re.MULTILINE
)


def cross_headers(
    interpreter: Interpreter, folder: Path, compilers: Compilers, *, log: Path
) -> None:
    """Headers for a target that has no Python here: the host's, with pyconfig.h proved right.

    CPython's headers are the same on every platform except pyconfig.h, and of that an
    extension sees the sizes and alignments of types. The target's compiler is made to assert
    each of them, so that a wrong one stops here and not as a crash on the target.

    Raises CheckFailed if a size differs.
    """
    shutil.copytree(interpreter.include, folder, symlinks=False, dirs_exist_ok=True)
    config = interpreter.config_h.read_text(encoding="utf-8")
    if "SIZEOF_LONG" not in config:
        # Debian's and Ubuntu's is a dispatcher that includes the one of each architecture.
        real = interpreter.include.parent / os.uname().machine.join(("", "-linux-gnu"))
        config = (real / interpreter.include.name / "pyconfig.h").read_text(encoding="utf-8")
    config = _X86_ONLY.sub(r"/* \g<0> */", config)
    (folder / "pyconfig.h").unlink(missing_ok=True)
    (folder / "pyconfig.h").write_text(config, encoding="utf-8")
    asserts = [
        "#include <stddef.h>",
        "#include <stdint.h>",
        "#include <sys/types.h>",
        "#include <time.h>",
    ]
    for name, size, align, value in _SIZES.findall(config):
        if kind := _C_TYPES.get(size or align):
            operator = "sizeof" if size else "_Alignof"
            asserts.append(f'_Static_assert({operator}({kind}) == {value}, "{name}");')
    probe_c = folder / "sm121_probe.c"
    probe_c.write_text("\n".join(asserts) + "\n")
    finished = proc.run([compilers.cc, "-std=c11", "-fsyntax-only", probe_c], check=False, log=log)
    if finished.returncode != 0 or len(asserts) < 12:
        raise CheckFailed(
            "This machine's pyconfig.h does not describe the target.",
            cause=f"the target's compiler disagrees about a type; see {log}",
            remedy="Build natively on the target, or set SM121_PYTHON to another CPython.",
        )
    probe_c.unlink()
