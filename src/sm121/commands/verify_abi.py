"""`verify-abi`: will these binaries load on the target, and is there code for its GPU in them?"""

from __future__ import annotations

import argparse
from pathlib import Path

from sm121.abi.inputs import manifest_beside
from sm121.abi.page import to_html
from sm121.abi.policy.load import DEFAULT, load_policy
from sm121.abi.proof import Job, prove
from sm121.abi.report import to_json
from sm121.abi.stage import jit_section, require
from sm121.abi.table import render_table
from sm121.commands.common import (
    TARGETS,
    add_json_option,
    add_stack_option,
    give_json,
    layout_of,
)  # fmt: skip
from sm121.errors import UsageFault
from sm121.files import HashMemory, write_atomic
from sm121.layout import Layout
from sm121.lock.pylock import Target
from sm121.pins.load import default_stack, load_stack, stack_names
from sm121.repair.installed import open_environment
from sm121.toolkit.machine import host_machine
from sm121.ui import Ui


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets", nargs="*", type=Path, metavar="TARGET",
        help="a wheelhouse folder, or wheel files (default: wheelhouse/)",
    )  # fmt: skip
    parser.add_argument("--env", type=Path, metavar="PATH", help="a virtual environment instead")
    parser.add_argument(
        "--against", type=Path, action="append", default=[], metavar="WHEEL|DIR",
        help="what is loaded with the targets and not judged (default: for a wheelhouse without "
        "dependencies, and for wheels, those of the lock that are in the cache)",
    )  # fmt: skip
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="default: the manifest's, else linux-aarch64 (of an environment: this machine)",
    )
    parser.add_argument("--python", metavar="X.Y", help="default: the manifest's, else the stack's")
    parser.add_argument("--arch", metavar="X.Ya", help="default: the manifest's, else the stack's")
    add_stack_option(parser)
    parser.add_argument(
        "--policy", type=Path, default=DEFAULT, metavar="FILE", help="another policy"
    )
    add_json_option(parser, " (write the targets first, or --json=FILE)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the report as one HTML page")
    parser.add_argument("--no-run", action="store_true", help="leave the dynamic part out")
    parser.add_argument(
        "--fetch", action="store_true",
        help="download what the cache lacks of the lock's wheels around the targets",
    )  # fmt: skip


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Check, print the table, write the reports. Raises AbiFault if anything does not fit."""
    if arguments.env and arguments.targets:
        raise UsageFault("--env is checked alone: leave the wheels out.")
    for name in ("json", "html"):
        given = getattr(arguments, name)
        if given and (Path(given).is_dir() or str(given).endswith(".whl")):
            raise UsageFault(
                f"--{name} {given} would write the report there.",
                remedy=f"Write the targets first: verify-abi {given} --{name}",
            )
    job = _job(arguments, ui)
    report = prove(job)
    for line in render_table(report):
        ui.say(line)
    give_json(arguments, ui, to_json(report))
    if arguments.html:
        write_atomic(arguments.html, to_html(report, jit=jit_section(job)))
    require(report, where=str(arguments.html or ""))
    return 0


def _job(arguments: argparse.Namespace, ui: Ui) -> Job:
    layout = layout_of(arguments)
    targets = tuple(arguments.targets) or (() if arguments.env else (_house(layout),))
    manifest = manifest_beside(targets)
    name = arguments.stack or default_stack(layout.pins)
    if not arguments.stack and manifest and manifest.stack in stack_names(layout.pins):
        name = manifest.stack
    stack = load_stack(layout.pins, name)
    usual = f"linux-{host_machine()}" if arguments.env else "linux-aarch64"
    platform = arguments.target or (manifest.target if manifest else usual)
    if platform not in stack.targets:
        raise UsageFault(
            f"Stack {name} has no target {platform!r}.", cause=f"it has {', '.join(stack.targets)}"
        )
    pin = stack.targets[platform]
    env = arguments.env and open_environment(arguments.env)
    python = (
        arguments.python or (manifest.python if manifest else "") or (env.python if env else "")
        or pin.pythons[0]
    )  # fmt: skip
    return Job(
        layout=layout, stack_name=name, stack=stack, policy=load_policy(arguments.policy), ui=ui,
        target=Target.make(platform, python=python, glibc=pin.glibc),
        arch=arguments.arch or (manifest.arch if manifest else "") or stack.cuda.arch,
        memory=HashMemory(layout.build / "hashes.json"), targets=targets, env=arguments.env,
        against=tuple(arguments.against), pythons=pin.pythons, run=not arguments.no_run, fetch=arguments.fetch,
    )  # fmt: skip


def _house(layout: Layout) -> Path:
    if not any(layout.wheelhouse.glob("*.whl")):
        raise UsageFault(
            f"{layout.wheelhouse} holds no wheel.",
            remedy="`nox -s build` makes one; or name a wheelhouse, wheels, or --env PATH.",
        )
    return layout.wheelhouse
