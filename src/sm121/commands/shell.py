"""`shell`: a shell with the toolchain of a build, in the patched tree."""

from __future__ import annotations

import argparse
import os

from sm121 import proc
from sm121.commands.common import add_build_options, context_of
from sm121.compile.stage import CompileStage, make_tools
from sm121.errors import CheckFailed
from sm121.pipeline import all_stages, run_stages
from sm121.state import exclusive
from sm121.ui import Ui


def configure(parser: argparse.ArgumentParser) -> None:
    add_build_options(parser)
    parser.add_argument("command", nargs="*", help="run this instead of an interactive shell")


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Bring everything before `compile` up to date, check the tree out, become a shell."""
    from sm121.gitrepo import Repository
    from sm121.source.stage import REPOSITORY

    context = context_of(arguments, ui)
    stage = CompileStage()
    stages = all_stages(context)
    before = stages[: [s.name for s in stages].index("compile")]
    if arguments.dry_run:
        run_stages(context, before, dry_run=True)
        return 0
    with exclusive(context.layout.build, "shell (preparing)"):
        results, _ = run_stages(context, before)
        tree = stage.tree(context)
        # A tree that somebody works in is left as it is.
        if not tree.is_dir():
            Repository(context.layout.source / REPOSITORY).checkout(
                str(results["patch"]["commit"]), tree
            )
        environment = stage.environment(context, results, make_tools(context))
        context.memory.save()
    if not tree.is_dir():
        raise CheckFailed(f"{tree} is not a folder.")
    for name in ("TERM", "USER", "LOGNAME", "SHELL"):
        if value := os.environ.get(name):
            environment[name] = value
    environment["PS1"] = "(sm121) \\w $ "
    ui.say(f"CUDA_HOME={environment['CUDA_HOME']}")
    ui.say(f"In the patched tree {tree}; the next `build` resets it. Leave with `exit`.")
    command = arguments.command or ["bash", "--norc", "-i"]
    proc.replace_process(command, cwd=tree, env=environment)
    return 0
