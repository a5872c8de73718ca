"""Which of the GPU driver's libraries there are where the imports are run.

They are the machine's, not a wheel's: a report that is remembered is of one state of them.
"""

from __future__ import annotations

from pathlib import Path

from sm121.abi.interpreter import Interpreter
from sm121.abi.policy.model import Policy
from sm121.abi.report import Driver
from sm121.abi.system import LIBCUDA

# Where drivers put it; a driver elsewhere is not seen, and the stub is used and said.
_FOLDERS = ("usr/lib/{machine}-linux-gnu", "usr/lib64", "usr/lib", "usr/lib/wsl/lib")


def has_driver(machine: str, library: str = LIBCUDA) -> bool:
    """Is the GPU's driver (this library of it) on this machine?"""
    return any(Path("/", f.format(machine=machine), library).exists() for f in _FOLDERS)


def driver_kind(interpreter: Interpreter, machine: str, stub: Path | None) -> Driver:
    """Which libcuda that Python gets. stub: its stand-in, if there is one."""
    if interpreter.how == "native" and has_driver(machine):
        return "real"
    return "stub" if stub else "none"


def driver_identity(
    interpreter: Interpreter, machine: str, policy: Policy, *, stub: Path | None, sha256: str
) -> str:
    """What an import's verdict depends on, for fingerprints: which libcuda, and which other libraries
    of the driver there are. sha256: the stub's."""
    kind = driver_kind(interpreter, machine, stub)
    names = sorted(one.name for one in policy.system if one.driver)
    # A root of the target has none of this machine's.
    native = interpreter.how == "native"
    found = [name for name in names if native and has_driver(machine, name)]
    return " ".join([kind, *([sha256] if kind == "stub" else []), *found])
