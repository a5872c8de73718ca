"""What `verify-abi` and the end of `build` do: gather what the checks need, and make them."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from sm121.abi import interpreter, live
from sm121.abi.context import Context, Expected
from sm121.abi.driver import driver_identity
from sm121.abi.gpu import Arch
from sm121.abi.inputs import environment_site, manifest_beside, wheel_paths
from sm121.abi.interpreter import Interpreter
from sm121.abi.patched import PatchFile
from sm121.abi.policy.model import Policy
from sm121.abi.report import NotRun, Report
from sm121.abi.scan import FactsCache, scan_environment, scan_wheels
from sm121.abi.surroundings import Locked, Surroundings
from sm121.abi.verify import verify, with_findings
from sm121.files import HashMemory
from sm121.layout import Layout
from sm121.lock.pylock import Target
from sm121.patches.series import load_series
from sm121.pins.model import TVM_FFI, Stack
from sm121.rules.model import load_rules
from sm121.ui import Ui
from sm121.wheelhouse.manifest import Manifest

_OURS, _JIT_CACHE = "vllm", "flashinfer-jit-cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """targets, env, against: as on the command line. pythons: other versions that the stack
    locks for the target, which may stand in for its own when things are run. run: the dynamic part too. fetch: what
    the cache lacks of the lock's surroundings may be downloaded. installed: an environment that was
    made of the targets, in which things are run, instead of one made for it; python: by whom. stub:
    libcuda's stand-in, instead of the toolkit's."""

    layout: Layout
    stack_name: str
    stack: Stack
    target: Target
    arch: str
    policy: Policy
    memory: HashMemory
    ui: Ui
    targets: tuple[Path, ...] = ()
    env: Path | None = None
    against: tuple[Path, ...] = ()
    pythons: tuple[str, ...] = ()
    run: bool = True
    fetch: bool = False
    installed: Path | None = None
    python: Interpreter | None = None
    stub: Path | None = None

    def locked(self, target: Target | None = None) -> Locked:
        return Locked(
            layout=self.layout, stack=self.stack_name, target=target or self.target,
            memory=self.memory, ui=self.ui, fetch=self.fetch,
        )  # fmt: skip


def prove(job: Job) -> Report:
    """Make every check that can be made here; what could not be is listed in the report.

    Raises UsageFault (no such wheel), CheckFailed (a manifest that is none).
    """
    manifest = manifest_beside(job.targets)
    paths = wheel_paths(job.targets)
    around = _surroundings(job, manifest, paths)
    for line in around.instead:
        job.ui.note(f"surroundings: {line}: the locked one is not in the cache")
    names = {p.name for p in (*paths, *around.paths)}
    locked = job.locked()
    neighbours = [p for p in locked.cached(locked.files("family").values()) if p.name not in names]
    report = verify(
        job.targets, policy=job.policy, target=job.target, arch=job.arch, cache=job.layout.cache,
        env=job.env, against=around.paths, neighbours=neighbours,
        wanted={name: pin.version for name, pin in job.stack.family.items()},
        patches=series_patches(job) if manifest and manifest.patches else (),
        rules=load_rules(job.layout.pins), lacking=around.lacking, memory=job.memory, ui=job.ui,
    )  # fmt: skip
    report = _dynamic(job, report, manifest, paths)
    job.memory.save()
    return report


def _distributions(paths: Sequence[Path]) -> set[str]:
    return {canonicalize_name(p.name.split("-")[0]) for p in paths}


def _surroundings(job: Job, manifest: Manifest | None, paths: Sequence[Path]) -> Surroundings:
    """What is loaded with the judged wheels: as asked, nothing for a whole set, else the lock's."""
    if job.against:
        return Surroundings(paths=tuple(wheel_paths(job.against)))
    if job.env or (manifest and manifest.complete) or not paths:
        return Surroundings(paths=())
    have = _distributions(paths)
    if have <= {_OURS, _JIT_CACHE}:
        torch = job.locked().around_torch(besides=have)
        if _JIT_CACHE not in have:
            return torch
        ffi = job.locked().around(TVM_FFI.__eq__)
        return Surroundings(
            paths=torch.paths + ffi.paths, lacking=torch.lacking + ffi.lacking,
            instead=torch.instead + ffi.instead,
        )  # fmt: skip
    return job.locked().around(lambda _name: True, besides=have)


