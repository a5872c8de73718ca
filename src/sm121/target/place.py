"""Where the target's programs run: this machine, if it is of the target's kind, else a root."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.abi import interpreter
from sm121.abi.driver import has_driver
from sm121.abi.dynamic import clean_environment
from sm121.abi.interpreter import Interpreter, full_version
from sm121.errors import EnvironmentFault
from sm121.lock.pylock import Target
from sm121.target.container import Container, emulator
from sm121.target.model import Driver, Machine
from sm121.target.root import make_root
from sm121.toolkit.machine import host_machine
from sm121.ui import Ui

_RECIPE = "run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """python: the target's interpreter, version its X.Y. container: the root that is entered for
    each program, None on the target's own machine. driver: folder with a stub of libcuda."""

    python: Path
    version: str
    glibc: str
    machine: Machine
    container: Container | None
    driver: Path | None

    def run(
        self, argv: Sequence[str | Path], *, more: Mapping[str, str] | None = None,
        log: Path | None = None, limit: float | None = None,
    ) -> proc.Finished:  # fmt: skip
        """Run a program there, in a clean environment; its failure is no exception."""
        variables = {**self.environment, **(more or {})}
        return proc.run([*self.launch, *argv], env=variables, log=log, limit=limit, check=False)

    @property
    def launch(self) -> tuple[str, ...]:
        return tuple(self.container.command([])) if self.container else ()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a program there: enough to start, and where the driver's stub lies."""
        base = self.container.environment() if self.container else None
        return clean_environment([self.driver] if self.driver else [], base)

    def interpreter(self, program: Path) -> Interpreter:
        """A Python there, for verify-abi."""
        return Interpreter(
            how=self.machine.how, version=self.version, program=program, launch=self.launch,
            environment=self.container.environment() if self.container else None,
        )  # fmt: skip


def find_place(
    target: Target,
    pythons: Sequence[str],
    *,
    folder: Path,
    seen: Sequence[Path],
    cache: Path,
    stub: Path | None,
    ui: Ui,
) -> Place:
    """pythons: versions that the stack locks. folder: ours; seen: others that programs of the target
    need, too. stub: libcuda's stand-in, used where there is no driver.

    Raises EnvironmentFault (no such Python, or roots can't be entered), CompilerMissing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if target.machine == host_machine():
        return _here(target, pythons, folder=folder, stub=stub)
    qemu = emulator(target.machine)
    root = make_root(_RECIPE, target.machine, cache=cache, ui=ui)
    binds = (folder, Path(__file__).parent, *seen)
    container = Container(root=root, scratch=folder / "root", binds=binds)
    version = container.check()
    emulated = proc.run([qemu, "--version"]).output.splitlines()[0]
    driver = _stub(stub, folder)
    return Place(
        python=Path(f"/usr/bin/python{root.recipe.python}"), version=root.recipe.python,
        glibc=root.recipe.glibc, container=container, driver=driver,
        machine=Machine(
            how="emulated", machine=target.machine, python=version, system=root.described,
            emulator=emulated.removeprefix("qemu-aarch64 version ").partition(" ")[0], network=False,
            driver="stub" if driver else "none", drift=root.drift,
        ),
    )  # fmt: skip


def _here(target: Target, pythons: Sequence[str], *, folder: Path, stub: Path | None) -> Place:
    found = interpreter.find(target, pythons)
    if isinstance(found, str):
        raise EnvironmentFault(
            f"There is no Python to run the wheelhouse with: {found}.",
            remedy=f"Install python{target.python}, or name one by SM121_PYTHON.",
        )
    version, problem = full_version(found.command())
    if problem:
        raise EnvironmentFault(f"{found.program} does not start: {problem}.")
    real = has_driver(target.machine)
    driver = None if real else _stub(stub, folder)
    kind: Driver = "real" if real else "stub" if driver else "none"
    return Place(
        python=found.program, version=found.version, glibc=platform.libc_ver()[1], container=None,
        driver=driver, machine=Machine(
            how="emulated" if (qemu := emulated_by(target.machine)) else "native", emulator=qemu,
            machine=target.machine, python=version, network=has_network(),
            system=_system(), driver=kind, drift=(),
        ),
    )  # fmt: skip


def emulated_by(machine: str, proc_folder: Path = Path("/proc")) -> str:
    """'qemu' if this very process is emulated (an arm64 container on x86-64), else ''.

    Our parent is emulated like us and its /proc/PID/exe is the emulator (qemu-user answers only
    for /proc/self); and older ones show the host's processor.
    """
    try:
        if "qemu" in str((proc_folder / str(os.getppid()) / "exe").readlink()):
            return "qemu"
    except OSError:
        pass  # not ours to read
    try:
        text = (proc_folder / "cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
    return "qemu" if machine == "aarch64" and "vendor_id" in text else ""


def has_network(proc_folder: Path = Path("/proc")) -> bool:
    """Is there any interface but the loopback?"""
    try:
        lines = (proc_folder / "net/dev").read_text().splitlines()[2:]
    except OSError:
        return True
    return any(line.partition(":")[0].strip() != "lo" for line in lines)


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"


def _stub(stub: Path | None, folder: Path) -> Path | None:
    """A folder with the stub under the name that is asked for. A copy: a link may point at what a
    root does not see."""
    if stub is None:
        return None
    driver = folder / "driver"
    driver.mkdir(exist_ok=True)
    shutil.copyfile(stub, driver / "libcuda.so.1")
    return driver
