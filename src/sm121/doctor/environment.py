"""An installed environment, by the rules that lock, repair and verify-abi go by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sm121.doctor.machine import Machine
from sm121.doctor.model import Check
from sm121.repair.identity import LIBRARY, identify
from sm121.repair.installed import family_members, open_environment, read_installed
from sm121.rules.engine import evaluate
from sm121.rules.model import load_rules


def check_environment(machine: Machine, root: Path) -> Iterator[Check]:
    """A fault for each broken rule and each damaged dist-info; versions that the pins name.

    Raises UsageFault if the folder is no virtual environment.
    """
    environment = open_environment(root)
    installed = read_installed(environment)
    rules = load_rules(machine.context.layout.pins)
    repair = f"`nox -s repair -- --env {root}` brings it back to its wheelhouse, offline."
    faults = 0
    for one in installed:
        if one.fault:
            faults += 1
            yield Check(
                name="environment", found=f"{one.distribution} {one.version}: {one.fault}",
                build="not needed", run="fault",
                cause="no installer can remove or replace it, and imports may fail", remedy=repair,
            )  # fmt: skip
    for finding in evaluate(
        rules, family_members(environment, installed), machine=machine.context.runtime.machine
    ):
        faults += 1
        yield Check(
            name=f"rule {finding.rule}", build="not needed", run="fault",
            found=f"{finding.distribution}: found {finding.found}, wanted {finding.wanted}",
            cause=f"{finding.symptom} ({finding.reason})", remedy=repair,
        )  # fmt: skip
    for library in sorted(environment.site.glob(f"nvidia/nccl/lib/{LIBRARY}")):
        yield Check(name="NCCL", found=identify(library), build="not needed", run="ok")
    have = {one.distribution: one.version for one in installed}
    for name, pin in machine.context.stack.family.items():
        if have.get(name, pin.version).partition("+")[0] != pin.version:
            faults += 1
            yield Check(
                name="environment", found=f"{name} {have[name]}, pinned is {pin.version}",
                build="not needed", run="warning", cause=f"the set was checked with it: {pin.reason}",
                remedy=repair,
            )  # fmt: skip
    if not faults:
        yield Check(
            name="environment", build="not needed", run="ok",
            found=f"{len(installed)} distributions in {root}; {len(rules.rules)} rules hold",
        )  # fmt: skip
