"""git's commands, failing in our own terms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import git
from git.exc import GitCommandError, InvalidGitRepositoryError, NoSuchPathError

from sm121.errors import DiskFull, ToolFailed, disk_full

# The system's words, and git's own after a short write (csum-file.c).
_NO_SPACE = ("No space left on device", "Disk quota exceeded", "Out of diskspace")


class GitCommands:
    """git's commands as methods (GitPython's dynamic ones), failing in our own terms.

    Raises DiskFull where git ran out of space, ToolFailed for every other failure.
    """

    def __init__(self, commands: git.Git) -> None:
        self._commands = commands

    def __getattr__(self, name: str) -> Callable[..., Any]:
        command = getattr(self._commands, name)

        def call(*arguments: object, **options: object) -> Any:
            try:
                return command(*arguments, **options)
            except GitCommandError as error:
                raise failure(name.replace("_", "-"), error) from error

        return call


def head_of(folder: Path) -> str:
    """Commit that a checkout of the user's is at, only read; '' if the folder is none, or empty."""
    try:
        with git.Repo(folder) as repository:
            return repository.head.commit.hexsha
    except (InvalidGitRepositoryError, NoSuchPathError, ValueError):
        return ""


def failure(command: str, error: GitCommandError) -> DiskFull | ToolFailed:
    """A failed git command in our own terms."""
    text = str(error.stderr)
    if any(words in text for words in _NO_SPACE):
        return disk_full("git was writing", _first_fatal(text))
    return ToolFailed(
        f"git {command} failed.",
        returncode=error.status if isinstance(error.status, int) else 1,
        cause=_first_fatal(text),
        remedy="If it stays so, `nox -s clean -- source`, and run the same command again.",
    )


def _first_fatal(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if "fatal:" in line]
    return (
        (fatal or lines or ["no message"])[0]
        .removeprefix("stderr: '")
        .removeprefix("fatal: ")
        .rstrip("'")
    )
