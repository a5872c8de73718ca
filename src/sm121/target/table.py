"""The report for a person: a line for each step, what it leaves unproved, the verdict last."""

from __future__ import annotations

from collections import Counter, defaultdict

from sm121.target.model import Report
from sm121.ui import Ui, human_seconds

_COLOURS = {"pass": "green", "fail": "red", "not run": "yellow"}


def show(ui: Ui, report: Report) -> None:
    """Print the report."""
    whole = "with all dependencies" if report.complete else "without dependencies"
    ui.say()
    ui.say(
        f"Stack {report.stack}, profile {report.profile}, {whole}, for {report.target} and CPython "
        f"{report.python}"
    )
    if machine := report.machine:
        version = machine.emulator.removeprefix("qemu")
        emulator = f" under qemu {version}".rstrip() if machine.emulator else ""
        ui.say(f"  ran:     {machine.how}, CPython {machine.python} of {machine.system}{emulator}")
        driver = {"stub": "a stub, no driver", "real": "this machine's", "none": "none"}[
            machine.driver
        ]
        network = "as this machine's" if machine.network else "none"
        ui.say(f"  libcuda: {driver}; network: {network}")
        if machine.drift:
            ui.note(
                f"{len(machine.drift)} package(s) of the root are not those that were recorded: "
                f"{'; '.join(machine.drift[:3])}" + (" …" if len(machine.drift) > 3 else "")
            )
    width = max(len(row.step) for row in report.rows)
    skipped: dict[str, list[str]] = defaultdict(list)
    for row in report.rows:
        if row.verdict == "not run":
            skipped[row.text].append(row.step)
            continue
        verdict = ui.style(f"{row.verdict:<7}", _COLOURS[row.verdict])
        ui.say(f"  {verdict} {row.step:<{width}}  {row.how:<8}  {row.text}")
    for why, steps in skipped.items():
        ui.say(f"  {ui.style('not run', _COLOURS['not run'])} {', '.join(steps)}: {why}")
    ui.say("Not proved by this:")
    for line in report.unproved:
        ui.say(f"  - {line}")
    counts = Counter(row.how for row in report.rows if row.verdict == "pass")
    ways = ", ".join(f"{count} {how}" for how, count in sorted(counts.items()))
    result = f"{report.result.upper()}: {ways or 'nothing'} passed"
    if report.faults:
        result += f", {len(report.faults)} failed ({', '.join(row.step for row in report.faults)})"
    ui.say(
        f"{result}, {sum(map(len, skipped.values()))} not run ({human_seconds(report.seconds)})."
    )
