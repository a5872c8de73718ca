"""The family rules of pins/rules.toml over the set, by the engine that all verbs share."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from sm121.abi.context import Context, finding
from sm121.abi.facts import Wheel
from sm121.abi.report import FamilyRow, Finding
from sm121.rules.build import build_from_version, version_file
from sm121.rules.engine import Member, evaluate
from sm121.rules.model import Rules


def check_family(context: Context, rules: Rules) -> tuple[list[Finding], list[FamilyRow]]:
    """A fault for each rule that a judged distribution breaks; surroundings only count along."""
    judged = {wheel.distribution for wheel in context.subjects}
    members = [m for wheel in context.wheels if (m := _member(wheel, context)) is not None]
    broken = [
        one
        for one in evaluate(rules, members, machine=context.target.machine)
        if judged.intersection(one.distribution.split(" and "))
    ]
    wheels = {wheel.distribution: wheel for wheel in context.subjects}
    out: list[Finding] = []
    rows: list[FamilyRow] = []
    for one in broken:
        out.append(
            finding(
                "family", wheels.get(one.distribution), "",
                f"rule {one.rule}: {one.distribution}: found {one.found}, wanted {one.wanted}; what "
                f"one sees: {one.symptom}",
                why=f"{one.reason} ({one.source})", names=[one.rule],
            )
        )  # fmt: skip
        rows.append(
            FamilyRow(
                name=one.distribution, found=one.found, wanted=one.wanted, result="fail",
                text=f"rule {one.rule}: {one.reason}",
            )
        )  # fmt: skip
    names = {one.rule for one in broken}
    if held := len(rules.rules) - len(names):
        rows.append(
            FamilyRow(
                name="rules", found=f"{held} of {len(rules.rules)} hold", wanted="pins/rules.toml",
                result="pass", text=f"over {len(members)} distributions",
            )
        )  # fmt: skip
    return out, rows


def _member(wheel: Wheel, context: Context) -> Member | None:
    try:
        Version(wheel.version)
    except InvalidVersion:
        return None  # files of no package; a version that is none is found by other checks
    # In an environment a path exists once: there `mixture` compares it with RECORD.
    files = {} if context.installed else {p: d for p, d in wheel.files.items() if d}
    return Member(
        distribution=wheel.distribution, version=wheel.version,
        build=build_from_version(wheel.texts.get(version_file(wheel.distribution), "")),
        place=wheel.filename, files=files,
    )  # fmt: skip
