"""Follow the list of steps for one wheelhouse; the answer is a report. Prints only progress."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from sm121 import proc
from sm121.abi import patched
from sm121.abi.proof import Job, prove
from sm121.abi.stage import summary
from sm121.context import Context
from sm121.errors import EnvironmentFault
from sm121.files import HashMemory, remove_tree
from sm121.lock.pylock import Target
from sm121.target import checks
from sm121.target.counterpart import counterpart
from sm121.target.environment import Made, NotInstalled, install, site_of, unpack
from sm121.target.extensions import extensions_row, not_imported, said
from sm121.target.model import Machine, Report, Row, Verdict, why_no_environment
from sm121.target.place import Place
from sm121.target.steps import STEPS, Step
from sm121.ui import human_seconds
from sm121.wheelhouse.manifest import Manifest
from sm121.wheelhouse.sums import verify_sums

_SCRIPT = Path(checks.__file__)
# A limit is for an emulated processor, which is 10 to 20 times slower.
_NATIVE = 10


@dataclass(kw_only=True, slots=True)
class Run:
    """One run over one wheelhouse, and what it has found so far.

    job: what verify-abi needs to know. place: made when first a program of the target is to run,
    since that may fail, or be needless. quick: only the steps marked brief. only: those named.
    """

    context: Context
    house: Path
    manifest: Manifest
    job: Job
    folder: Path
    find: Callable[[], Place]
    quick: bool = False
    only: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)
    place: Place | None = None
    made: Made | None = None
    why_not: str = ""
    distributions: frozenset[str] = frozenset()

    def all(self) -> Report:
        """Every step. Raises EnvironmentFault if this machine can't run any program of the target."""
        started = time.monotonic()
        for step in STEPS:
            begun = time.monotonic()
            row = self._why_not(step)
            if row is None:
                self.context.ui.stage(step.name, "run", step.about)
                row = self._do(step)
                taken = round(time.monotonic() - begun, 1)
                row = dataclasses.replace(row, seconds=taken)
                verdict = {"pass": "done", "fail": "FAIL", "not run": "skip"}[row.verdict]
                self.context.ui.stage(step.name, verdict, human_seconds(taken))
            self.rows.append(row)
        return self._report(time.monotonic() - started)

    def _why_not(self, step: Step) -> Row | None:
        """The row of a step that can't be made, or was not asked for."""
        if self.only and step.name not in (*self.only, "checksums", "install"):
            return _not_run(step, "it was not asked for")
        if self.quick and not step.brief and not self.only:
            return _not_run(step, "it is not in the quick list")
        failed = [row.step for row in self.rows if row.verdict == "fail"]
        if step.kind != "checksums" and "checksums" in failed:
            return _not_run(step, "the wheelhouse is not what was built: nothing of it is imported")
        if step.kind in ("extensions", "check") and (why := self._lacks(step)):
            return _not_run(step, why)
        return None

    def _do(self, step: Step) -> Row:
        return {
            "checksums": self._checksums, "binaries": self._binaries, "install": self._install,
            "extensions": self._extensions, "check": self._check,
        }[step.kind](step)  # fmt: skip

    def _lacks(self, step: Step) -> str:
        if self.made is None:
            return self.why_not
        if step.whole and not self.manifest.complete:
            return (
                "it needs all that vllm requires, and this wheelhouse was built without --with-deps"
            )
        missing = [name for name in step.needs if name not in self.distributions]
        return f"not in this wheelhouse: {', '.join(missing)}" if missing else ""

    def _checksums(self, step: Step) -> Row:
        # Every byte is read: what an earlier run remembers of a file is no proof.
        fresh = HashMemory(self.folder / "no-hashes.json")
        faults = verify_sums(dataclasses.replace(self.context, memory=fresh), self.house)
        if faults:
            return _row(step, "static", "fail", "; ".join(faults))
        count = sum(1 for _ in self.house.glob("*.whl"))
        return _row(step, "static", "pass", f"{count} wheel(s) and the rest are as SHA256SUMS says")

    def _binaries(self, step: Step) -> Row:
        report = prove(dataclasses.replace(self.job, run=False))
        if report.result == "fail":
            return _row(
                step, "static", "fail", said(report.faults, "`nox -s verify-abi` lists all")
            )
        text = summary(report).partition("; ")[0]
        return _row(step, "static", "pass", text)

    def _install(self, step: Step) -> Row:
        self.place = self.find()
        place, manifest = self.place, self.manifest
        try:
            if manifest.complete:
                self.made = self._installed(step, place)
            else:
                target = dataclasses.replace(self.job.target, python=place.version)
                self.made = unpack(
                    place, self.house, manifest, self.job.locked(target), self.folder
                )
        except NotInstalled as error:
            self.why_not = "install.py did not make an environment"
            return _row(step, place.machine.how, "fail", str(error))
        except EnvironmentFault as error:
            self.why_not = "there is no environment"
            return _not_run(step, f"{error.what} {error.remedy}".strip())
        site = site_of(self.made.env, place.version)
        self.distributions = frozenset(
            canonicalize_name(one.metadata["Name"])
            for one in metadata.distributions(path=[str(site)])
        )
        facts = {
            "distributions": str(len(self.distributions)),
            "reused": str(self.made.reused).lower(),
        }
        if not self.made.installed:
            return Row(
                step=step.name, how="not run", verdict="not run", text=self.made.text, facts=facts
            )
        return _row(step, place.machine.how, "pass", self.made.text, facts)

    def _installed(self, step: Step, place: Place) -> Made:
        """By install.py; for another CPython than the wheelhouse's, by its counterpart's."""
        if self.manifest.python == place.version:
            return install(place, self.house, self.manifest, self.folder, log=self._log(step))
        if place.container is None:
            raise EnvironmentFault(
                f"The wheelhouse is for CPython {self.manifest.python}, here is {place.version}.",
                remedy=f"Install python{self.manifest.python}, or name one by SM121_PYTHON.",
            )
        house, manifest, text = counterpart(
            self.context, self.house, self.manifest, python=place.version, glibc=place.glibc,
            folder=self.folder,
        )  # fmt: skip
        # What is imported are its wheels.
        target = Target.make(manifest.target, python=manifest.python, glibc=manifest.glibc)
        self.job = dataclasses.replace(self.job, targets=(house,), target=target)
        made = install(place, house, manifest, self.folder, log=self._log(step))
        return dataclasses.replace(made, text=f"{made.text}; {text}")

    def _extensions(self, step: Step) -> Row:
        place, made = self.place, self.made
        assert place is not None
        assert made is not None
        python = place.interpreter(made.python)
        report = prove(dataclasses.replace(self.job, python=python, installed=made.env))
        return extensions_row(report, place.machine.how)

    def _check(self, step: Step) -> Row:
        place, made = self.place, self.made
        assert place is not None
        assert made is not None
        limit = step.limit if place.machine.how == "emulated" else step.limit / _NATIVE
        argv = [str(made.python), "-I", str(_SCRIPT), step.name]
        if step.name == "gates":
            argv.append(json.dumps(patched_modules(self.context, self.manifest)))
        home = self.folder / "home"  # caches go there, and start empty

        def once() -> proc.Finished:
            remove_tree(home)
            home.mkdir()
            return place.run(argv, more={"HOME": str(home)}, log=log, limit=limit)

        log = self._log(step)
        finished, crashes = attempt(once, emulated=place.machine.how == "emulated")
        step = dataclasses.replace(step, limit=limit)
        row = judge(step, place.machine, finished.output, finished.returncode, late=finished.late)
        if not crashes:
            return row
        return dataclasses.replace(
            row, facts={**row.facts, "crashed before": str(crashes)},
            text=f"{row.text} (at the second attempt: the emulated interpreter died at the first)",
        )  # fmt: skip

    def _log(self, step: Step) -> Path:
        log = self.context.layout.log / "target" / f"{step.name}.log"
        log.unlink(missing_ok=True)
        return log

    def _report(self, seconds: float) -> Report:
        manifest, place = self.manifest, self.place
        failed = any(row.verdict == "fail" for row in self.rows)
        passed: Literal["pass", "not run"] = "not run" if why_no_environment(self.rows) else "pass"
        return Report(
            schema_version=1, result="fail" if failed else passed, stack=manifest.stack,
            target=manifest.target, profile=manifest.profile, python=manifest.python,
            complete=manifest.complete, machine=place.machine if place else None,
            rows=tuple(self.rows), unproved=unproved(manifest, place, self.rows),
            seconds=round(seconds, 1),
        )  # fmt: skip


