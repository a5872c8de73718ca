"""From what the user named to a commit: the new upstream, and the pinned one to compare with.

A release number ('0.28.0') is the sdist on the index. Anything else is a ref of the git remote;
a release's tag whose remote can't be reached is the sdist again, and that is said. Both sides
come from the same provider, since sdist and git tree differ by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from sm121.context import Context
from sm121.errors import NetworkFault, UsageFault
from sm121.fetch import Cache
from sm121.gitseries import SeriesRepository
from sm121.pins.texts import GitRef
from sm121.rebase.releases import Releases, release_of
from sm121.source import vllm

_GIT_TIMEOUT_S = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstream:
    """A new upstream. sdist_sha256: '' for a git ref, until accepting asks. label: as the user named it; version '' for a ref that is no release.

    history: are upstream's own commits there? git_commit: '' if only the sdist is known.
    """

    label: str
    version: str
    commit: str
    provider: Literal["git", "sdist"]
    reason: str
    sdist_sha256: str
    date: datetime
    git_commit: str = ""

    @property
    def history(self) -> bool:
        return self.provider == "git"


def pinned(context: Context, repository: SeriesRepository, provider: str) -> str:
    """The pinned release's commit, from the same provider as the new one."""
    pin, options = context.stack.vllm, context.options
    cache = Cache(context.layout.cache, context.memory)
    if provider == "sdist":
        return vllm.from_sdist(
            vllm.sdist_file(pin), pin.date, repository, cache=cache, target=context.runtime,
            offline=options.offline, ui=context.ui,
        )  # fmt: skip
    base = vllm.obtain(
        pin, repository, cache=cache, target=context.runtime, offline=options.offline, ui=context.ui
    )
    if base.provider != "git":
        raise NetworkFault(
            f"{pin.tag} could not be fetched from {pin.git}, and the new upstream is from there.",
            cause=base.reason,
            remedy="Name a release (`--onto 0.28.0`): both sides are then taken from sdists.",
        )
    return base.commit


def find(
    label: str, context: Context, repository: SeriesRepository, releases: Releases
) -> Upstream:
    """The commit that the user means. Raises UsageFault or NetworkFault."""
    try:
        TypeAdapter(GitRef).validate_python(label)
    except ValidationError as error:
        raise UsageFault(
            f"--onto {label}: not a release, tag, branch or commit.",
            remedy="Name a release (0.28.0), or a ref of the git remote (v0.28.0, main).",
        ) from error
    version = release_of(label)
    if version == label:
        return _release(label, version, "", context, repository, releases)
    if context.options.offline:
        if version:
            return _release(label, version, "--offline", context, repository, releases)
        raise NetworkFault(f"--onto {label} has to be fetched, and --offline forbids it.")
    pin = context.stack.vllm
    try:
        commit = repository.fetch_history(
            pin.git, ref=label, since=f"{pin.date:%Y-%m-%d}", timeout_s=_GIT_TIMEOUT_S
        )
    except NetworkFault as fault:
        if "find remote ref" in fault.cause:
            raise UsageFault(
                f"{pin.git} has no ref {label}.", cause=fault.cause,
                remedy="Name a tag, a branch or a full commit id that it has, or a release.",
            ) from fault  # fmt: skip
        if not version:
            raise
        why = f"the git remote can't be used: {fault.cause or fault.what}"
        return _release(label, version, why, context, repository, releases)
    repository.point(f"refs/sm121/onto/{commit}", commit)
    return Upstream(
        label=label, version=version, commit=commit, provider="git", reason=f"{label} of the remote",
        sdist_sha256="", date=repository.commit_date(commit), git_commit=commit,
    )  # fmt: skip


def _release(
    label: str, version: str, reason: str, context: Context, repository: SeriesRepository,
    releases: Releases,
) -> Upstream:  # fmt: skip
    if version == context.stack.vllm.version:
        raise UsageFault(
            f"--onto {label}: the series is for {version} already.",
            remedy="Name another release; `--check` tries all newer ones.",
        )
    wanted = releases.sdist(version)
    cache = Cache(context.layout.cache, context.memory)
    commit = vllm.from_sdist(
        wanted, releases.date(version), repository, cache=cache, target=context.runtime,
        offline=context.options.offline, ui=context.ui,
    )  # fmt: skip
    return Upstream(
        label=label, version=version, commit=commit, provider="sdist",
        reason=reason or "a release on the index", sdist_sha256=wanted.sha256, date=repository.commit_date(commit),
    )  # fmt: skip
