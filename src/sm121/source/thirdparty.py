"""Third-party sources of vLLM's CMake, made ready before configure; nothing is fetched later.

Providers, in this order: a folder named by the source's own environment variable
(VLLM_CUTLASS_SRC_DIR …), clones that the user names, the git remote, the identical tree inside a
wheel. Whoever provides, the content digest decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from packaging.utils import parse_wheel_filename

from sm121.errors import CheckFailed, HashMismatch, NetworkFault, ToolFailed
from sm121.fetch import Cache, fetch_locked
from sm121.files import fresh_directory, remove_tree, tree_digest
from sm121.gitrepo import Repository
from sm121.lock.pylock import LockedFile, Target
from sm121.pins.model import SourcePin, WheelProvider
from sm121.source.clones import Clone, find_commit
from sm121.source.places import TREE, made_at
from sm121.toolkit.unpack import unpack
from sm121.ui import Ui

_GIT_TIMEOUT_S = 900
# Beside the tree of one pin, since a digest may cover all of the tree: who gave it.
_PROVIDER = "provider"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source made ready: where, by whom, and the digests of what is in it: the pinned ones; if
    none is pinned, that of all of it, at '.'."""

    name: str
    path: Path
    provider: str
    digest: Mapping[str, str]


def obtain(
    name: str,
    pin: SourcePin,
    *,
    folder: Path,
    cache: Cache,
    target: Target,
    offline: bool,
    ui: Ui,
    clones: Sequence[Clone] = (),
    environment: Mapping[str, str] = os.environ,
) -> Source:
    """Make one third-party source ready below `folder`.

    Raises HashMismatch when a provider's content is not the pinned one, NetworkFault when
    no provider can be reached (all of them named).
    """
    if local := environment.get(pin.env):
        path = Path(local).resolve()
        if not path.is_dir():
            raise CheckFailed(
                f"{pin.env} names {path}, which is not a folder.",
                remedy=f"Unset {pin.env}, or point it at a clone of {pin.git} at {pin.ref}.",
            )
        return _verified(name, pin, path, provider=f"local {pin.env}", ui=ui)
    final = made_at(name, pin, folder)
    tree, marker = final / TREE, final / _PROVIDER
    if marker.is_file():
        return _verified(name, pin, tree, provider=marker.read_text().strip(), ui=ui)
    providers: list[tuple[str, Callable[[Path], str]]] = []
    if clones:
        from_clones = partial(_from_clones, pin, folder / f"{name}.git", clones)
        providers.append((f"{len(clones)} local clone(s)", from_clones))
    from_git = partial(_from_git, pin, folder / f"{name}.git", clones)
    providers.append(("git", _forbidden if offline else from_git))
    providers += [
        (
            f"wheel {wheel.filename}",
            partial(_from_wheel, wheel, cache=cache, target=target, offline=offline, ui=ui),
        )
        for wheel in pin.wheels
    ]
    failures = []
    for label, provide in providers:
        try:
            with fresh_directory(final) as fresh:
                provider = provide(fresh / TREE)
                source = _verified(name, pin, fresh / TREE, provider=provider, ui=ui)
                (fresh / _PROVIDER).write_text(provider)
        except (NetworkFault, ToolFailed) as fault:
            why = fault.what if label.startswith("wheel ") else fault.cause or fault.what
            failures.append(f"{label}: {why}")
            continue
        if provider != "git":
            why = next((f", since {f}" for f in failures if f.startswith("git: ")), "")
            ui.note(f"{name}: out of {provider}{why}")
        return replace(source, path=tree)
    raise NetworkFault(
        f"{name} ({pin.ref}) could not be obtained.",
        cause="; ".join(failures),
        remedy=f"Clone {pin.git} where it can be reached, with {pin.ref}"
        + (" and its submodules" if used_submodules(pin) else "")
        + ", and name "
        + (
            "the clone with --clone PATH (docs/full.md)."
            if pin.pinned_commit
            else f"its folder in {pin.env}."
        ),
    )


def is_made(name: str, pin: SourcePin, folder: Path) -> bool:
    """Was it made by an earlier run? Its content is checked when it is used."""
    return (made_at(name, pin, folder) / _PROVIDER).is_file()


def _verified(name: str, pin: SourcePin, path: Path, *, provider: str, ui: Ui) -> Source:
    found = {sub: tree_digest(path / sub) for sub in pin.digested}
    for sub, wanted in pin.digest.items():
        if found[sub] != wanted:
            raise HashMismatch(
                f"{name}: {sub} from {provider} is not the pinned content.",
                cause=f"wanted {wanted}, found {found[sub]}",
                remedy=f"Remove {path} if the pipeline made it; otherwise bring the clone to {pin.ref}.",
            )
    if not pin.digest:
        ui.note(f"{name}: no content digest is pinned, so {provider} is taken at its word")
    return Source(name=name, path=path, provider=provider, digest=found)


def _forbidden(_: Path) -> str:
    raise NetworkFault("--offline forbids fetching.", cause="--offline")


