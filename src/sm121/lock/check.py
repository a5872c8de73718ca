"""Rules over pins (before anything is resolved) and over locks (before one is written)."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.pylock import Pylock
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sm121.pins.model import Stack
from sm121.rules.engine import Finding, Member, evaluate, require
from sm121.rules.model import ExtraRule, Rules


def check_pins(stack: Stack, rules: Rules, requirement_files: Mapping[str, str]) -> None:
    """Raise FamilyFault if the pins themselves break a rule, or lose an extra.

    requirement_files: vLLM's own, as patched; an extra that they ask for and the pin of the
    same distribution lacks would be lost as soon as the pin overrides.
    """
    pinned = {name: pin.version for name, pin in stack.family.items()} | stack.cuda.toolkit
    brought = {
        rule.brings: pinned[rule.distribution]
        for rule in rules.rules.values()
        if isinstance(rule, ExtraRule)
        and rule.distribution in stack.family
        and rule.extra in stack.family[rule.distribution].extras
    }
    members = [Member(distribution=n, version=v) for n, v in (pinned | brought).items()]
    findings = [
        finding
        for machine in ({name.removeprefix("linux-") for name in stack.targets} or {""})
        for finding in evaluate(rules, members, machine=machine)
    ]
    findings += _lost_extras(stack, requirement_files)
    require(
        list(dict.fromkeys(findings)),
        "stack.toml",
        remedy="Correct the pin. If the rule is wrong for this stack, correct "
        "pins/rules.toml, with a source.",
    )


def _lost_extras(stack: Stack, requirement_files: Mapping[str, str]) -> list[Finding]:
    lost = []
    for file, text in requirement_files.items():
        for line in text.splitlines():
            try:
                asked = Requirement(line.partition(" #")[0].strip())
            except InvalidRequirement:
                continue  # a comment, an option, an empty line
            name = canonicalize_name(asked.name)
            if name in stack.family and (missing := asked.extras - set(stack.family[name].extras)):
                extras = ",".join(sorted(missing))
                lost.append(
                    Finding(
                        rule="extras-kept",
                        distribution=name,
                        found="a pin without extras",
                        wanted=f"{name}[{extras}]",
                        symptom=f"what {name}[{extras}] brings is not installed",
                        reason="a pin overrides the whole requirement, its extras too",
                        source=f"vLLM's {file}, as patched: {asked}",
                    )
                )
    return lost


def lock_members(lock: Pylock) -> list[Member]:
    """A lock as a set for the rules."""
    return [
        Member(distribution=p.name, version=str(p.version), place=wheel.filename)
        for p in lock.packages
        for wheel in p.wheels or ()
    ]


def check_lock(
    lock: Pylock, rules: Rules, *, filename: str, machine: str, serving: bool = True
) -> None:
    """Raise FamilyFault if what was resolved breaks a rule. serving: it is not the host's."""
    require(
        evaluate(rules, lock_members(lock), machine=machine, serving=serving),
        f"{filename}, as resolved from the pins,",
        remedy="Pin the distribution in stack.toml (family or cuda.toolkit). Nothing was written.",
    )
