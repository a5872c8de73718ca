"""`verify-jit`: compile every JIT kernel family of the model's path for the target's GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from sm121.commands.common import (
    add_json_option,
    add_stack_option,
    context_of,
    give_json,
)  # fmt: skip
from sm121.context import Context
from sm121.errors import JitFault
from sm121.files import write_atomic
from sm121.jit.last import keep_last, last_file
from sm121.jit.page import to_html
from sm121.jit.report import FAULTS, Report, to_json
from sm121.jit.table import render_table
from sm121.state import exclusive
from sm121.ui import Ui


def configure(parser: argparse.ArgumentParser) -> None:
    add_stack_option(parser)
    parser.add_argument(
        "--env", type=Path, metavar="PATH",
        help="an environment instead of one made from the lock (an installed wheelhouse)",
    )  # fmt: skip
    parser.add_argument(
        "--tree", type=Path, metavar="DIR", help="a folder with vllm/ instead of the patched tree"
    )
    parser.add_argument(
        "--only", action="append", metavar="RECIPE",
        help="only these recipes of jit.toml; the rest is not judged",
    )  # fmt: skip
    parser.add_argument(
        "--arch", dest="jit_arch", metavar="X.Y", choices=("12.1a", "12.1", "12.0f"),
        help="another target for what can be told one (FlashInfer, CuTeDSL): what needs the `a`?",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=int, default=900, metavar="N",
        help="time for one recipe (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="list helpers and what is left out, too")
    parser.add_argument(
        "--offline", action="store_true", help="fetch nothing; stop if something is missing"
    )
    add_json_option(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="the report as one HTML page")


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Compile, print the table, write the reports. Raises JitFault if a kernel is not ready."""
    context = context_of(arguments, ui)
    with exclusive(context.layout.build, "nox -s verify-jit"):
        report = _verified(context, arguments, ui)
    for line in render_table(report, whole=arguments.all):
        ui.say(line)
    give_json(arguments, ui, to_json(report))
    if arguments.html:
        write_atomic(arguments.html, to_html(report))
    _require(report)
    return 0


def _verified(context: Context, arguments: argparse.Namespace, ui: Ui) -> Report:
    from sm121.jit.session import prepare
    from sm121.jit.verify import verify

    job = prepare(
        context, env=arguments.env, tree=arguments.tree, only=arguments.only,
        seconds=arguments.seconds, arch=arguments.jit_arch,
    )  # fmt: skip
    with ui.progress("verify-jit") as progress:
        report = verify(job, progress.update)
    if job.source and job.only is None and arguments.jit_arch is None:
        path = last_file(context.layout.build, context.stack_name)
        keep_last(report, path, source=job.source)
    context.memory.save()
    return report


def _require(report: Report) -> None:
    if report.result == "pass":
        return
    bad = [row for row in report.rows if row.verdict in FAULTS]
    notes = [note.text for note in report.notes if note.kind == "fault"]
    raise JitFault(
        f"{len(bad)} kernel(s) of the JIT families are not ready, {len(notes)} other fault(s).",
        cause="; ".join(
            [*(f"{row.verdict}: {row.kernel.partition(':')[2]}" for row in bad[:4]), *notes[:2]]
        ),
        remedy="The table says of each what its family told and how to read it; docs/jit.md.",
    )
