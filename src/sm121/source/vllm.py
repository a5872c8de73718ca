"""Pristine vLLM: the pinned commit from the git remote, else the sdist of the same release.

Both become a commit in build/source/vllm.git. They are two bases with different commit ids:
the sdist adds metadata files and lacks links. Which one was used is said, and why.
"""

from __future__ import annotations

import posixpath
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal, cast

from isal import igzip, isal_zlib

from sm121.errors import HashMismatch, NetworkFault
from sm121.fetch import Cache, fetch_locked
from sm121.gitimport import ImportedFile
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
    if repository.commit_of(_git_ref(pin)) == pin.commit:
        return Base(commit=pin.commit, provider="git", reason=f"commit of {pin.tag}")
    if offline:
        why = "--offline"
    else:
        try:
            _from_git(pin, repository)
            return Base(commit=pin.commit, provider="git", reason=f"commit of {pin.tag}")
        except NetworkFault as fault:
            why = f"the git remote can't be used: {fault.cause or fault.what}"
    commit = from_sdist(
        sdist_file(pin), pin.date, repository, cache=cache, target=target, offline=offline, ui=ui
    )
    return Base(commit=commit, provider="sdist", reason=why)


# The content in a ref's name: another pin of the same release is another base.
def _git_ref(pin: VllmPin) -> str:
    return f"refs/sm121/upstream/{pin.version}/git-{pin.commit[:16]}"


def _sdist_ref(file: LockedFile) -> str:
    return f"refs/sm121/upstream/{file.version}/sdist-{file.sha256[:16]}"


def _from_git(pin: VllmPin, repository: Repository) -> None:
    # The tag, not the commit: not every server lets a client ask for a bare commit.
    commit = repository.fetch_commit(pin.git, ref=pin.tag, timeout_s=_GIT_TIMEOUT_S)
    if commit != pin.commit:
        raise HashMismatch(
            f"{pin.git} has another commit as {pin.tag}.",
            cause=f"pinned {pin.commit}, found {commit}: the tag was moved, or the pin is wrong",
            remedy="Find out which, then correct vllm.commit in stack.toml.",
        )
    repository.point(_git_ref(pin), commit)


def from_sdist(
    wanted: LockedFile,
    date: datetime | None,
    repository: Repository,
    *,
    cache: Cache,
    target: Target,
    offline: bool,
    ui: Ui,
) -> str:
    """A release's sdist as a commit; one that was imported before is not even fetched.

    date: of the commit; None: the release's own, see `release_date`.
    """
    ref = _sdist_ref(wanted)
    known = repository.commit_of(ref)
    if known and date in (None, repository.commit_date(known)):
        return known
    archive = fetch_locked(
        [wanted], target=target, cache=cache, offline=offline, ui=ui, allow_sdist=True
    )[wanted.sha256]
    commit = import_sdist(archive, wanted, date or release_date(archive), repository)
    repository.point(ref, commit)
    return commit


def import_sdist(archive: Path, release: LockedFile, date: datetime, repository: Repository) -> str:
    """Store a sdist as one parentless commit; the same sdist and date, the same id."""
    return repository.import_files(
        read_sdist(archive, name=f"vllm-{release.version}"),
        message=f"vLLM {release.version}\n\nImported from {release.filename}\n"
        f"sha256 {release.sha256}\n",
        date=date,
    )


def release_date(archive: Path) -> datetime:
    """When a release was checked out to be packed: the time of vllm/version.py in its sdist.

    Other files are touched later by the build backend (PKG-INFO, pyproject.toml in 0.26.0).
    """
    with _gunzipped(archive) as plain, tarfile.open(fileobj=plain, mode="r:") as tar:
        times = {m.name.partition("/")[2]: int(m.mtime) for m in tar if m.isfile()}
    return datetime.fromtimestamp(times.get("vllm/version.py", max(times.values(), default=0)), UTC)


def _gunzipped(archive: Path) -> BinaryIO:
    """igzip inflates a sdist three times as fast as zlib."""
    return cast(BinaryIO, igzip.open(archive))  # type: ignore[no-untyped-call]


def _contained(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The member, if it is a file, folder or link that stays in the folder it is unpacked to.

    What PEP 706's data filter refuses; that came with CPython 3.11.4, and Debian 12 has 3.11.2.
    Raises tarfile.TarError.
    """
    place = PurePosixPath(member.name)
    names = [place]
    if member.issym():
        names.append(place.parent / member.linkname)
    elif member.islnk():
        names.append(PurePosixPath(member.linkname))
    elif not (member.isfile() or member.isdir()):
        raise tarfile.ReadError(f"{member.name} is neither a file, a folder nor a link")
    for name in names:
        if name.is_absolute() or posixpath.normpath(name).startswith(".."):
            raise tarfile.ReadError(f"{member.name} would be outside of the folder, as {name}")
    return member


def read_sdist(archive: Path, *, name: str) -> Iterator[ImportedFile]:
    """The files below the one top folder of a sdist (gzipped tar, PEP 527), in one pass.

    Members that would land outside, devices and absolute links are refused. Raises HashMismatch for an archive that is cut off or is not one.
    """
    found = False
    try:
        with _gunzipped(archive) as plain, tarfile.open(fileobj=plain, mode="r:") as tar:
            for raw in tar:
                member = _contained(raw)
                top, *rest = PurePosixPath(member.name).parts
                if top != name:
                    continue
                found = True
                path = "/".join(rest)
                if member.issym():
                    yield ImportedFile(path=path, mode="120000", data=member.linkname.encode())
                elif (file := tar.extractfile(raw)) is not None:
                    mode = "100755" if (member.mode or 0) & 0o100 else "100644"
                    yield ImportedFile(path=path, mode=mode, data=file.read())
    except (tarfile.TarError, EOFError, OSError, KeyError, zlib.error, isal_zlib.error) as error:  # type: ignore[misc]  # its stub says object
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise HashMismatch(
            f"{archive.name} can't be unpacked.",
            cause=str(error) or type(error).__name__,
            remedy=f"Remove {archive.parent} and run the same command again.",
        ) from error
    if not found:
        raise HashMismatch(
            f"{archive.name} holds no folder {name}/.", cause="not this release's sdist"
        )
