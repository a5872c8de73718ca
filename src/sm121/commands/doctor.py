"""`doctor`: is this machine able to build, or to run, this? Changes nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from sm121.commands.common import (
    DEFAULT_PROFILE,
    TARGETS,
    add_json_option,
    add_stack_option,
    context_of,
    give_json,
    layout_of,
)  # fmt: skip
from sm121.doctor.archive import NAME, write_report
from sm121.doctor.examine import examine
from sm121.doctor.machine import Machine
from sm121.doctor.model import Check, Diagnosis, Role, to_json
from sm121.errors import CheckFailed
from sm121.pins.load import default_stack, load_stack
from sm121.pins.model import OVERLAY
from sm121.ui import Ui, human_seconds

_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for", dest="role", choices=("build", "run"), default="build",
        help="what a fault of which makes the exit code 1 (default: %(default)s); both are shown",
    )  # fmt: skip
    parser.add_argument(
        "--profile", metavar="NAME", help="look at a build of this profile (default: full, or the "
        "largest that the stack has)",
    )  # fmt: skip
    parser.add_argument("--target", default="linux-aarch64", choices=TARGETS, help="machine to build for (default: %(default)s)")  # fmt: skip
    add_stack_option(parser)
    parser.add_argument("--with-deps", action="store_true", help="count every wheel of the lock")
    parser.add_argument(
        "--offline", action="store_true", help="ask neither the package index nor git remotes"
    )
    parser.add_argument("--clone", action="append", default=[], type=Path, metavar="PATH", help="as for `build`")  # fmt: skip
    parser.add_argument("--env", type=Path, metavar="PATH", help="check this environment by pins/rules.toml too")  # fmt: skip
    add_json_option(parser)
    parser.add_argument(
        "--report", nargs="?", const=f"{NAME}.tar.gz", type=Path, metavar="FILE",
        help=f"an archive for a bug report (default: {NAME}.tar.gz here): versions, states, ends of "
        "logs; credentials are taken out",
    )  # fmt: skip


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Look, print, write. Raises CheckFailed if there is a fault for the asked role."""
    layout = layout_of(arguments)
    stack = load_stack(layout.pins, arguments.stack or default_stack(layout.pins))
    if arguments.profile is None:
        own = {n: len(p.components) for n, p in stack.profiles.items() if n != OVERLAY}
        arguments.profile = DEFAULT_PROFILE if DEFAULT_PROFILE in own else max(own, key=own.__getitem__)  # fmt: skip
    machine = Machine(context=context_of(arguments, ui))
    role: Role = arguments.role
    diagnosis = examine(machine, role=role, default=DEFAULT_PROFILE, env=arguments.env)
    show(ui, diagnosis)
    give_json(arguments, ui, to_json(diagnosis))
    if arguments.report:
        names = write_report(machine, diagnosis, arguments.report)
        ui.say(f"Wrote {arguments.report} ({len(names)} files); look into it before you send it.")
    if faults := diagnosis.faults(role):
        raise CheckFailed(
            f"This machine can't {role} stack {diagnosis.stack} as it is: {len(faults)} fault(s).",
            details=[f"{check.name}: {check.found}" for check in faults],
            remedy=faults[0].remedy,
        )
    return 0


def show(ui: Ui, diagnosis: Diagnosis) -> None:
    """Every check, what a build takes, and a verdict for each role."""
    ui.say(f"Stack {diagnosis.stack}, profile {diagnosis.profile}, for {diagnosis.target}; asked: {diagnosis.role}")  # fmt: skip
    ui.say(f"  {'build':<10} {'run':<10}")
    for check in diagnosis.checks:
        _show_check(ui, check)
    ui.say("A build from nothing, without downloads:")
    for plan in diagnosis.plans:
        time = human_seconds(plan.seconds) if plan.basis != "unknown" else "unknown"
        about = "about " if plan.basis == "estimate" else ""
        mark = " (the default)" if plan.default else ""
        ui.say(f"  {plan.profile}{mark}: {about}{time} ({plan.basis}); {plan.jobs_reason}")
        ui.say(f"      {', '.join(plan.components)}")
        ui.say(f"      {plan.text}")
    for role in ("build", "run"):
        faults = diagnosis.faults(role)
        verdict = "yes" if not faults else "no: " + ", ".join(c.name for c in faults)
        ui.say(f"Able to {role}? {verdict}")


def _show_check(ui: Ui, check: Check) -> None:
    levels = []
    for level in (check.build, check.run):
        text = {"not needed": "-", "warning": "warning"}.get(level, level)
        cell = f"{text:<10}"
        levels.append(ui.style(cell, _COLOURS[level]) if level in _COLOURS else cell)
    ui.say(f"  {' '.join(levels)} {check.name}: {check.found}")
    if check.cause:
        ui.say(f"{'':24} why:  {check.cause}")
    if check.remedy:
        ui.say(f"{'':24} next: {check.remedy}")
