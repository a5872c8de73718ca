"""Third-party sources of vLLM's CMake, made ready before configure; nothing is fetched later.

Providers, in this order: a folder named by the source's own environment variable
(VLLM_CUTLASS_SRC_DIR …), clones that the user names, the git remote, the identical tree inside a
wheel. Whoever provides, the content digest decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from packaging.utils import parse_wheel_filename

from sm121.errors import CheckFailed, HashMismatch, NetworkFault, ToolFailed
from sm121.fetch import Cache, fetch_locked
from sm121.files import HashMemory, fresh_directory, remove_tree
from sm121.gitrepo import Repository
from sm121.lock.pylock import LockedFile, Target
from sm121.pins.model import SourcePin, WheelProvider
from sm121.source.clones import Clone, find_commit
from sm121.source.content import Content, differences, read_content, write_list
from sm121.source.places import TREE, made_at, place_of
from sm121.toolkit.unpack import unpack
from sm121.ui import Ui

_GIT_TIMEOUT_S = 900
# Beside the tree of one pin, since a digest may cover all of the tree: who gave it, and its files.
_PROVIDER = "provider"
_FILES = "files"
# Of files that differ, so many are named.
_NAMED = 10


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
    memory: HashMemory,
    target: Target,
    offline: bool,
    ui: Ui,
    clones: Sequence[Clone] = (),
    environment: Mapping[str, str] = os.environ,
) -> Source:
    """Make one third-party source ready below `folder`.

    Raises HashMismatch when a provider's content is not the pinned one, or what an earlier run
    made was changed; NetworkFault when no provider can be reached (all of them named).
    """
    if local := environment.get(pin.env):
        path = Path(local).resolve()
        if not path.is_dir():
            raise CheckFailed(
                f"{pin.env} names {path}, which is not a folder.",
                remedy=f"Unset {pin.env}, or point it at a clone of {pin.git} at {pin.ref}.",
            )
        provider = f"local {pin.env}"
        content = _verified(
            name, pin, read_content(pin, path), provider=provider, ui=ui,
            remedy=f"Bring {path} to {pin.ref}, or unset {pin.env}.",
        )  # fmt: skip
        return Source(name=name, path=path, provider=provider, digest=content.digest)
    final = made_at(name, pin, folder)
    tree = final / TREE
    if is_made(name, pin, folder):
        return _made_earlier(name, pin, final, memory=memory, ui=ui)
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
                content = _verified(
                    name, pin, read_content(pin, fresh / TREE), provider=provider, ui=ui,
                    remedy="Nothing of it was kept. Find out whether the pin is wrong, or what "
                    f"{provider} gives for {pin.ref} was changed.",
                )  # fmt: skip
                write_list(fresh / _FILES, content)
                (fresh / _PROVIDER).write_text(provider)
        except (NetworkFault, ToolFailed) as fault:
            why = fault.what if label.startswith("wheel ") else fault.cause or fault.what
            failures.append(f"{label}: {why}")
            continue
        if provider != "git":
            why = next((f", since {f}" for f in failures if f.startswith("git: ")), "")
            ui.note(f"{name}: out of {provider}{why}")
        for file, sha256 in content.files.items():
            memory.remember(tree / file, sha256)
        return Source(name=name, path=tree, provider=provider, digest=content.digest)
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
    final = made_at(name, pin, folder)
    return (final / _PROVIDER).is_file() and (final / TREE).is_dir()


def is_as_pinned(name: str, pin: SourcePin, folder: Path, memory: HashMemory) -> bool:
    """Is the tree there, with the pinned content, or if none is pinned with that of the last look?
    Reads only files that changed since."""
    tree = place_of(name, pin, folder)
    if not tree.is_dir():
        return False
    content = read_content(pin, tree, memory.sha256)
    if pin.digest:
        return content.digest == pin.digest
    made = made_at(name, pin, folder)  # a local folder is hashed as an input of the stage
    return tree != made / TREE or not differences(made / _FILES, content)


def _made_earlier(name: str, pin: SourcePin, final: Path, *, memory: HashMemory, ui: Ui) -> Source:
    """A tree of an earlier run, if it still is what was obtained.

    One that somebody has changed is refused and not replaced: the change may be wanted, and is
    nowhere else.
    """
    tree, files = final / TREE, final / _FILES
    provider = (final / _PROVIDER).read_text().strip()
    content = read_content(pin, tree, memory.sha256)
    changed = differences(files, content)
    more = [f"and {len(changed) - _NAMED} more"] if len(changed) > _NAMED else []
    _verified(
        name, pin, content, provider=provider, ui=ui,
        details=[f"in {tree}:", *(f"  {line}" for line in (*changed[:_NAMED], *more))]
        if changed else [],
        remedy=f"It was changed after it was obtained. Copy what you want to keep out of {tree}, "
        f"then `rm -r {final}` and run the same command again: it is obtained anew.",
    )  # fmt: skip
    if changed or not files.is_file():
        write_list(files, content)
    return Source(name=name, path=tree, provider=provider, digest=content.digest)


def _verified(
    name: str,
    pin: SourcePin,
    content: Content,
    *,
    provider: str,
    ui: Ui,
    remedy: str,
    details: Sequence[str] = (),
) -> Content:
    for sub, wanted in pin.digest.items():
        if content.digest[sub] != wanted:
            raise HashMismatch(
                f"{name}: {sub} from {provider} is not the pinned content.",
                details=details,
                cause=f"wanted {wanted}, found {content.digest[sub]}",
                remedy=remedy,
            )
    if not pin.digest:
        ui.note(f"{name}: no content digest is pinned, so {provider} is taken at its word")
    return content


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
