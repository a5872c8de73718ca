"""Evaluate the rules over a set of distributions, whatever it was read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sm121.errors import FamilyFault
from sm121.rules.model import (
    EqualRule,
    ExtraRule,
    KnownBadRule,
    NoBuildRule,
    OneMinorRule,
    OneOwnerRule,
    PairRule,
    Rule,
    Rules,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One distribution of the set.

    version: as METADATA, lock or pin has it. build: the local part of the package's own
    __version__ ('cu130', 'cpu'), '' if not known: METADATA does not carry it. place: file
    name or path, to tell two of one name apart. files: content digest by installed path,
    where known; what the digest is does not matter as long as it is one kind.
    """

    distribution: str
    version: str
    build: str = ""
    place: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def public(self) -> Version:
        return Version(Version(self.version).public)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A rule that the set breaks: which, by what, and what was wanted instead."""

    rule: str
    distribution: str
    found: str
    wanted: str
    symptom: str
    reason: str
    source: str

    def lines(self) -> list[str]:
        """For a person: the finding, its symptom, its reason, its source."""
        return [
            f"rule {self.rule}: {self.distribution}: found {self.found}, wanted {self.wanted}",
            f"    symptom: {self.symptom}",
            f"    reason:  {self.reason}",
            f"    source:  {self.source}",
        ]


def evaluate(
    rules: Rules, members: Sequence[Member], *, machine: str = "", serving: bool = True
) -> list[Finding]:
    """All findings, in the order of the rules.

    machine '': rules for one machine don't apply. serving: False for a build host's tools.
    """
    return [
        Finding(
            rule=name, distribution=distribution, found=found, wanted=wanted,
            symptom=rule.symptom, reason=rule.reason, source=rule.source,
        )
        for name, rule in rules.rules.items()
        if serving or not rule.serving_only
        for distribution, found, wanted in _broken(rule, members, machine)
    ]  # fmt: skip


def require(findings: Sequence[Finding], what: str, *, remedy: str) -> None:
    """Raise FamilyFault, all findings in its details, if there are any."""
    if findings:
        raise FamilyFault(
            f"{what} breaks {len(findings)} rule(s) of pins/rules.toml.",
            details=[line for finding in findings for line in finding.lines()],
            remedy=remedy,
        )


def _broken(rule: Rule, members: Sequence[Member], machine: str) -> Iterator[tuple[str, str, str]]:
    """(distribution, found, wanted) of each breach of one rule."""
    present: dict[str, Member] = {}
    for member in members:
        present.setdefault(member.distribution, member)
    match rule:
        case EqualRule():
            yield from _equal(rule, _matching(rule.members, members))
        case ExtraRule():
            if rule.distribution in present and rule.brings not in present:
                yield (
                    rule.brings,
                    "nothing",
                    f"what {rule.distribution}[{rule.extra}] brings: write the extra in the pin",
                )
        case OneMinorRule():
            yield from _one_minor(rule, _matching(rule.members, members))
        case KnownBadRule():
            beside = [f"{n} {present[n].version}" for n in rule.beside if n in present]
            applies = rule.machine in ("", machine) and _all_hold(rule.beside, present)
            for member in members:
                if (
                    applies
                    and member.distribution == rule.distribution
                    and _holds(rule.versions, member)
                ):
                    yield (
                        member.distribution,
                        " beside ".join([member.version, *beside]),
                        f"not {rule.versions}" + (f" on {machine}" if rule.machine else ""),
                    )
        case PairRule():
            if _all_hold(rule.when, present):
                because = " and ".join(f"{n} {present[n].version}" for n in rule.when)
                for name, versions in rule.wants.items():
                    if name in present and not _holds(versions, present[name]):
                        yield name, present[name].version, f"{versions}, since {because}"
        case NoBuildRule():
            for member in _matching(rule.members, members):
                build = member.build or Version(member.version).local or ""
                if build.split(".")[0] in rule.builds:
                    yield member.distribution, f"{member.public}+{build}", "a CUDA build"
        case OneOwnerRule():
            yield from _one_owner(members)
        case _:
            for name, count in Counter(m.distribution for m in members).items():
                if count > 1:
                    twice = [m.place or m.version for m in members if m.distribution == name]
                    yield name, " and ".join(sorted(twice)), "one of them"


def _matching(patterns: Sequence[str], members: Sequence[Member]) -> list[Member]:
    return [m for m in members if any(fnmatchcase(m.distribution, p) for p in patterns)]


def _holds(versions: str, member: Member) -> bool:
    return SpecifierSet(versions).contains(member.public, prereleases=True)


def _all_hold(conditions: Mapping[str, str], present: Mapping[str, Member]) -> bool:
    return all(n in present and _holds(v, present[n]) for n, v in conditions.items())


def _equal(rule: EqualRule, members: Sequence[Member]) -> Iterator[tuple[str, str, str]]:
    if not members:
        return
    # The first pattern names the leader: its version is what the others must have.
    leader = next((m for m in members if fnmatchcase(m.distribution, rule.members[0])), members[0])

    def key(member: Member) -> Version:
        return member.public if rule.compare == "public" else Version(member.version)

    for member in members:
        if key(member) != key(leader):
            yield (
                member.distribution,
                member.version,
                f"{leader.version}, as {leader.distribution}",
            )


def _one_minor(rule: OneMinorRule, members: Sequence[Member]) -> Iterator[tuple[str, str, str]]:
    minors = {m.distribution: m.public.release[:2] for m in members}
    if not minors:
        return
    wanted = minors.get(rule.anchor) or Counter(minors.values()).most_common(1)[0][0]
    for member in members:
        if member.public.release[:2] != wanted:
            minor = ".".join(map(str, wanted))
            yield member.distribution, member.version, f"{minor}.*, as {rule.anchor}"


def _one_owner(members: Sequence[Member]) -> Iterator[tuple[str, str, str]]:
    owners: dict[str, tuple[str, str]] = {}
    clashes: dict[tuple[str, str], list[str]] = {}
    for member in members:
        for path, digest in member.files.items():
            owner, known = owners.setdefault(path, (member.distribution, digest))
            if owner != member.distribution and known != digest:
                clashes.setdefault((owner, member.distribution), []).append(path)
    for (first, second), paths in clashes.items():
        yield (
            f"{first} and {second}",
            f"{len(paths)} path(s) with different content, such as {min(paths)}",
            "one owner for each path",
        )
