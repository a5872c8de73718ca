"""A Python that runs the target's code here: this machine's, or one that the caller enters a root
of the target for (sm121.target)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm121 import proc
from sm121.abi.dynamic import Python, clean_environment
from sm121.errors import CompilerMissing
from sm121.lock.pylock import Target
from sm121.toolkit.machine import host_machine

_PROBE = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"
_FULL = "import sys; print(sys.version.split()[0])"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpreter:
    """version: X.Y. program: the python. launch: what stands in front of it on a command line, and
    environment: what it is then started in; of an emulated one."""

    how: Literal["native", "emulated"]
    version: str
    program: Path
    launch: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    @property
    def identity(self) -> str:
        """What it is, for fingerprints; without starting it."""
        stat = self.program.stat()
        return f"{self.how} {self.version} {self.program} {stat.st_size} {stat.st_mtime_ns}"

    def command(self, libraries: Sequence[Path] = ()) -> Python:
        """How to run it, in a clean environment. libraries: folders for LD_LIBRARY_PATH."""
        return Python(
            command=(*self.launch, str(self.program)),
            environment=clean_environment(libraries, self.environment),
        )


def full_version(python: Python) -> tuple[str, str]:
    """('3.11.2', '') of a Python that starts, else ('', why not)."""
    try:
        finished = proc.run(
            [*python.command, "-I", "-c", _FULL], env=dict(python.environment), check=False
        )
    except CompilerMissing as error:
        return "", error.what
    lines = finished.output.splitlines() or ["no output"]
    return (lines[-1], "") if finished.returncode == 0 else ("", lines[-1])


def find(
    target: Target, pythons: Sequence[str], *, environment: Mapping[str, str] = os.environ
) -> Interpreter | str:
    """The interpreter, or a sentence that says why there is none.

    pythons: versions that the stack locks, X.Y, best first; the target's own comes before.
    """
    wanted = list(dict.fromkeys([target.python, *pythons]))
    if target.machine == host_machine():
        for version in wanted:
            if found := _native(version, environment):
                return found
        return f"no CPython {' or '.join(wanted)} on this machine"
    return (
        f"this is a {host_machine()} machine; `nox -s verify-target` imports them by an emulated "
        f"Python of {target.machine}"
    )


def _native(version: str, environment: Mapping[str, str]) -> Interpreter | None:
    candidates = [environment.get("SM121_PYTHON"), sys.executable, shutil.which(f"python{version}")]
    for candidate in filter(None, candidates):
        finished = proc.run([candidate, "-I", "-c", _PROBE], check=False)
        lines = finished.output.splitlines()
        if finished.returncode == 0 and lines[-2:-1] == [version]:
            return Interpreter(how="native", version=version, program=Path(lines[-1]))
    return None


def of_environment(env: Path, target: Target) -> Interpreter | str:
    """The environment's own Python, or why it can't be run here."""
    program = env / "bin/python"
    if not program.exists():
        return f"{env} has no bin/python"
    if target.machine != host_machine():
        return f"{env} is for {target.machine}, this machine is {host_machine()}"
    return Interpreter(how="native", version=target.python, program=program.absolute())
