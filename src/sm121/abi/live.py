"""Run the dynamic part: make an environment of the wheels, import, say what came of it."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from sm121.abi import cached
from sm121.abi.context import Context, exemption, finding
from sm121.abi.dynamic import DIED, check_imports, extension_modules, run_imports, unpack_site
from sm121.abi.interpreter import Interpreter, full_version, has_driver
from sm121.abi.report import Finding, ImportRow, NotRun, Ran, Report, to_json
from sm121.abi.scan import expand_tags
from sm121.abi.verify import with_findings
from sm121.files import HashMemory, sha256_text
from sm121.lock.pylock import Target

# How ld.so's own complaints read: those are faults in whichever wheel.
_LOADER = ("undefined symbol", "cannot open shared object", "version `", "ELF", "wrong class")
_OURS = "vllm"
Driver = Literal["stub", "real", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What is run, and where.

    context: of the judged wheels, its target with the interpreter's version. judged, around:
    wheel files that are unpacked; site: an environment's site-packages instead. complete:
    the judged set holds all that its packages import. stub: libcuda's stand-in. scratch:
    where the environment is made, several GB; an emulated Python must see it too.
    """

    context: Context
    interpreter: Interpreter
    judged: tuple[Path, ...]
    around: tuple[Path, ...]
    complete: bool
    stub: Path | None
    scratch: Path
    site: Path | None = None


def with_dynamic(report: Report, stage: Stage, *, cache: Path, memory: HashMemory) -> Report:
    """The report with what the imports showed; remembered by content like the report itself."""
    stub = memory.sha256(stage.stub) if stage.stub else ""
    key = cached.key(
        hashes={p.name: memory.sha256(p) for p in (*stage.judged, *stage.around)},
        judged=[p.name for p in stage.judged],
        parts=("dynamic", sha256_text(to_json(report)), stage.interpreter.identity, stub),
    )
    known = None if stage.site else cached.find(cache, key)
    if known is None:
        known = _run(report, stage)
        if not stage.site:
            cached.store(cache, key, known)
    return known


def fits(path: Path, target: Target) -> bool:
    """Would that Python take a wheel of this name?"""
    tags = "-".join(path.name.removesuffix(".whl").split("-")[-3:])
    accepted = {(t.interpreter, t.abi, t.platform) for t in target.tags()}
    return bool(accepted.intersection(expand_tags([tags])))


def _run(report: Report, stage: Stage) -> Report:
    context = stage.context
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=_made(stage.scratch), prefix="site-") as made:
        folder = Path(made)
        driver, libraries = _driver(stage, folder / "driver")
        python = stage.interpreter.command(libraries)
        version, problem = full_version(python)
        if problem:
            return with_findings(
                report, [], [NotRun(check="imports", reason=f"Python did not start: {problem}")]
            )
        site = stage.site or folder / "site"
        if stage.site is None:
            unpack_site((*stage.around, *stage.judged), site)
        modules = extension_modules(context)
        bare = [] if stage.complete else _parents(modules)
        first = ["torch"] if (site / "torch").is_dir() else []
        results = run_imports(
            python, site, modules, operators=_operators(context), bare=bare, first=first
        )
        # qemu-user crashes now and then by itself; a fault of the module's own does it again.
        died = [m for m in modules if DIED in results[m]]
        if died and stage.interpreter.how == "emulated":
            results |= run_imports(python, site, died, bare=bare, first=first)
    problems, not_run = _judge(context, results, driver)
    ran = Ran(
        how=stage.interpreter.how, python=version, driver=driver, complete=stage.complete,
        bare=tuple(bare), seconds=round(time.monotonic() - started, 1),
        imports=tuple(
            ImportRow(module=name, result="fail" if problem else "pass", text=problem)
            for name, problem in sorted(results.items())
        ),
    )  # fmt: skip
    return dataclasses.replace(with_findings(report, problems, not_run), ran=ran)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _driver(stage: Stage, folder: Path) -> tuple[Driver, list[Path]]:
    """Which libcuda is used, and folders for LD_LIBRARY_PATH."""
    machine = stage.context.target.machine
    if stage.interpreter.how == "native" and has_driver(machine):
        return "real", []
    if stage.stub is None:
        return "none", []
    folder.mkdir()
    # A copy: what a link points at may not be seen from inside a root of the target.
    shutil.copyfile(stage.stub, folder / "libcuda.so.1")
    return "stub", [folder]


def _parents(modules: Sequence[str]) -> list[str]:
    """Packages of the modules, outer ones first."""
    found = {
        ".".join(parts[:n])
        for parts in (name.split(".") for name in modules)
        for n in range(1, len(parts))
    }
    return sorted(found)


def _operators(context: Context) -> list[str]:
    """Operators that policy expects of the components that are in the wheels."""
    paths = [b.path for w in context.subjects if w.distribution == _OURS for b in w.binaries]
    return [
        operator
        for component in context.policy.components.values()
        if any(fnmatchcase(path, component.file) for path in paths)
        for operator in component.operators
    ]


def _judge(
    context: Context, results: dict[str, str], driver: Driver
) -> tuple[list[Finding], list[NotRun]]:
    """Every failed import of ours is a fault; of others, those that the loader refused."""
    found, not_run = check_imports(context, results)
    wheels = {wheel.filename: wheel for wheel in context.subjects}
    out: list[Finding] = []
    for one in found:
        if driver == "none" and "libcuda.so.1" in one.text:
            reason = "the GPU's driver is not here, nor a stub for it (`nox -s build` makes one)"
            not_run.append(NotRun(check=f"import {one.names[0]}", reason=reason))
            continue
        wheel = wheels.get(one.wheel)
        exempt = exemption(context.policy.optional, one.file, wheel) if wheel else None
        foreign = wheel is not None and wheel.distribution != _OURS
        if exempt or (foreign and not any(word in one.text for word in _LOADER)):
            why = exempt.why if exempt else "it loaded; what it then missed may need the GPU"
            out.append(finding("import", wheel, one.file, one.text, why=why, note=True))
        else:
            out.append(one)
    return out, not_run