def died(finished: proc.Finished) -> bool:
    """Did a signal end it, and not its limit?"""
    return not finished.late and (finished.returncode < 0 or finished.returncode > 128)


def attempt(once: Callable[[], proc.Finished], *, emulated: bool) -> tuple[proc.Finished, int]:
    """Run it; once more if it died emulated, and how often it had died before.

    qemu-user crashes in programs with many threads now and then (seen: one of three imports of
    vllm, one of four of tilelang). What is wrong with the wheelhouse crashes again.
    """
    finished = once()
    if emulated and died(finished):
        return once(), 1
    return finished, 0


def judge(step: Step, machine: Machine, output: str, returncode: int, *, late: bool) -> Row:
    """A check's verdict from what it printed. A crash, a limit and silence are failures."""
    facts: dict[str, str] = {}
    told = ("", "")
    for line in output.splitlines():
        if line.startswith(checks.MARK):
            kind, *words = json.loads(line.removeprefix(checks.MARK))
            if kind == "fact":
                facts[words[0]] = words[1]
            else:
                told = (kind, words[0])
    if late:
        told = ("fail", f"it did not end within {human_seconds(step.limit)}")
    elif returncode < 0 or returncode > 128:
        told = ("fail", f"the interpreter died (exit status {returncode})")
    elif told[0] != "pass" or returncode:
        told = ("fail", told[1] or f"no verdict (exit status {returncode})")
    verdict: Verdict = "pass" if told[0] == "pass" else "fail"
    return _row(step, machine.how, verdict, told[1], facts)


