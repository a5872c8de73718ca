"""Turn pins into locks: one per target and CPython for what runs, one for what builds.

Resolution is uv's, for the target's platform, on any host. The inputs are the pins and
vLLM's own requirement files *as patched*; a digest of them is stored in each lock, so that
a build can tell, without a network, that lock and pins belong together.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.pylock import Pylock

from sm121.errors import LockStale, ToolFailed
from sm121.files import sha256_text
from sm121.index import IndexFile, compile_lock
from sm121.lock.pylock import LockedFile, Target, lock_path, make_lock, read_lock
from sm121.pins.model import FamilyPin, Stack
from sm121.ui import Ui

if TYPE_CHECKING:
    from sm121.context import Context

Kind = Literal["family", "host"]
KINDS: tuple[Kind, ...] = ("host", "family")
# vLLM's requirement files that end up in the wheel's METADATA (setup.py, get_requirements).
REQUIREMENT_FILES = ("requirements/cuda.txt", "requirements/common.txt")


def lock_targets(stack: Stack) -> list[Target]:
    """Every (platform, CPython) that the stack lists."""
    return [
        Target.make(name, python=python, glibc=pin.glibc)
        for name, pin in stack.targets.items()
        for python in pin.pythons
    ]


def inputs_digest(stack: Stack, kind: Kind, requirement_digests: Mapping[str, str]) -> str:
    """sha256 over what a lock of this kind is made from.

    requirement_digests: sha256_text of each of REQUIREMENT_FILES, as patched.
    """
    parts = [
        kind,
        stack.lock_date.isoformat(),
        stack.cuda.model_dump_json(include={"toolkit"}),
        *(
            f"{name}:{pin.version}{sorted(pin.extras)}"
            for name, pin in sorted(stack.family.items())
        ),
        *sorted(stack.overrides),
        *(f"{name}:{pin.glibc}" for name, pin in sorted(stack.targets.items())),
    ]
    if kind == "host":
        parts += stack.host.requirements
    else:
        parts += [requirement_digests[name] for name in REQUIREMENT_FILES]
        parts += [f"{name}=={version}" for name, version in sorted(stack.installer.items())]
    parts += [f"{name}:{date.isoformat()}" for name, date in sorted(stack.lock_newer.items())]
    return sha256_text(*parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """One lock of the stack, just resolved, and the file that it belongs into."""

    kind: Kind
    target: Target
    filename: str
    lock: Pylock


def resolve_all(
    stack: Stack, requirement_files: Mapping[str, str], *, logs: Path, ui: Ui
) -> list[Resolved]:
    """Resolve every lock of the stack at once: uv waits for the index most of the time.

    requirement_files: text of each of REQUIREMENT_FILES, as patched. logs: folder that gets
    one log for each. Raises as `resolve` does, for the first that fails.
    """
    wanted = [(target, kind) for target in lock_targets(stack) for kind in KINDS]

    def one(target: Target, kind: Kind) -> Resolved:
        filename = lock_path(Path(), "", kind, target).name
        log = logs / f"lock.{filename.removeprefix('pylock.').removesuffix('.toml')}.log"
        lock = resolve(stack, kind, target, requirement_files, log=log)
        return Resolved(kind=kind, target=target, filename=filename, lock=lock)

    with ui.progress("lock") as progress, ThreadPoolExecutor(len(wanted)) as pool:
        jobs = [pool.submit(one, *item) for item in wanted]
        try:
            for count, _ in enumerate(as_completed(jobs), start=1):
                progress.update(f"{count} of {len(jobs)} resolved")
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def resolve(
    stack: Stack, kind: Kind, target: Target, requirement_files: Mapping[str, str], *, log: Path
) -> Pylock:
    """Resolve one lock. Raises NetworkFault, or ToolFailed with uv's explanation."""
    files = resolve_files(stack, kind, target, requirement_files, log=log)
    return make_lock(
        _choose(files, target),
        python=target.python,
        inputs=inputs_digest(
            stack, kind, {name: sha256_text(text) for name, text in requirement_files.items()}
        ),
    )


