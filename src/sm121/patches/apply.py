"""Apply a series to a base commit, off to the side: no working tree is touched.

Each patch becomes a commit with its own author and date and a fixed committer, so the same
series on the same base has the same commit ids on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sm121.errors import PatchFailed
from sm121.gitrepo import Repository
from sm121.patches.series import Patch

_OFFSET = re.compile(r"offset (-?\d+) line")
_STATUS = re.compile(r"^Upstream-Status:\s*(.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What became of one patch. commit and patch_id are git's; offset in lines, largest."""

    name: str
    status: Literal["applied", "upstreamed"]
    commit: str
    patch_id: str
    subject: str
    upstream_status: str
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedSeries:
    """The result: the last commit and one entry per patch, in order."""

    base: str
    commit: str
    patches: tuple[Applied, ...]


def apply_series(repository: Repository, base: str, series: Sequence[Patch]) -> AppliedSeries:
    """Apply all patches in order.

    A patch that the base already contains is reported as `upstreamed` and makes no commit;
    those after it are applied. Raises PatchFailed at the end if any patch fails: with the
    failing hunks, and for each patch after it whether it would apply without it.
    """
    commit = base
    done: list[Applied] = []
    failed: list[tuple[Patch, list[str]]] = []
    later: list[str] = []
    for patch in series:
        author, subject, body = repository.mailinfo(patch.path)
        if not (author.name and author.email and author.date):
            raise PatchFailed(
                f"{patch.path.name} says no author or no date.",
                cause="git would take the user's name and the time of day, and the commit ids "
                "would change with every run",
                remedy=f"Write {patch.path} with `git format-patch` (From:, Date:, Subject:).",
            )
        result, tree = repository.apply(commit, patch.path)
        upstream_status = (_STATUS.findall(body) or [""])[-1].strip()
        if not result.ok and repository.apply(commit, patch.path, check_reverse=True)[0].ok:
            done.append(
                Applied(
                    name=patch.name, status="upstreamed", commit="", subject=subject, offset=0,
                    patch_id=repository.patch_id(patch.path), upstream_status=upstream_status,
                )
            )  # fmt: skip
            continue
        if not result.ok:
            failed.append((patch, failing_hunks(result.messages)))
            continue
        if failed:
            later.append(patch.name)
        commit = repository.commit_tree(
            tree,
            parents=(commit,),
            message=f"{subject}\n\n{body}\n",
            author=author,
            date=author.date,
        )
        done.append(
            Applied(
                name=patch.name, status="applied", commit=commit, subject=subject,
                patch_id=repository.patch_id(patch.path), upstream_status=upstream_status,
                offset=max((abs(int(n)) for m in result.messages for n in _OFFSET.findall(m)), default=0),
            )
        )  # fmt: skip
    if failed:
        raise _failure(base, failed, later)
    return AppliedSeries(base=base, commit=commit, patches=tuple(done))


def failing_hunks(messages: Sequence[str]) -> list[str]:
    """Out of `git apply --verbose`: which file and line failed, and the lines searched for."""
    kept: list[str] = []
    searching = False
    for line in messages:
        if line.startswith("error: while searching for:"):
            searching = True
            kept.append("the tree has no longer these lines:")
        elif line.startswith("error:"):
            searching = False
            kept.append(line.removeprefix("error: "))
        elif searching and not line.startswith(("Checking patch", "Hunk #")):
            kept.append(f"  | {line}")
    return kept


def _failure(
    base: str, failed: Sequence[tuple[Patch, list[str]]], later: Sequence[str]
) -> PatchFailed:
    details: list[str] = []
    for patch, hunks in failed:
        details.append(f"{patch.path.name}:")
        details += [f"  {line}" for line in hunks[:40]]
    if later:
        details.append(f"these after it apply without it: {', '.join(later)}")
    first = failed[0][0]
    return PatchFailed(
        f"{len(failed)} patch(es) of the series do not apply; nothing was built.",
        details=details,
        cause=f"the base {base[:12]} differs from what {first.path.name} was written against",
        remedy=f"Edit {first.path} to match the base, then `nox -s patch`.",
    )
