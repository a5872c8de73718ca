"""`serve`: serve.env and systemd units for two nodes, rendered into a folder. Starts nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from sm121.commands.common import add_stack_option, layout_of
from sm121.errors import CheckFailed, UsageFault
from sm121.files import write_atomic
from sm121.pins.load import default_stack
from sm121.serve.load import load_carried, load_serve
from sm121.serve.nodes import ROLES, load_nodes
from sm121.serve.render import Rendered, render
from sm121.ui import Ui
from sm121.wheelhouse.manifest import load_manifest


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=Path, required=True, metavar="FILE",
        help="names, addresses and interfaces of the two nodes (docs/serve.md)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR",
        help="folder for the files: DIR/head and DIR/worker, or DIR itself with --node-rank",
    )  # fmt: skip
    parser.add_argument(
        "--node-rank", type=int, choices=(0, 1), metavar="0|1",
        help="only this node: 0 is the head, 1 the worker",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true",
        help="write nothing; exit with 1 if a file there is another one",
    )  # fmt: skip
    parser.add_argument(
        "--wheelhouse", type=Path, metavar="DIR",
        help="take serve.toml out of this wheelhouse instead of pins/",
    )  # fmt: skip
    add_stack_option(parser)


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Render. Raises PinsFault for what is wrong in serve.toml or the nodes' file, CheckFailed
    with --check for files that differ."""
    nodes = load_nodes(arguments.nodes)
    if arguments.wheelhouse:
        manifest = load_manifest(arguments.wheelhouse)
        if manifest is None or arguments.stack not in (None, manifest.stack):
            raise UsageFault(
                f"{arguments.wheelhouse} holds no stack {arguments.stack or 'at all'}.",
                cause=f"its manifest says {manifest.stack}" if manifest else "it has no manifest",
            )
        serve, stack = load_carried(arguments.wheelhouse), manifest.stack
    else:
        layout = layout_of(argparse.Namespace())
        stack = arguments.stack or default_stack(layout.pins)
        serve = load_serve(layout.pins, stack)
    ranks = range(len(ROLES)) if arguments.node_rank is None else [arguments.node_rank]
    different = []
    for rank in ranks:
        folder = arguments.out / ROLES[rank] if arguments.node_rank is None else arguments.out
        rendered = render(serve, nodes, rank, stack=stack)
        if arguments.check:
            different += _different(rendered, folder)
            continue
        for name, text in rendered.files.items():
            write_atomic(folder / name, text)
            ui.say(f"{folder / name}: for {rendered.node.name} ({ROLES[rank]})")
    if different:
        raise CheckFailed(
            f"{len(different)} file(s) are not what stack {stack} and {arguments.nodes} give.",
            details=different,
            remedy="Run the same command without --check.",
        )
    return 0


def _different(rendered: Rendered, folder: Path) -> list[str]:
    found = []
    for name, text in rendered.files.items():
        file = folder / name
        if not file.is_file():
            found.append(f"{file}: missing")
        elif file.read_text(encoding="utf-8", errors="replace") != text:
            found.append(f"{file}: differs")
    return found
