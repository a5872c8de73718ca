"""What a build has to fetch: is the index reachable, and what does the cache have already?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from sm121.context import Context
from sm121.doctor.machine import Machine
from sm121.doctor.model import Check, Level
from sm121.errors import Sm121Error
from sm121.fetch import Cache
from sm121.gitrepo import Repository, unreachable
from sm121.index import locate
from sm121.lock.pylock import LockedFile, Target, lock_path, locked_files, read_lock
from sm121.pins.model import FLASHINFER, TVM_FFI, SourcePin
from sm121.source.clones import find_commit, open_clones
from sm121.source.thirdparty import is_made, used_submodules
from sm121.source.vllm import sdist_file
from sm121.toolkit.stage import host_interpreter, of_toolkit

_GIT_TIMEOUT_S = 15


def check_index(machine: Machine) -> Iterator[Check]:
    """Ask for the release, as `source` does. With everything in the cache no index is needed."""
    context = machine.context
    total, lacking = missing_files(machine)
    missing = [file.filename for file in lacking]
    have = f"{total - len(missing)} of {total} files of this build are in the cache"
    if context.options.offline:
        level: Level = "fault" if missing else "ok"
        yield Check(
            name="package index", build=level, run="not needed",
            found=f"not asked (--offline); {have}",
            cause=f"missing: {', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}" if missing else "",
            remedy="Run once without --offline." if missing else "",
        )  # fmt: skip
        return
    try:
        files = locate(
            [("vllm", context.stack.vllm.version)], uv_platform=context.runtime.uv_platform,
            python=context.runtime.python, allow_sdist=True,
        )  # fmt: skip
        if context.stack.vllm.sdist_sha256 in files:
            yield Check(
                name="package index", found=f"reachable, and has vllm {context.stack.vllm.version}; {have}",
                build="ok", run="not needed",
            )  # fmt: skip
            return
        what, cause = (
            "reachable, but without the pinned release",
            "its vllm has another hash, or none",
        )
        remedy = "Use an index that has it (UV_DEFAULT_INDEX, uv.toml)."
    except Sm121Error as error:
        what, cause, remedy = error.what, error.cause, error.remedy
    yield Check(
        name="package index", found=f"{what.rstrip('.')}; {have}", build="fault" if missing else "warning",
        run="not needed", cause=cause, remedy=remedy,
    )  # fmt: skip


def check_sources(machine: Machine) -> Iterator[Check]:
    """Third-party sources of the profile: here, in a clone, on the index, or asked of a remote."""
    context = machine.context
    places: dict[str, list[str]] = {}
    why: dict[str, str] = {}
    for name in context.profile.sources:
        place, fault = _place(machine, name)
        places.setdefault(place, []).append(name)
        if fault:
            why[name] = fault
    if not places:
        return
    found = "; ".join(f"{place}: {', '.join(names)}" for place, names in places.items())
    yield Check(
        name="sources", build="fault" if why else "ok", run="not needed", found=found,
        cause="; ".join(f"{name}: {fault}" for name, fault in why.items()),
        remedy="Clone them where they can be reached, and name the clones with --clone or "
        "SM121_CLONES (docs/full.md)." if why else "",
    )  # fmt: skip


def _place(machine: Machine, name: str) -> tuple[str, str]:
    """Where a source would come from, and what is wrong with that ('' if nothing is)."""
    context = machine.context
    pin = context.stack.sources[name]
    folder = context.layout.third_party
    if machine.environment.get(pin.env):
        return f"in the folder that {pin.env} names", ""
    if is_made(name, pin, folder):
        return "here", ""
    has_git = machine.which("git") is not None
    if has_git and context.options.clones and _in_clones(context, pin):
        return "in clones", ""
    if pin.wheels:
        return "on the package index", ""
    if context.options.offline:
        return "nowhere here", "--offline forbids asking the git remote"
    fault = unreachable(pin.git, timeout_s=_GIT_TIMEOUT_S) if has_git else "git is not installed"
    return ("nowhere that can be reached" if fault else "git remotes"), fault


def _in_clones(context: Context, pin: SourcePin) -> bool:
    """Have the user's clones all commits of a source?"""
    clones = open_clones(context.options.clones)
    commits = [pin.pinned_commit, *used_submodules(pin).values()]
    with tempfile.TemporaryDirectory() as scratch:
        repository = Repository(Path(scratch) / "git")
        try:
            return all(c is not None and find_commit(repository, clones, c) for c in commits)
        finally:
            repository.close()


def missing_files(machine: Machine) -> tuple[int, list[LockedFile]]:
    """How many files a build of the profile needs, and those that the cache lacks.

    By name and hash in the path, which is what the cache goes by; content is checked when used.
    """
    context = machine.context
    cache = Cache(context.layout.cache, context.memory)
    files = [sdist_file(context.stack.vllm)]
    if machine.compiles:
        try:
            _, here = host_interpreter(context)
        except Sm121Error:
            here = context.runtime  # the check of Python says what is wrong
        files += _locked(machine, here, "host")
        if here.name != context.runtime.name:
            files += filter(of_toolkit, _locked(machine, context.runtime, "host"))
        if pin := context.stack.jit_cache if context.jit_modules else None:
            wanted = {FLASHINFER, TVM_FFI, *pin.imports}
            files += [f for f in _locked(machine, here, "family") if f.distribution in wanted]
    elif context.stack.overlay and (
        wheel := context.stack.overlay.wheels.get(context.options.target)
    ):
        files.append(
            LockedFile(distribution="vllm", version=context.stack.vllm.version, size=0,
                       filename=wheel.filename, sha256=wheel.sha256)
        )  # fmt: skip
    if context.options.with_deps:
        files += _locked(machine, context.runtime, "family")
    unique = {file.sha256: file for file in files}.values()
    return len(unique), [f for f in unique if not cache.path(f.sha256, f.filename).is_file()]


def _locked(machine: Machine, target: Target, kind: str) -> list[LockedFile]:
    context = machine.context
    try:
        lock = read_lock(lock_path(context.layout.pins, context.stack_name, kind, target))
        return list(locked_files(lock, target))
    except Sm121Error:
        return []  # `lock -- --check` says what is wrong with it
