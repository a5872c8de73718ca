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

from sm121.abi import cached
from sm121.abi.context import Context
from sm121.abi.driver import driver_identity, driver_kind
from sm121.abi.dynamic import unpack_site
from sm121.abi.interpreter import Interpreter, full_version
from sm121.abi.modules import Extension, extension_modules, import_roots
from sm121.abi.report import Driver, NotRun, Ran, Report, to_json
from sm121.abi.rounds import import_all
from sm121.abi.scan import expand_tags
from sm121.abi.verdicts import judge_imports
from sm121.abi.verify import with_findings
from sm121.files import HashMemory, sha256_text
from sm121.lock.pylock import Target

_OURS = "vllm"


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
    """The report with what the imports showed; remembered by content like the report itself, and
    by what there is of the GPU's driver."""
    driver = driver_identity(
        stage.interpreter, stage.context.target.machine, stage.context.policy, stub=stage.stub,
        sha256=memory.sha256(stage.stub) if stage.stub else "",
    )  # fmt: skip
    key = cached.key(
        hashes={p.name: memory.sha256(p) for p in (*stage.judged, *stage.around)},
        judged=[p.name for p in stage.judged],
        parts=("dynamic", sha256_text(to_json(report)), stage.interpreter.identity, driver),
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
        modules = extension_modules(context, import_roots(site))
        bare = [] if stage.complete else _parents(modules)
        rows = import_all(
            python, site, modules, context.policy, driver=driver, bare=bare,
            emulated=stage.interpreter.how == "emulated", operators=_operators(context),
            first=["torch"] if (site / "torch").is_dir() else [],
        )  # fmt: skip
    judged, problems, not_run = judge_imports(context, modules, rows)
    ran = Ran(
        how=stage.interpreter.how, python=version, driver=driver, complete=stage.complete,
        bare=tuple(name for name, _ in bare), seconds=round(time.monotonic() - started, 1),
        imports=tuple(judged),
    )  # fmt: skip
    return dataclasses.replace(with_findings(report, problems, not_run), ran=ran)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _driver(stage: Stage, folder: Path) -> tuple[Driver, list[Path]]:
    """Which libcuda is used, and folders for LD_LIBRARY_PATH."""
    kind = driver_kind(stage.interpreter, stage.context.target.machine, stage.stub)
    if kind != "stub" or stage.stub is None:
        return kind, []
    folder.mkdir()
    # A copy: what a link points at may not be seen from inside a root of the target.
    shutil.copyfile(stage.stub, folder / "libcuda.so.1")
    return "stub", [folder]


def _parents(modules: Sequence[Extension]) -> list[tuple[str, str]]:
    """Packages of the modules and their folders, outer ones first."""
    return sorted({parent for one in modules for parent in one.parents()})


def _operators(context: Context) -> list[str]:
    """Operators that policy expects of the components that are in the wheels."""
    paths = [b.path for w in context.subjects if w.distribution == _OURS for b in w.binaries]
    return [
        operator
        for component in context.policy.components.values()
        if any(fnmatchcase(path, component.file) for path in paths)
        for operator in component.operators
    ]
