"""The series as a branch to edit: build/series/<stack>, a git working tree of its own.

Each patch is a commit; a trailer `Patch-Name:` in its message carries the file's name through
`git commit --amend` and `git rebase -i`, and is taken off again by export.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sm121.errors import PatchFailed, UsageFault
from sm121.files import write_atomic
from sm121.gitseries import SeriesRepository
from sm121.gitworktree import Worktree
from sm121.layout import Layout
from sm121.patches.apply import AppliedSeries
from sm121.patches.export import Exported, export_commit
from sm121.patches.series import Patch

_TRAILER = re.compile(r"^Patch-Name:[ \t]*(\S*)[ \t]*$\n?", re.MULTILINE)
_LAST_IS_TRAILER = re.compile(r"\n\n(?:.+\n)*[A-Za-z][A-Za-z-]*: .+\s*$")
_WORDS = 5


def folder_of(layout: Layout, stack: str) -> Path:
    return layout.build / "series" / stack


def branch_of(stack: str) -> str:
    return f"series/{stack}"


def open_branch(
    repository: SeriesRepository, stack: str, folder: Path, series: Sequence[Patch],
    applied: AppliedSeries,
) -> bool:  # fmt: skip
    """Make the branch and its working tree from an applied series; False if it is there already
    (whatever it holds then is the user's)."""
    if folder.is_dir() and repository.commit_of(f"refs/heads/{branch_of(stack)}"):
        return False
    commit = applied.base
    for patch, result in zip(series, applied.patches, strict=True):
        if not result.commit:
            continue
        author, _, _ = repository.mailinfo(patch.path)
        commit = repository.commit_tree(
            repository.tree_of(result.commit), parents=(commit,), author=author, date=author.date,
            message=with_name(repository.message(result.commit), patch.name),
        )  # fmt: skip
    repository.point(f"refs/sm121/editing/{stack}", applied.base)
    repository.add_worktree(folder, commit, branch=branch_of(stack))
    note_exported(folder, commit)
    return True


def note_exported(folder: Path, commit: str) -> None:
    """Remember up to which commit branch and files are known to agree: `clean` spares the rest."""
    write_atomic(folder.with_name(f"{folder.name}.exported"), commit)


def with_name(message: str, name: str) -> str:
    """A message with the trailer, in its last paragraph if that has trailers."""
    text = message.rstrip("\n")
    gap = "\n" if _LAST_IS_TRAILER.search(text) else "\n\n"
    return f"{text}{gap}Patch-Name: {name}\n"


def take_name(message: str) -> tuple[str, str]:
    """A message without the trailer, and the name; made of the subject if there is none."""
    named: list[str] = _TRAILER.findall(message)
    text = _TRAILER.sub("", message).rstrip("\n") + "\n"
    subject = text.splitlines()[0] if text.strip() else ""
    words = re.findall(r"[a-z0-9]+", re.sub(r"^(\s*\[[^\]]*\])+", "", subject).lower())
    while words and not words[0][0].isalpha():
        words.pop(0)
    return text, named[-1] if named and named[-1] else "-".join(words[:_WORDS])


def read_branch(repository: SeriesRepository, stack: str, folder: Path) -> list[Exported]:
    """Every commit of the branch as a patch file.

    Raises UsageFault if there is no branch, PatchFailed if something in it is no patch, or the
    working tree has changes that are not committed.
    """
    tip = repository.commit_of(f"refs/heads/{branch_of(stack)}")
    base = repository.commit_of(f"refs/sm121/editing/{stack}")
    if tip is None or base is None or not folder.is_dir():
        raise UsageFault(
            f"There is no branch of {stack} to export.",
            remedy=f"`nox -s patch -- --edit --stack {stack}` makes one in {folder}.",
        )
    tree = Worktree(folder)
    if loose := sorted({*tree.unstaged(), *tree.staged(), *tree.unmerged()}):
        raise PatchFailed(
            f"{len(loose)} file(s) in {folder} are not committed.",
            details=loose[:20],
            remedy="Commit them (`git commit --fixup`, `--amend`, or a new commit), or drop them.",
        )
    if tree.head() != tip:
        raise PatchFailed(
            f"{folder} is not on its branch {branch_of(stack)}.",
            cause="a `git rebase` is under way there, or another commit is checked out",
            remedy=f"Finish it, and `git switch {branch_of(stack)}`.",
        )
    if not repository.is_ancestor(base, tip):
        raise PatchFailed(
            f"The branch no longer starts at the pinned release {base[:12]}.",
            remedy=f"In {folder}: `git rebase --onto {base[:12]} OLD-BASE`.",
        )
    return _named(repository, repository.commits(base, tip))


def _named(repository: SeriesRepository, commits: Sequence[str]) -> list[Exported]:
    found: list[Exported] = []
    for commit in commits:
        message, name = take_name(repository.message(commit))
        subject = message.splitlines()[0]
        if subject.startswith(("fixup! ", "squash! ", "amend! ")):
            raise PatchFailed(
                f"{commit[:12]} is not folded in yet: {subject}",
                remedy="`git rebase -i --autosquash` does that.",
            )
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
            raise PatchFailed(
                f"{commit[:12]} ({subject}) has no usable name for its file: {name!r}.",
                remedy="Write a line `Patch-Name: lower-case-words` into its message.",
            )
        if name in [one.name for one in found]:
            raise PatchFailed(
                f"Two commits would be {name}.patch; the second is {commit[:12]} ({subject}).",
                remedy="Write another `Patch-Name: …` line into its message.",
            )
        found.append(export_commit(repository, repository.reworded(commit, message), name=name))
    return found
