"""What the new upstream asks of the kernel-library family, and which of our rules object.

Read from vLLM's own requirement files (those that end up in the wheel's METADATA), pristine on
both sides: our `requirements` patch says what we want, not what upstream does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sm121.gitrepo import Repository
from sm121.lock.resolve import REQUIREMENT_FILES
from sm121.pins.model import Stack
from sm121.rebase.report import FamilyRow, SourceRow
from sm121.rules.engine import Finding, Member, evaluate
from sm121.rules.model import Rules
from sm121.source.drift import Fetched

# Where the stack runs: requirements for other places don't count.
_PLACE = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "aarch64",
          "python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}  # fmt: skip


def asked_for(repository: Repository, commit: str) -> dict[str, Requirement]:
    """Distribution → what a tree's requirement files ask for; the last line counts."""
    found: dict[str, Requirement] = {}
    for file in REQUIREMENT_FILES:
        for line in (repository.read(commit, file) or "").splitlines():
            try:
                one = Requirement(line.partition(" #")[0].partition("\t#")[0].strip())
            except InvalidRequirement:
                continue  # a comment, an option, an empty line
            if one.marker is None or one.marker.evaluate(_PLACE):
                found[canonicalize_name(one.name)] = one
    return found


def exact(requirement: Requirement | None) -> str:
    """The version of a requirement with ==, '' otherwise."""
    specifiers = list(requirement.specifier) if requirement else []
    if len(specifiers) == 1 and specifiers[0].operator == "==":
        version = specifiers[0].version
        return "" if version.endswith(".*") else version
    return ""


def family_rows(
    before: Mapping[str, Requirement], now: Mapping[str, Requirement], stack: Stack, rules: Rules
) -> list[FamilyRow]:
    """The family, and every other requirement that changed.

    Proposed is: upstream's new version where our pin followed upstream's old one; else ours,
    which has its own reason.
    """
    against: dict[str, list[str]] = {}
    for finding in _objections(now, stack, rules):
        for name in finding.distribution.split(" and "):
            against.setdefault(name, []).append(
                f"{finding.rule}: {finding.found}, wanted {finding.wanted}"
            )
    rows = []
    others = sorted(n for n in {*before, *now} if str(before.get(n, "")) != str(now.get(n, "")))
    for name in [*stack.family, *(n for n in others if n not in stack.family)]:
        pinned = stack.family[name].version if name in stack.family else ""
        follows = bool(pinned) and pinned == exact(before.get(name))
        rows.append(
            FamilyRow(
                name=name, before=_text(before.get(name)), now=_text(now.get(name)), pinned=pinned,
                proposed=(exact(now.get(name)) or pinned) if follows else pinned,
                against=tuple(dict.fromkeys(against.pop(name, []))),
            )
        )  # fmt: skip
    rows += [
        FamilyRow(name=name, before="", now="", pinned="", proposed="", against=tuple(lines))
        for name, lines in against.items()
    ]
    return rows


def _text(requirement: Requirement | None) -> str:
    if requirement is None:
        return ""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{extras}{requirement.specifier}" or "any"


def _objections(now: Mapping[str, Requirement], stack: Stack, rules: Rules) -> list[Finding]:
    """Rules that break with what upstream asks for, and our pin where it asks for no version."""
    pinned = {name: pin.version for name, pin in stack.family.items()} | stack.cuda.toolkit
    wanted = {n: exact(r) for n, r in now.items() if exact(r)}
    members = [Member(distribution=n, version=v) for n, v in (pinned | wanted).items()]
    found: list[Finding] = []
    for machine in sorted(name.removeprefix("linux-") for name in stack.targets):
        found += evaluate(rules, members, machine=machine)
    # What has an extra that brings it is not in this set.
    return [f for f in dict.fromkeys(found) if not f.wanted.startswith("what ")]


def source_rows(declared: Sequence[Fetched], stack: Stack) -> list[SourceRow]:
    """Third-party sources whose pin and upstream's CMake disagree; '' where one side has none.

    A file that fetches a repository of the same name from another owner fetches the same source.
    """
    rows = []
    left = {(d.file, d.repository): d for d in declared}
    for name, pin in stack.sources.items():
        pinned = pin.upstream_repository.lower()
        found = left.pop((pin.upstream_file, pinned), None)
        if found is None:
            short = pinned.rpartition("/")[2]
            found = next(
                (d for (file, repository), d in left.items()
                 if file == pin.upstream_file and repository.rpartition("/")[2] == short), None,
            )  # fmt: skip
            if found is not None:
                del left[(found.file, found.repository)]
        wanted = found.ref if found else ""
        repository = found.repository if found and found.repository != pinned else ""
        if repository or wanted != pin.ref:
            rows.append(
                SourceRow(
                    name=name, file=pin.upstream_file, pinned=pin.ref, wanted=wanted,
                    repository=repository,
                )
            )  # fmt: skip
    rows += [
        SourceRow(name=d.repository, file=d.file, pinned="", wanted=d.ref) for d in left.values()
    ]
    return rows
