"""Compare an environment with a wheelhouse, file by file: what deviates, and why it matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sm121.repair.installed import (
    Environment,
    Installed,
    differing,
    family_members,
    read_installed,
    unclaimed,
)
from sm121.repair.wheel import Wheel, member_entries
from sm121.rules.engine import Finding, evaluate
from sm121.rules.model import Rules

_WHY = {
    "not installed": "what needs it fails at import",
    "no dist-info": "installers and `uv pip check` believe that it is not there",
    "damaged dist-info": "no installer can remove or replace it",
    "twice": "which of the two is imported is chance",
    "version": "the set was resolved and checked with the locked one",
    "files": "they are not the files that were checked together: another build of one version "
    "loads, and fails later",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """One distribution that is not as the wheelhouse has it.

    kind: a key of _WHY. found, wanted: for a person. files: path → how it differs.
    leftovers: files in its folders that nobody owns.
    """

    distribution: str
    kind: str
    found: str
    wanted: str
    why: str
    files: Mapping[str, str] = field(default_factory=dict)
    leftovers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """extras: installed, but not of the wheelhouse; they are left alone."""

    deviations: tuple[Deviation, ...]
    extras: tuple[Installed, ...]
    installed: tuple[Installed, ...]
    files: int


def compare(
    environment: Environment, wheels: Mapping[str, Wheel], rules: Rules, *, machine: str
) -> Comparison:
    """wheels: everything that should be installed, by distribution."""
    installed = read_installed(environment)
    by_name: dict[str, list[Installed]] = {}
    for one in installed:
        by_name.setdefault(one.distribution, []).append(one)
    wanted = {name: wheel.installed() for name, wheel in wheels.items()}
    everything = {path: entry for files in wanted.values() for path, entry in files.items()}
    everyones = set(everything)
    differ = differing(environment, everything)
    findings = {
        part: finding
        for finding in evaluate(rules, family_members(environment, installed), machine=machine)
        for part in finding.distribution.split(" and ")
    }
    claimed = everyones | {path for one in installed for path in one.record}
    deviations = [
        found
        for name, wheel in sorted(wheels.items())
        if (
            found := _deviation(
                environment,
                wheel,
                by_name.get(name, []),
                differ,
                everyones,
                claimed,
                findings.get(name),
            )
        )
    ]
    return Comparison(
        deviations=tuple(deviations),
        extras=tuple(one for one in installed if one.distribution not in wheels),
        installed=tuple(installed),
        files=len(everything),
    )


def _deviation(
    environment: Environment,
    wheel: Wheel,
    there: Sequence[Installed],
    differ: Mapping[str, str],
    everyones: set[str],
    claimed: set[str],
    finding: Finding | None,
) -> Deviation | None:
    placed = wheel.installed()
    files = {path: differ[path] for path in placed if path in differ}
    # RECORD is only the quick way: before anything is called wrong, the wheel itself is asked.
    if doubted := [path for path, how in files.items() if how != "missing"]:
        right = set(doubted) - set(differing(environment, member_entries(wheel, doubted)))
        files = {path: how for path, how in files.items() if path not in right}
    # A RECORD that names another one's files: uninstalling would take them away.
    mine = set(placed)
    files |= {
        path: "another wheel's, but in its RECORD"
        for one in there
        for path in one.record
        if path in everyones and path not in mine
    }
    present = [p for p in placed if p not in files or files[p] != "missing"]
    if not there:
        kind, found = "not installed", "nothing"
        if present:
            kind, found = "no dist-info", f"{len(present)} of its files and no dist-info"
    elif len(there) > 1:
        kind, found = "twice", " and ".join(one.version for one in there)
    elif there[0].version != wheel.version:
        kind, found = "version", there[0].version
    elif there[0].fault:
        kind, found = "damaged dist-info", there[0].fault
    elif files:
        kind, found = "files", f"{wheel.version} with {len(files)} file(s) that differ"
    else:
        return None
    leftovers: tuple[str, ...] = ()
    if kind in ("no dist-info", "twice", "version", "damaged dist-info"):
        folders = {path.rpartition("/")[0] for path in placed if not path.startswith("..")}
        leftovers = tuple(unclaimed(environment, folders - {""}, claimed))
    return Deviation(
        distribution=wheel.distribution,
        kind=kind,
        found=found,
        wanted=f"{wheel.version} ({wheel.filename})",
        why=f"{finding.symptom} (rule {finding.rule})" if finding else _WHY[kind],
        files=files,
        leftovers=leftovers,
    )
