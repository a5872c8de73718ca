"""Third-party sources of vLLM's CMake, made ready before configure; nothing is fetched later.

Providers, in this order: a local clone named by the source's own environment variable
(VLLM_CUTLASS_SRC_DIR …), the git remote, the identical tree inside a wheel. Whoever
provides, the content digest decides.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import parse_wheel_filename

from sm121.errors import CheckFailed, HashMismatch, NetworkFault, ToolFailed
from sm121.fetch import Cache, fetch_locked
from sm121.files import fresh_directory, remove_tree, sha256_text, tree_digest
from sm121.gitrepo import Repository
from sm121.lock.pylock import LockedFile, Target
from sm121.pins.model import SourcePin, WheelProvider
from sm121.toolkit.unpack import unpack
from sm121.ui import Ui

_GIT_TIMEOUT_S = 900
# In the folder of one pin: the tree, and beside it (a digest may cover all of it) who gave it.
_TREE, _PROVIDER = "tree", "provider"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A source made ready: where, by whom, and the digests that were verified."""

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
    # Named by the whole pin: with other submodules or folders it is another tree.
    final = folder / f"{name}-{sha256_text(pin.model_dump_json())[:12]}"
    tree, marker = final / _TREE, final / _PROVIDER
    if marker.is_file():
        return _verified(name, pin, tree, provider=marker.read_text().strip(), ui=ui)
    failures: list[str] = []
    if offline:
        failures.append("git: --offline")
    else:
        try:
            with fresh_directory(final) as fresh:
                _from_git(pin, fresh / _TREE, repository_path=folder / f"{name}.git")
                source = _verified(name, pin, fresh / _TREE, provider="git", ui=ui)
                (fresh / _PROVIDER).write_text("git")
            return replace(source, path=tree)
        except NetworkFault as fault:
            failures.append(f"git: {fault.cause or fault.what}")
    for provider in pin.wheels:
        label = f"wheel {provider.filename}"
        try:
            with fresh_directory(final) as fresh:
                _from_wheel(
                    provider, fresh / _TREE, cache=cache, target=target, offline=offline, ui=ui
                )
                source = _verified(name, pin, fresh / _TREE, provider=label, ui=ui)
                (fresh / _PROVIDER).write_text(label)
            ui.note(f"{name}: out of {label}, since {failures[0]}")
            return replace(source, path=tree)
        except (NetworkFault, ToolFailed) as fault:
            failures.append(f"{label}: {fault.what}")
    raise NetworkFault(
        f"{name} ({pin.ref}) could not be obtained.",
        cause="; ".join(failures),
        remedy=f"Clone {pin.git} at {pin.ref} yourself and set {pin.env} to its folder.",
    )


def _verified(name: str, pin: SourcePin, path: Path, *, provider: str, ui: Ui) -> Source:
    found = {sub: tree_digest(path / sub) for sub in pin.digest}
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


def _from_git(pin: SourcePin, fresh: Path, *, repository_path: Path) -> None:
    repository = Repository(repository_path)
    commit = repository.fetch_commit(pin.git, ref=pin.ref, timeout_s=_GIT_TIMEOUT_S)
    repository.export(commit, fresh)
    for path, wanted in pin.submodules.items():
        url = repository.submodule_url(commit, path, base=pin.git)
        recorded = repository.submodule_commit(commit, path)
        if recorded != wanted:
            raise HashMismatch(
                f"{pin.git} at {pin.ref} has another submodule at {path}.",
                cause=f"pinned {wanted}, found {recorded}",
            )
        repository.export(
            repository.fetch_commit(url, ref=wanted, timeout_s=_GIT_TIMEOUT_S), fresh / path
        )
    if pin.digest:
        # What the digest covers is all that may be used, so that providers can't differ.
        _keep_only(fresh, pin.digest)


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
) -> None:
    """Copy the subtrees out of a wheel; what they must be is said by the source's digest."""
    distribution, version, _, _ = parse_wheel_filename(provider.filename)
    wheel = LockedFile(
        distribution=distribution,
        version=str(version),
        filename=provider.filename,
        sha256=provider.sha256,
        size=0,
    )
    path = fetch_locked([wheel], target=target, cache=cache, offline=offline, ui=ui)[wheel.sha256]

    def rename(member: str) -> str | None:
        for destination, prefix in provider.subtrees.items():
            if member.startswith(f"{prefix}/"):
                return f"{destination}/{member.removeprefix(f'{prefix}/')}"
        return None

    unpack(path, fresh, rename)
