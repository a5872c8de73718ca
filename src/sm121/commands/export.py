"""`export`: write the edited series back to patches/."""

from __future__ import annotations

import argparse

from sm121.commands.common import add_stack_option, context_of
from sm121.errors import PatchFailed
from sm121.gitseries import SeriesRepository
from sm121.gitworktree import Worktree
from sm121.patches.branch import folder_of, note_exported, read_branch
from sm121.patches.export import differences, write
from sm121.source.stage import REPOSITORY
from sm121.state import exclusive
from sm121.ui import Ui


def configure(parser: argparse.ArgumentParser) -> None:
    add_stack_option(parser)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if branch and files differ"
    )


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Compare the branch with patches/, and write what differs. Raises PatchFailed (--check)."""
    context = context_of(arguments, ui)
    layout, stack = context.layout, context.stack_name
    folder = layout.patches / "vllm" / stack
    with exclusive(layout.build, "nox -s export"):
        repository = SeriesRepository(layout.source / REPOSITORY)
        patches = read_branch(repository, stack, folder_of(layout, stack))
        if arguments.check:
            changed = differences(repository, patches, folder)
        else:
            changed = write(repository, patches, folder)
            note_exported(folder_of(layout, stack), Worktree(folder_of(layout, stack)).head())
        repository.close()
    lines = [f"{one.filename}: {one.how}" for one in changed]
    if changed and arguments.check:
        raise PatchFailed(
            f"patches/vllm/{stack} and the branch differ.", details=lines,
            remedy="`nox -s export` writes the branch's state.",
        )  # fmt: skip
    for line in lines:
        ui.say(f"  {line}")
    ui.say(f"{len(patches)} patches; {len(changed) or 'no'} file(s) changed.")
    return 0
