"""Git clones on this machine, as providers of pinned commits.

A commit id is a digest of everything below it, so whoever has the pinned commit may provide it:
a clone is not asked whose it is, nor what is checked out or edited in it. Tags are not looked at,
since several projects have tags of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sm121.errors import UsageFault
from sm121.gitrepo import Repository


@dataclass(frozen=True, kw_only=True, slots=True)
class Clone:
    """A repository that somebody else owns. path: as it was given. git: its git folder."""

    path: Path
    git: Path

    def object_folders(self) -> list[Path]:
        """Its objects, and those of the submodules that it holds (.git/modules)."""
        modules = sorted(p for p in self.git.glob("modules/**/objects") if (p / "pack").is_dir())
        return [self.git / "objects", *modules]


def open_clones(paths: Iterable[Path]) -> list[Clone]:
    """The clones that a user names: with a working tree, or bare.

    Raises UsageFault for a folder that is no git repository.
    """
    return [Clone(path=path, git=_git_folder(path)) for path in dict.fromkeys(paths)]


def _git_folder(path: Path) -> Path:
    """gitrepository-layout(5): the folder itself, .git in it, or what the file .git names (of a
    submodule or a worktree, whose objects are in the common folder)."""
    for candidate in (path / ".git", path):
        folder = candidate
        if candidate.is_file() and (text := candidate.read_text()).startswith("gitdir:"):
            folder = path / text.removeprefix("gitdir:").strip()
            if (common := folder / "commondir").is_file():
                folder = folder / common.read_text().strip()
        if (folder / "objects").is_dir() and (folder / "HEAD").is_file():
            return folder.resolve()
    raise UsageFault(
        f"{path} is no git repository.",
        cause="a clone has a folder .git, or is itself one (bare)",
        remedy="Name the folder of a clone with --clone or in SM121_CLONES, or leave it out.",
    )


def find_commit(repository: Repository, clones: Iterable[Clone], commit: str) -> Path | None:
    """The folder of objects that has a commit; it can be read while `borrowing` from there."""
    for clone in clones:
        for objects in clone.object_folders():
            with repository.borrowing(objects):
                if repository.commit_of(commit) == commit:
                    return objects
    return None
