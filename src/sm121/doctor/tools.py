"""git, compilers, Python and nvcc: what a build needs, and what JIT kernels need on a node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from sm121 import proc
from sm121.doctor.facts import ANSWER_S
from sm121.doctor.machine import Machine
from sm121.doctor.model import Check, Level
from sm121.errors import CompilerMissing, Sm121Error
from sm121.toolkit.machine import find_compilers, host_compilers, host_machine, install_hint
from sm121.toolkit.python import find_interpreter, probe

_GIT_MIN = (2, 34)


def check_git(machine: Machine) -> Iterator[Check]:
    """The series is applied by git (gitrepo needs 2.34)."""
    path = machine.which("git")
    text = proc.run([path, "--version"], check=False).output.strip() if path else "not on PATH"
    numbers = tuple(int(n) for n in re.findall(r"\d+", text)[:2])
    good = numbers >= _GIT_MIN
    yield Check(
        name="git", found=text, build="ok" if good else "fault", run="not needed",
        cause="" if good else "source and patches are commits; git 2.34 or newer makes them",
        remedy="" if good else install_hint("git", "git") + ".",
    )  # fmt: skip


def check_compilers(machine: Machine) -> Iterator[Check]:
    """For the target (a build), and for this machine (Triton and tilelang compile launchers and
    kernels where they run)."""
    wanted = machine.context.runtime.machine
    native = host_machine()
    for name, code in (("compilers", wanted), ("compiler of this machine", native)):
        building = name == "compilers"
        level: Level
        try:
            found = find_compilers(code) if building else host_compilers()
            level, cause, remedy = "ok", "", ""
            text = f"{found.cxx} {found.version} for {code}, {found.libc}"
        except Sm121Error as error:
            level, text = "fault", error.what
            cause, remedy = error.cause, error.remedy
            if not building:
                cause = "Triton compiles launchers with it when a model starts"
        build: Level = "not needed" if not building or not machine.compiles else level
        yield Check(name=name, found=text, build=build, run="not needed" if building else level,
                    cause=cause, remedy=remedy)  # fmt: skip


def check_python(machine: Machine) -> Iterator[Check]:
    """With headers, both for building and, of the shipped version, for JIT on a node."""
    stack, runtime = machine.context.stack, machine.context.runtime
    name = f"linux-{host_machine()}"
    pythons = stack.targets[name].pythons if name in stack.targets else (runtime.python,)
    level: Level = "ok"
    cause = remedy = ""
    try:
        own = find_interpreter(pythons, environment=machine.environment)
        text = f"CPython {own.full} at {own.executable}, headers in {own.include}"
    except CompilerMissing as error:
        level, text, cause, remedy = "fault", error.what, error.cause, error.remedy
    yield Check(
        name="Python to build", found=text, build=level if machine.compiles else "not needed",
        run="not needed", cause=cause, remedy=remedy,
    )  # fmt: skip
    program = machine.which(f"python{runtime.python}")
    there = program and probe(program)
    if there:
        level, text, cause, remedy = "ok", f"CPython {there.full} at {there.executable}, with headers", "", ""  # fmt: skip
    elif program:
        level, text = "fault", f"{program} does not start, or has no headers (Python.h)"
        cause = "Triton compiles launchers against them when a model starts"
        remedy = install_hint(f"python{runtime.python}-dev", "python3-devel") + "."
    else:
        level, text = "fault", f"no python{runtime.python} on PATH"
        cause = f"the wheels of this stack are for CPython {runtime.python}"
        remedy = install_hint(f"python{runtime.python}-dev python{runtime.python}-venv", "python3-devel") + ", or `uv python install`."  # fmt: skip
    yield Check(name="Python to run", found=text, build="not needed", run=level, cause=cause,
                remedy=remedy)  # fmt: skip


def check_nvcc(machine: Machine) -> Iterator[Check]:
    """cases.md 20: FlashInfer and DeepGEMM compile at the first start, with the nvcc that the
    *service* sees; what ~/.bashrc adds to PATH is not there."""
    home = machine.environment.get("CUDA_HOME") or machine.environment.get("CUDA_PATH")
    usual = machine.root / "usr/local/cuda/bin"
    in_home = machine.which("nvcc", f"{home}/bin") if home else None
    in_path = machine.which("nvcc")
    in_service = machine.which("nvcc", machine.service_path)
    in_usual = machine.which("nvcc", str(usual))
    nvcc = in_home or in_path or in_service or in_usual
    run: Level = "ok"
    cause = remedy = ""
    add = (
        f"PATH={usual}:$PATH and CUDA_HOME={usual.parent} in /etc/environment or the service's unit"
    )
    if nvcc is None:
        run, found = "fault", "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda"
        cause = "FlashInfer and DeepGEMM compile kernels at the first start, on each node"
        remedy = f"Install the CUDA {machine.context.stack.cuda.version} toolkit, and set {add}."
    else:
        release = _release(nvcc)
        found = f"{nvcc}, CUDA {release or '?'}"
        wanted = machine.context.stack.cuda.version
        if release is None:
            run, found = "fault", f"{nvcc} does not answer within {ANSWER_S} s"
            cause = "FlashInfer and DeepGEMM compile with it at the first start, and would hang"
        elif not in_path and not in_home:
            run = "fault" if not in_service else "ok"
            cause = f"it is not on PATH of this shell ({machine.environment.get('PATH', '') or 'empty'})"
        elif not in_service and not in_home:
            run = "warning"
            cause = "a non-interactive ssh shell or a service has another PATH: " + machine.service_path  # fmt: skip
        if release is None:
            remedy = f"Run `{nvcc} --version` by hand; is it on a network file system that hangs?"
        elif run != "ok":
            remedy = f"Set {add.replace(str(usual), str(nvcc.parent)).replace(str(usual.parent), str(nvcc.parent.parent))}."  # fmt: skip
        elif release and _numbers(release) != _numbers(wanted):
            older = _numbers(release) < _numbers(wanted)
            run = "fault" if older else "warning"
            cause = f"this stack is built with CUDA {wanted}" + (
                "; an older nvcc does not know sm_121a's instructions" if older else ""
            )
            remedy = f"Put the nvcc of CUDA {wanted} first on PATH."
    if machine.compiles:
        found += " (a build uses its own, from pinned wheels)"
    yield Check(name="nvcc", found=found, build="not needed", run=run, cause=cause, remedy=remedy)


def _release(nvcc: Path) -> str | None:
    """'13.0'; '' if it says none, None if it does not answer."""
    finished = proc.run([nvcc, "--version"], check=False, limit=ANSWER_S)
    if finished.late:
        return None
    match = re.search(r"release (\d+\.\d+)", finished.output)
    return match[1] if match else ""


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def check_shadow(machine: Machine) -> Iterator[Check]:
    """cases.md 24: Python puts the current directory first, so ./vllm hides the installed one."""
    folders = [machine.cwd, *(Path(p) for p in machine.environment.get("PYTHONPATH", "").split(":") if p)]  # fmt: skip
    hiding = [
        place for folder in folders for place in (folder / "vllm", folder / "vllm.py")
        if place.exists() and "site-packages" not in place.parts
    ]  # fmt: skip
    yield Check(
        name="vllm in the way", build="ok", run="warning" if hiding else "ok",
        found=f"{', '.join(map(str, dict.fromkeys(hiding)))} hides the installed package"
        if hiding else f"nothing named vllm in {machine.cwd} or on PYTHONPATH",
        cause="`python -c 'import vllm'` and `python -m vllm…` take it from there" if hiding else "",
        remedy="Start from another directory, rename it, or unset PYTHONPATH." if hiding else "",
    )  # fmt: skip