# Packages of vllm that only import with a component: without it their patched modules can't either.
_WITH = {"vllm/vllm_flash_attn/": "_vllm_fa2_C"}


def patched_modules(context: Context, manifest: Manifest) -> list[str]:
    """Modules of vllm that the wheelhouse's patches change, but for those of other GPUs and of
    components that it lacks."""
    lacking = [p for p, component in _WITH.items() if component not in manifest.components.built]
    folder = context.layout.patches / "vllm" / manifest.stack
    applied = [p.name for p in manifest.patches if p.status.startswith("applied")]
    files = {
        file
        for name in applied
        if (path := folder / f"{name}.patch").is_file()
        for file in patched.parse(path.read_text("utf-8"))
        if file.startswith("vllm/") and file.endswith(".py") and "rocm" not in file
        if not file.startswith(tuple(lacking))
    }
    return sorted(
        file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files
    )


def unproved(manifest: Manifest, place: Place | None, rows: Sequence[Row]) -> tuple[str, ...]:
    """What a target's own machine may still show, as sentences."""
    out = []
    if place is None:
        return ("no program of the target was run",)
    if place.machine.how == "emulated":
        emulator = f"qemu {place.machine.emulator.removeprefix('qemu')}".strip()
        out.append(
            f"a processor of the target: {place.machine.machine} was emulated by "
            f"{emulator}, which shows neither speed nor faults of its own"
        )
    if place.machine.driver == "stub":
        out.append("a GPU and its driver: libcuda was a stub that answers every call with an error")
    elif place.machine.driver == "none":
        out.append("a GPU and its driver: there was no libcuda, nor a stub for it")
    if place.version != manifest.python:
        bound = [w.filename for w in manifest.wheels if _only(w.filename, manifest.python)]
        out.append(
            f"CPython {manifest.python}: {place.machine.python} ran, so no wheel that is only for "
            f"{manifest.python} did" + (f" ({len(bound)} of this wheelhouse)" if bound else "")
            + "; ours is for the stable ABI of 3.11 and later, whose symbols verify-abi looks up"
        )  # fmt: skip
    if place.container and place.glibc != manifest.glibc:
        out.append(
            f"glibc {manifest.glibc}: this was {place.machine.system}, with glibc {place.glibc}"
        )
    if left := not_imported(rows):
        out.append(
            f"extension modules that could not be imported here: {len(left)}, each in --json"
        )
    if skipped := [row.step for row in rows if row.verdict == "not run"]:
        out.append(f"what was not run: {', '.join(skipped)}")
    return tuple(out)


def _only(filename: str, python: str) -> bool:
    """Is the wheel for that CPython alone?"""
    tag = f"cp{python.replace('.', '')}"
    interpreter, abi_tag = filename.removesuffix(".whl").split("-")[-3:-1]
    return interpreter == tag and abi_tag == tag


def _row(
    step: Step, how: str, verdict: Verdict, text: str, facts: dict[str, str] | None = None
) -> Row:
    return Row(step=step.name, how=how, verdict=verdict, text=text, facts=facts or {})  # type: ignore[arg-type]


def _not_run(step: Step, why: str) -> Row:
    return Row(step=step.name, how="not run", verdict="not run", text=why, facts={})
