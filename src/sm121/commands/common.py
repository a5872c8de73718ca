"""Options and set-up that several verbs share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sm121 import proc
from sm121.files import HashMemory, write_atomic
from sm121.layout import Layout
from sm121.ui import Ui

if TYPE_CHECKING:
    from sm121.context import Context

# What is deployed. Where a stack can't build it, the user is told so: nothing is downgraded.
DEFAULT_PROFILE = "full"
TARGETS = ("linux-aarch64", "linux-x86_64")
# As --clone, for every run: folders, separated as in PATH.
CLONES = "SM121_CLONES"
# FILE of --json when none is named.
STDOUT = "-"


def add_stack_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stack", metavar="NAME", help="folder of pins/ (default: pins/default)")


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """What stages need that come before any profile or target counts."""
    add_stack_option(parser)
    parser.add_argument(
        "--offline", action="store_true", help="fetch nothing; stop if something is missing"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would run and why, and do nothing"
    )


def add_build_options(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME",
        help="leave an optional part of the profile out, such as fa2 (docs/full.md)",
    )  # fmt: skip
    parser.add_argument(
        "--require", action="append", default=[], metavar="NAME",
        help="stop if this optional part can't be built, such as rust where cargo can't fetch",
    )  # fmt: skip
    parser.add_argument(
        "--clone", action="append", default=[], type=Path, metavar="PATH",
        help=f"a git clone on this machine to take third-party sources from, at their pinned "
        f"commits (also: {CLONES}=PATH:PATH)",
    )  # fmt: skip
    parser.add_argument(
        "--profile", default=DEFAULT_PROFILE, metavar="NAME",
        help="what to build; see [profiles] in stack.toml (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--target", default="linux-aarch64", choices=TARGETS,
        help="machine to build for, on any host (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--arch", metavar="X.Ya", help="CUDA architecture (default: the stack's, 12.1a)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="compilers at once (default: by cores and free memory)",
    )
    parser.add_argument(
        "--wheelhouse", type=Path, metavar="DIR", help="result folder (default: wheelhouse/)"
    )
    parser.add_argument(
        "--with-deps", action="store_true",
        help="fill the wheelhouse with every wheel of the lock, repaired where need be",
    )  # fmt: skip
    parser.add_argument(
        "--jit-cache", nargs="?", const="listed", choices=("none", "listed", "all"),
        help="FlashInfer's modules ahead of time: those of the pins, or what they leave out too "
        "(default: listed in profiles kernels and full; docs/jit-cache.md)",
    )  # fmt: skip


def clones_of(environment: Mapping[str, str]) -> list[Path]:
    """The clones that SM121_CLONES names."""
    return [Path(name) for name in environment.get(CLONES, "").split(os.pathsep) if name]


def layout_of(arguments: argparse.Namespace) -> Layout:
    layout = Layout.find(wheelhouse=getattr(arguments, "wheelhouse", None))
    proc.set_scope(layout.build)
    return layout


def context_of(arguments: argparse.Namespace, ui: Ui) -> Context:
    """Load pins and check the options against them."""
    # Here: pydantic takes half a second to build the pins' models, which `sync` does without.
    from sm121.context import Context, Options, validate_options
    from sm121.pins.load import default_stack, load_stack

    layout = layout_of(arguments)
    name = arguments.stack or default_stack(layout.pins)
    stack = load_stack(layout.pins, name)
    options = Options(
        profile=getattr(arguments, "profile", None) or next(iter(stack.profiles)),
        target=getattr(arguments, "target", "linux-aarch64"),
        arch=getattr(arguments, "arch", None),
        jobs=getattr(arguments, "jobs", None),
        offline=getattr(arguments, "offline", False),
        with_deps=getattr(arguments, "with_deps", False),
        jit_cache=getattr(arguments, "jit_cache", None),
        without=tuple(dict.fromkeys(getattr(arguments, "without", []))),
        require=tuple(dict.fromkeys(getattr(arguments, "require", []))),
        clones=(*getattr(arguments, "clone", []), *clones_of(os.environ)),
    )
    validate_options(stack, options)
    return Context(
        layout=layout,
        stack_name=name,
        stack=stack,
        options=options,
        ui=ui,
        memory=HashMemory(layout.build / "hashes.json"),
    )


def add_json_option(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--json", nargs="?", const=STDOUT, metavar="FILE",
        help=f"the report as JSON, to FILE or standard output{more}",
    )  # fmt: skip


def give_json(arguments: argparse.Namespace, ui: Ui, text: str) -> None:
    """Print or write a report, as --json asks."""
    if arguments.json == STDOUT:
        ui.result(text)
    elif arguments.json:
        write_atomic(Path(arguments.json), text)