def _from_git(pin: SourcePin, repository_path: Path, clones: Sequence[Clone], fresh: Path) -> str:
    """Out of the remote that the pin names; a submodule out of a clone if one has it."""
    repository = Repository(repository_path)
    commit = repository.fetch_commit(pin.git, ref=pin.ref, timeout_s=_GIT_TIMEOUT_S)
    repository.export(commit, fresh)
    if pin.commit and commit != pin.commit:
        raise HashMismatch(
            f"{pin.git} has another commit as {pin.ref}.",
            cause=f"pinned {pin.commit}, found {commit}: the tag was moved, or the pin is wrong",
        )
    for path, wanted in _submodules(pin, repository, commit).items():
        if objects := find_commit(repository, clones, wanted):
            with repository.borrowing(objects):
                repository.export(wanted, fresh / path, paths=_below(pin, path))
            continue
        url = repository.submodule_url(commit, path, base=pin.git)
        repository.export(
            repository.fetch_commit(url, ref=wanted, timeout_s=_GIT_TIMEOUT_S), fresh / path
        )
    if pin.digest:
        # What the digest covers is all that may be used, so that providers can't differ.
        _keep_only(fresh, pin.digest)
    return "git"


def _from_clones(
    pin: SourcePin, repository_path: Path, clones: Sequence[Clone], fresh: Path
) -> str:
    """Out of the clones that the user has, at the pinned commit, whatever is checked out there."""
    commit = pin.pinned_commit
    if commit is None:
        raise NetworkFault(
            f"{pin.ref} is no commit.", cause=f"{pin.ref} has no commit in stack.toml"
        )
    repository = Repository(repository_path)
    # One that has it may have its submodules too.
    objects = find_commit(repository, clones, commit)
    if objects is None:
        raise NetworkFault(f"No clone has {commit}.", cause=f"none has commit {commit}")
    with repository.borrowing(objects):
        repository.export(commit, fresh, paths=tuple(pin.digest))
        submodules = _submodules(pin, repository, commit)
    for path, wanted in submodules.items():
        objects = find_commit(repository, clones, wanted)
        if objects is None:
            raise NetworkFault(
                f"No clone has {wanted}.",
                cause=f"one has {commit}, but none has {wanted}, its submodule {path}",
            )
        with repository.borrowing(objects):
            repository.export(wanted, fresh / path, paths=_below(pin, path))
    return f"a local clone, commit {commit}"


def _submodules(pin: SourcePin, repository: Repository, commit: str) -> dict[str, str]:
    """The submodules that are used, path → commit; all pinned ones are compared with the tree's."""
    for path, wanted in pin.submodules.items():
        recorded = repository.submodule_commit(commit, path)
        if recorded != wanted:
            raise HashMismatch(
                f"{pin.git} at {pin.ref} has another submodule at {path}.",
                cause=f"pinned {wanted}, found {recorded}",
            )
    return used_submodules(pin)


def used_submodules(pin: SourcePin) -> dict[str, str]:
    """The submodules in which there is anything that the build uses, path → commit."""
    return {
        path: wanted
        for path, wanted in pin.submodules.items()
        if not pin.digest or _below(pin, path)
    }


def _below(pin: SourcePin, submodule: str) -> tuple[str, ...]:
    """The folders of a submodule that the digest covers, as paths in it."""
    return tuple(
        PurePosixPath(sub).relative_to(submodule).as_posix()
        for sub in pin.digest
        if PurePosixPath(sub).is_relative_to(submodule)
    ) or ((".",) if "." in pin.digest else ())


def _keep_only(folder: Path, subtrees: Iterable[str]) -> None:
    for file in sorted(folder.rglob("*"), reverse=True):
        relative = file.relative_to(folder)
        if any(relative.is_relative_to(s) or Path(s).is_relative_to(relative) for s in subtrees):
            continue
        remove_tree(file)


def _from_wheel(
    provider: WheelProvider,
    fresh: Path,
    *,
    cache: Cache,
    target: Target,
    offline: bool,
    ui: Ui,
) -> str:
    """Copy the subtrees out of a wheel; what they must be is said by the source's digest."""
    distribution, version, _, _ = parse_wheel_filename(provider.filename)
    wheel = LockedFile(
        distribution=distribution,
        version=str(version),
        filename=provider.filename,
        sha256=provider.sha256,
        size=0,
    )
    if provider.target:
        glibc = ".".join(map(str, target.glibc))
        target = Target.make(provider.target, python=target.python, glibc=glibc)
    path = fetch_locked([wheel], target=target, cache=cache, offline=offline, ui=ui)[wheel.sha256]

    def rename(member: str) -> str | None:
        for destination, prefix in provider.subtrees.items():
            if member.startswith(f"{prefix}/"):
                return f"{destination}/{member.removeprefix(f'{prefix}/')}"
        return None

    unpack(path, fresh, rename)
    return f"wheel {provider.filename}"
