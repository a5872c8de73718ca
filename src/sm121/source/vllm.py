"""Pristine vLLM: the pinned commit from the git remote, else the sdist of the same release.

Both become a commit in build/source/vllm.git. They are two bases with different commit ids:
the sdist adds metadata files and lacks links. Which one was used is said, and why.
"""

from __future__ import annotations

import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm121.errors import HashMismatch, NetworkFault
from sm121.fetch import Cache, fetch_locked
from sm121.gitrepo import Repository
from sm121.lock.pylock import LockedFile, Target
from sm121.pins.model import VllmPin
from sm121.ui import Ui

_GIT_TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The commit that the series is applied to, who provided it, and why that one."""

    commit: str
    provider: Literal["git", "sdist"]
    reason: str


def sdist_file(pin: VllmPin) -> LockedFile:
    """The release's sdist as a file to fetch."""
    return LockedFile(
        distribution="vllm",
        version=pin.version,
        filename=f"vllm-{pin.version}.tar.gz",
        sha256=pin.sdist_sha256,
        size=0,
    )


def obtain(
    pin: VllmPin,
    repository: Repository,
    *,
    cache: Cache,
    target: Target,
    offline: bool,
    ui: Ui,
) -> Base:
    """Make the pinned release available as a commit.

    Raises HashMismatch when a provider delivers something else, NetworkFault when none can
    be reached.
    """
    if repository.commit_of(_ref(pin, "git")) == pin.commit:
        return Base(commit=pin.commit, provider="git", reason=f"commit of {pin.tag}")
    known = repository.commit_of(_ref(pin, "sdist"))
    if offline:
        why = "--offline"
    else:
        try:
            _from_git(pin, repository)
            return Base(commit=pin.commit, provider="git", reason=f"commit of {pin.tag}")
        except NetworkFault as fault:
            why = f"the git remote can't be used: {fault.cause or fault.what}"
    if known is None:
        known = _from_sdist(pin, repository, cache=cache, target=target, offline=offline, ui=ui)
    return Base(commit=known, provider="sdist", reason=why)


def _ref(pin: VllmPin, provider: str) -> str:
    # The hash in the name: another pin of the same release is another base.
    content = pin.commit if provider == "git" else pin.sdist_sha256
    return f"refs/sm121/upstream/{pin.version}/{provider}-{content[:16]}"


def _from_git(pin: VllmPin, repository: Repository) -> None:
    # The tag, not the commit: not every server lets a client ask for a bare commit.
    commit = repository.fetch_commit(pin.git, ref=pin.tag, timeout_s=_GIT_TIMEOUT_S)
    if commit != pin.commit:
        raise HashMismatch(
            f"{pin.git} has another commit as {pin.tag}.",
            cause=f"pinned {pin.commit}, found {commit}: the tag was moved, or the pin is wrong",
            remedy="Find out which, then correct vllm.commit in stack.toml.",
        )
    repository.point(_ref(pin, "git"), commit)


def _from_sdist(
    pin: VllmPin,
    repository: Repository,
    *,
    cache: Cache,
    target: Target,
    offline: bool,
    ui: Ui,
) -> str:
    wanted = sdist_file(pin)
    archive = fetch_locked(
        [wanted], target=target, cache=cache, offline=offline, ui=ui, allow_sdist=True
    )[wanted.sha256]
    with tempfile.TemporaryDirectory(dir=repository.path.parent, prefix=".sdist-") as scratch:
        root = unpack_sdist(archive, Path(scratch), name=f"vllm-{pin.version}")
        commit = repository.import_tree(
            root,
            message=f"vLLM {pin.version}\n\nImported from {archive.name}\nsha256 {pin.sdist_sha256}\n",
            date=pin.date,
        )
    repository.point(_ref(pin, "sdist"), commit)
    return commit


def unpack_sdist(archive: Path, folder: Path, *, name: str) -> Path:
    """Unpack a sdist (gzipped tar, PEP 527) and return its one top folder.

    Members that would land outside, devices and absolute links are refused (PEP 706 'data'
    filter). Raises HashMismatch for an archive that is cut off or is not one.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise HashMismatch(
            f"{archive.name} can't be unpacked.",
            cause=str(error) or type(error).__name__,
            remedy=f"Remove {archive.parent} and run the same command again.",
        ) from error
    root = folder / name
    if not root.is_dir():
        raise HashMismatch(
            f"{archive.name} holds no folder {name}/.", cause="not this release's sdist"
        )
    return root