def resolve_files(
    stack: Stack, kind: Kind, target: Target, requirement_files: Mapping[str, str], *, log: Path,
    keeping: Path | None = None, upgrade: str = "",
) -> list[IndexFile]:  # fmt: skip
    """All files that the index has for one lock.

    keeping: a lock whose versions stay where they can; upgrade: the one package that need not.
    """
    requirements = [f"{name}=={version}" for name, version in stack.cuda.toolkit.items()]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        arguments: list[str | Path] = []
        if kind == "host":
            requirements += [*stack.host.requirements, f"torch=={stack.family['torch'].version}"]
        else:
            for name in REQUIREMENT_FILES:
                (folder / Path(name).name).write_text(requirement_files[name], encoding="utf-8")
            requirements += [f"-r {folder / Path(REQUIREMENT_FILES[0]).name}"]
            requirements += [_exact(name, pin) for name, pin in stack.family.items()]
            requirements += [f"{name}=={version}" for name, version in stack.installer.items()]
            overrides = folder / "overrides.txt"
            # With its extras: uv takes an override for the whole requirement, so one without
            # them loses what they bring.
            overrides.write_text(
                "".join(f"{_exact(name, stack.family[name])}\n" for name in stack.overrides)
            )
            arguments += ["--override", overrides]
        constraints = folder / "constraints.txt"
        constraints.write_text(
            "".join(f"{name}=={version}\n" for name, version in stack.cuda.toolkit.items())
        )
        arguments += ["--constraints", constraints, "--exclude-newer", stack.lock_date.isoformat()]
        for name, date in stack.lock_newer.items():
            arguments += ["--exclude-newer-package", f"{name}={date.isoformat()}"]
        output = None
        if keeping is not None:
            output = Path(shutil.copy(keeping, folder))
            arguments += ["--upgrade-package", upgrade]
        return compile_lock(
            requirements,
            uv_platform=target.uv_platform,
            python=target.python,
            arguments=arguments,
            log=log,
            output=output,
        )


def _exact(name: str, pin: FamilyPin) -> str:
    extras = f"[{','.join(pin.extras)}]" if pin.extras else ""
    return f"{name}{extras}=={pin.version}"


def _choose(files: list[IndexFile], target: Target) -> list[LockedFile]:
    """The best wheel of each distribution for the target."""
    from packaging.utils import parse_wheel_filename

    rank = {tag: place for place, tag in enumerate(target.tags())}
    best: dict[str, tuple[int, IndexFile]] = {}
    for file in files:
        places = [rank[t] for t in parse_wheel_filename(file.filename)[3] if t in rank]
        if places and (file.distribution not in best or min(places) < best[file.distribution][0]):
            best[file.distribution] = (min(places), file)
    if lacking := sorted({f.distribution for f in files} - set(best)):
        raise ToolFailed(
            f"No wheel of {', '.join(lacking)} fits {target.tag}.", returncode=1,
            cause="only wheels are locked: nothing is built on a node",
        )  # fmt: skip
    return [
        LockedFile(
            distribution=f.distribution, version=f.version, filename=f.filename,
            sha256=f.sha256, size=f.size,
        )
        for _, f in best.values()
    ]  # fmt: skip


def load_checked(
    pins: Path, name: str, stack: Stack, kind: Kind, target: Target,
    requirement_digests: Mapping[str, str],
) -> Pylock:  # fmt: skip
    """Read a lock and check that it was made from these pins. Raises LockStale if not."""
    path = lock_path(pins, name, kind, target)
    lock = read_lock(path)
    recorded = ((lock.tool or {}).get("sm121") or {}).get("inputs")
    if recorded != inputs_digest(stack, kind, requirement_digests):
        raise LockStale(
            f"{path.name} was not made from these pins.",
            cause="stack.toml or the requirements patch was changed after the last `lock`",
            remedy="Run `nox -s lock`, look at the diff, and commit it.",
        )
    return lock


def lock_of(
    context: Context, kind: Kind, target: Target, requirement_digests: Mapping[str, str]
) -> Pylock:
    """load_checked for the stack that is built."""
    return load_checked(
        context.layout.pins, context.stack_name, context.stack, kind, target, requirement_digests
    )
