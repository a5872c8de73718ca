"""`repair`: bring an environment back to its wheelhouse, offline."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sm121.commands.common import layout_of
from sm121.errors import CheckFailed, HashMismatch, UsageFault
from sm121.files import HashMemory
from sm121.repair.compare import Comparison, Deviation, compare
from sm121.repair.identity import LIBRARY, identify, identify_member
from sm121.repair.installed import Environment, open_environment
from sm121.repair.restore import pip_check, restore
from sm121.repair.wheel import Wheel, read_wheel
from sm121.rules.model import load_rules
from sm121.ui import Ui
from sm121.wheelhouse.manifest import Manifest, load_manifest

_FILES_SHOWN = 5


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--env", type=Path, required=True, metavar="PATH", help="the environment to repair"
    )
    parser.add_argument(
        "--wheelhouse", type=Path, metavar="DIR", help="where its wheels lie (default: wheelhouse/)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what deviates and why; exit 1 if anything does"
    )


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Compare every file, say what deviates, and reinstall only that."""
    layout = layout_of(arguments)
    environment = open_environment(arguments.env)
    folder = layout.wheelhouse
    manifest = _fitting_manifest(folder, environment)
    wheels = {e.distribution: read_wheel(folder / e.filename) for e in manifest.wheels}
    rules = load_rules(layout.pins)
    machine = manifest.target.removeprefix("linux-")
    comparison = compare(environment, wheels, rules, machine=machine)
    for extra in comparison.extras:
        ui.note(f"{extra.distribution} {extra.version} is not of this stack; it is left alone")
    if not comparison.deviations:
        ui.say(
            f"Nothing to do: {comparison.files} files of {len(wheels)} distributions are as in "
            f"{folder}."
        )
        return 0
    for deviation in comparison.deviations:
        _show(ui, deviation, environment, folder, wheels)
    names = [deviation.distribution for deviation in comparison.deviations]
    if arguments.dry_run:
        ui.say(f"Would reinstall {len(names)} of {len(wheels)}: {', '.join(names)}")
        return 1
    _verify(manifest, names, folder, HashMemory(layout.build / "hashes.json"))
    ui.stage("repair", "run", f"{len(names)} of {len(wheels)}: {', '.join(names)}")
    restore(environment, comparison, wheels, folder, log=layout.log / "repair-env.log")
    touched = {name: wheels[name] for name in names}
    _prove(environment, compare(environment, touched, rules, machine=machine))
    ui.stage("repair", "done", "every file is as in the wheelhouse")
    if complaints := pip_check(environment):
        for line in complaints:
            ui.note(line)
    else:
        ui.say("       uv pip check has no complaint")
    return 0


def _fitting_manifest(folder: Path, environment: Environment) -> Manifest:
    manifest = load_manifest(folder)
    if manifest is None or not manifest.complete:
        raise UsageFault(
            f"{folder} is not a whole wheelhouse.",
            cause="an environment can be repaired only from all of its wheels",
            remedy="`nox -s build -- --with-deps` makes one; --wheelhouse names another.",
        )
    if manifest.python != environment.python:
        raise UsageFault(
            f"{environment.root} has Python {environment.python}, the wheelhouse is for "
            f"{manifest.python}.",
            remedy="Name the wheelhouse that it was made from with --wheelhouse.",
        )
    return manifest


def _show(
    ui: Ui, deviation: Deviation, environment: Environment, folder: Path,
    wheels: Mapping[str, Wheel],
) -> None:  # fmt: skip
    ui.say(f"  {deviation.distribution}: found {deviation.found}, wanted {deviation.wanted}")
    ui.say(f"      why it matters: {deviation.why}")
    for path, how in list(deviation.files.items())[:_FILES_SHOWN]:
        ui.say(f"      {path}: {how}")
        if path.endswith(f"/{LIBRARY}") and how != "missing":
            wheel = folder / wheels[deviation.distribution].filename
            with tempfile.TemporaryDirectory() as scratch:
                wanted = identify_member(wheel, path, Path(scratch))
            ui.say(f"          is {identify(environment.site / path)}; wanted {wanted}")
    if (more := len(deviation.files) - _FILES_SHOWN) > 0:
        ui.say(f"      … and {more} more")
    if deviation.leftovers:
        ui.say(f"      {len(deviation.leftovers)} file(s) in its folders that nobody owns")


def _verify(manifest: Manifest, names: list[str], folder: Path, memory: HashMemory) -> None:
    """The wheels that will be used are what the manifest says. Raises HashMismatch."""
    damaged = [
        entry.filename
        for entry in manifest.wheels
        if entry.distribution in names and memory.sha256(folder / entry.filename) != entry.sha256
    ]
    if damaged:
        raise HashMismatch(
            f"{', '.join(damaged)} in the wheelhouse is not what its manifest says.",
            cause="altered or cut short after it was made; nothing was changed in the environment",
            remedy="`nox -s build -- --with-deps` fetches it again, or copy the wheelhouse anew.",
        )


def _prove(environment: Environment, after: Comparison) -> None:
    if after.deviations:
        raise CheckFailed(
            f"{environment.root} still deviates after the repair.",
            details=[f"{d.distribution}: {d.found}, wanted {d.wanted}" for d in after.deviations],
            remedy="Make it anew with the wheelhouse's install.py.",
        )