def series_patches(job: Job) -> list[PatchFile]:
    """The series with git's patch ids. Empty for a stack without one, and where there is no git
    (Dockerfile.verify's image)."""
    if shutil.which("git") is None:
        return []
    from sm121.gitrepo import Repository

    folder = job.layout.patches / _OURS / job.stack_name
    if not (folder / "series").is_file():
        return []
    with tempfile.TemporaryDirectory() as scratch:
        repository = Repository(Path(scratch) / "ids.git")
        try:
            return [
                PatchFile(
                    name=patch.name, text=patch.path.read_text("utf-8"),
                    patch_id=repository.patch_id(patch.path),
                )
                for patch in load_series(folder)
            ]  # fmt: skip
        finally:
            repository.close()


def find_interpreter(job: Job) -> Interpreter | str:
    """The Python for the dynamic part, or why it is not run."""
    if not job.run:
        return "--no-run"
    if job.python:
        return job.python
    if job.env:
        return interpreter.of_environment(job.env, job.target)
    return interpreter.find(job.target, job.pythons)


def _dynamic(job: Job, report: Report, manifest: Manifest | None, paths: Sequence[Path]) -> Report:
    python = find_interpreter(job)
    if isinstance(python, str):
        return with_findings(report, [], [NotRun(check="imports", reason=python)])
    target = dataclasses.replace(job.target, python=python.version)
    judged = [p for p in paths if live.fits(p, target)]
    not_run = []
    if unfit := [p for p in paths if p not in judged]:
        reason = (
            f"{len(unfit)} of {len(paths)} wheels are not for the {python.version} that is here"
        )
        not_run.append(NotRun(check="imports of other wheels", reason=reason))
    complete = bool(job.env or (manifest and manifest.complete)) and not unfit
    around = Surroundings(paths=())
    if not complete and not job.installed:
        around = job.locked(target).around_torch(_distributions(judged))
    lacking = list(around.lacking)
    if lacking:
        reason = f"of {target.tag}'s lock not in the cache: {', '.join(lacking)}; --fetch gets it"
        not_run.append(NotRun(check="imports", reason=reason))
    if lacking or not (judged or job.env):
        return with_findings(report, [], not_run)
    # A damaged file is reported already, and unpacking it would stop.
    if any(f.kind in ("archive", "damaged") for f in report.faults):
        not_run.append(NotRun(check="imports", reason="a wheel is damaged"))
        return with_findings(report, [], not_run)
    store = FactsCache(job.layout.cache)
    facts = scan_wheels(judged, cache=store, memory=job.memory)
    made = job.env or job.installed
    site = environment_site(made).absolute() if made else None
    if site and job.env:
        facts += scan_environment(
            site, cache=store, memory=job.memory, read_hashes=lambda _path: False
        )
    stage = live.Stage(
        context=Context(
            subjects=tuple(facts), others=(), target=target, arch=Arch.parse(job.arch),
            policy=job.policy, expected=Expected(), installed=job.env is not None,
        ),
        interpreter=python, judged=tuple(judged), around=around.paths, complete=complete,
        stub=driver_stub(job), scratch=job.layout.build / "verify", site=site,
    )  # fmt: skip
    return live.with_dynamic(
        with_findings(report, [], not_run), stage, cache=job.layout.cache, memory=job.memory
    )


def driver_stub(job: Job) -> Path | None:
    """libcuda's stand-in: the job's, else the one that the toolkit stage made, if it has run."""
    if job.stub:
        return job.stub
    folder = job.layout.build / "toolkit" / f"{job.stack_name}-{job.target.name}"
    stub = folder / "cuda/lib64/stubs/libcuda.so"
    return stub if stub.is_file() else None


def job_driver(job: Job, python: Interpreter) -> str:
    """What there is of the GPU's driver where the job's imports are run, for fingerprints."""
    stub = driver_stub(job)
    return driver_identity(
        python, job.target.machine, job.policy, stub=stub,
        sha256=job.memory.sha256(stub) if stub else "",
    )  # fmt: skip
