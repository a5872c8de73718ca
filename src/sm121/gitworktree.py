"""A working tree of the pipeline's repository that a person edits."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import git

from sm121 import proc
from sm121.gitcommand import GitCommands
from sm121.gitseries import Merged
from sm121.gitsettings import ISOLATION, SETTINGS, configuration


class Worktree:
    """A working tree that a person edits, with their own git or ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        commands = git.Git(folder)
        commands.update_environment(**ISOLATION, **configuration(SETTINGS), **proc.mark())
        self._git = GitCommands(commands)

    def head(self) -> str:
        return str(self._git.rev_parse("--verify", "HEAD"))

    def unmerged(self) -> list[str]:
        return _names(self._git.diff("--name-only", "--diff-filter=U", "-z"))

    def unstaged(self) -> list[str]:
        """Files that were edited and not added, new ones too (but not ignored ones)."""
        # `diff`, not `diff-files`: a file that was only touched is not edited.
        edited = _names(self._git.diff("--name-only", "--no-ext-diff", "-z"))
        return sorted(
            {*edited, *_names(self._git.ls_files("--others", "--exclude-standard", "-z"))}
        )

    def staged(self) -> list[str]:
        return _names(self._git.diff_index("--cached", "--name-only", "-z", "HEAD"))

    def index_tree(self) -> str:
        """The tree of what was added. Raises ToolFailed while a path is unmerged."""
        self._git.update_index("-q", "--refresh", with_exceptions=False)
        return str(self._git.write_tree())

    def show_conflict(self, head: str, merged: Merged) -> None:
        """HEAD at `head`, the merge's result in files and index, its conflicts unmerged."""
        self._git.update_ref("--no-deref", "HEAD", head)
        self._git.read_tree("--reset", "-u", merged.tree)
        lines = [f"0 {'0' * 40}\t{path}\0" for path in merged.paths]
        lines += [f"{e.mode} {e.blob} {e.stage}\t{e.path}\0" for e in merged.conflicts]
        with tempfile.TemporaryFile() as stream:
            stream.write(os.fsencode("".join(lines)))
            stream.seek(0)
            self._git.update_index("-z", "--index-info", istream=stream)


def _names(output: object) -> list[str]:
    return sorted({name for name in str(output).split("\0") if name})
