"""`shell`: a shell with the toolchain of a build, in the patched tree."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sm121 import proc
from sm121.commands.common import add_build_options, context_of
from sm121.compile.stage import GENERATED, CompileStage, make_tools
from sm121.errors import UsageFault
from sm121.gitrepo import Repository
from sm121.pins.model import OVERLAY
from sm121.pipeline import all_stages, run_stages
from sm121.source.stage import REPOSITORY
from sm121.state import exclusive
from sm121.ui import Ui


def configure(parser: argparse.ArgumentParser) -> None:
    add_build_options(parser)
    parser.add_argument("command", nargs="*", help="run this instead of an interactive shell")


def make_current(repository: Repository, commit: str, tree: Path, ui: Ui) -> None:
    """Check the patched tree out, unless somebody has edited it: then leave it, and say so."""
    marker = tree.with_name(f"{tree.name}.commit")
    there = marker.read_text() if marker.is_file() else ""
    if there and (edited := repository.edited(tree)):
        ui.note(
            f"the tree is at {there[:12]} with {len(edited)} edited file(s) and is left as it is"
            + ("" if there == commit else f"; the series is now at {commit[:12]}")
        )
    elif there != commit:
        repository.checkout(commit, tree, keep=GENERATED)


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Bring everything before `compile` up to date, check the tree out, become a shell."""
    context = context_of(arguments, ui)
    if context.options.profile == OVERLAY:
        raise UsageFault(
            "Profile overlay compiles nothing, so it has no toolchain.",
            remedy="Use the profile whose toolchain is wanted, such as --profile smoke.",
        )
    stage = CompileStage()
    stages = all_stages(context)
    before = stages[: [s.name for s in stages].index("compile")]
    if arguments.dry_run:
        run_stages(context, before, dry_run=True)
        return 0
    with exclusive(context.layout.build, "shell (preparing)"):
        results, _ = run_stages(context, before)
        tree = stage.tree(context)
        make_current(
            Repository(context.layout.source / REPOSITORY),
            str(results["patch"]["commit"]),
            tree,
            ui,
        )
        environment = stage.environment(context, results, make_tools(context))
        context.memory.save()
    for name in ("TERM", "USER", "LOGNAME", "SHELL"):
        if value := os.environ.get(name):
            environment[name] = value
    environment["PS1"] = "(sm121) \\w $ "
    ui.say(f"CUDA_HOME={environment['CUDA_HOME']}")
    ui.say(f"In the patched tree {tree}; the next `build` resets it. Leave with `exit`.")
    command = arguments.command or ["bash", "--norc", "-i"]
    proc.replace_process(command, cwd=tree, env=environment)
    return 0
