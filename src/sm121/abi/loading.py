"""Check: can everything be loaded? Missing libraries, open symbols, missing versions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from sm121.abi.context import Context, exemption, finding, matches
from sm121.abi.demangle import demangle
from sm121.abi.facts import Wheel
from sm121.abi.policy.model import Provider
from sm121.abi.report import Finding, NotRun, OpenSymbol
from sm121.abi.scope import Loaded, Scene
from sm121.abi.symbols import Open, Resolution, Resolver
from sm121.abi.system import System, data


def resolve(context: Context) -> Resolution:
    """Look up every strong reference of the subjects in the scopes they are loaded in."""
    policy = context.policy
    system = System.load(
        machine=context.target.machine,
        python=context.target.python,
        trusted={one.name: one.symbols for one in policy.system},
    )
    scene = Scene(_loadable(context), machine=context.target.machine, system=system.names)
    opened: list[Loaded] = []
    global_roots: list[Loaded] = []
    local_roots: list[Loaded] = []
    for rule in policy.preload:
        if rule.for_files:
            continue
        if rule.if_loaded:
            loaded = [o for one in opened for o in scene.closure(one).objects]
            if not any(fnmatchcase(one.binary.name, rule.if_loaded) for one in loaded):
                continue
        found = [one for path, one in scene.files.items() if matches(path, rule.opens)]
        opened += found
        (global_roots if rule.scope == "global" else local_roots).extend(found)
    resolver = Resolver(scene, system, global_roots=global_roots, local_roots=local_roots)
    extras: dict[Loaded, Sequence[Loaded]] = {}
    for rule in policy.preload:
        if rule.for_files:
            opens = [one for path, one in scene.files.items() if matches(path, rule.opens)]
            for path, one in scene.files.items():
                if opens and matches(path, rule.for_files):
                    extras[one] = opens
    judged = {wheel.filename for wheel in context.subjects}
    subjects = [one for one in scene.files.values() if one.wheel.filename in judged]
    return resolver.resolve(subjects, extras)


def _loadable(context: Context) -> Iterator[Wheel]:
    """The wheels without extension modules for other interpreters. Winners come last."""
    last = {rule.winner for rule in context.policy.overlaps if rule.winner}
    for wheel in sorted(context.wheels, key=lambda w: w.distribution in last):
        kept = tuple(b for b in wheel.binaries if context.for_interpreter(b))
        if len(kept) != len(wheel.binaries):
            yield dataclasses.replace(wheel, binaries=kept)
        else:
            yield wheel


def findings(
    context: Context, resolution: Resolution, neighbours: Sequence[Wheel]
) -> tuple[list[Finding], list[OpenSymbol]]:
    """Findings and the table of open symbols. neighbours: the lock's wheels, for hints."""
    out: list[Finding] = []
    rows: list[OpenSymbol] = []
    optional = context.policy.optional
    broken = {missing.root for missing in resolution.missing}
    for missing in resolution.missing:
        user = missing.user
        through = f" (needed by {missing.through})" if missing.through else ""
        if missing.root is not user:
            through = f" (loaded for {missing.root.path})"
        out.append(
            finding(
                "library", user.wheel, user.path,
                f"needs {missing.library}, which no wheel of the set and not the system has{through}",
                exempt=exemption(optional, user.path, user.wheel)
                or exemption(optional, missing.root.path, missing.root.wheel),
                names=[missing.library],
            )
        )  # fmt: skip
    for one in resolution.open:
        if one.root in broken:
            # The loader stops at the missing library; what else is open follows from it.
            continue
        rule = exemption(optional, one.user.path, one.user.wheel)
        row = _row(one, context, neighbours)
        if rule is None:
            rows.append(row)
        out.append(
            finding(
                "symbol", one.user.wheel, one.user.path, _sentence(row), exempt=rule,
                names=[one.symbol.name],
            )
        )  # fmt: skip
    for gap in resolution.gaps:
        out.append(
            finding(
                "symbol-version", gap.user.wheel, gap.user.path,
                f"asks {gap.library} for version {gap.version}, which it does not define",
                exempt=exemption(optional, gap.user.path, gap.user.wheel),
                names=[gap.version],
            )
        )  # fmt: skip
    return out, rows


def without(found: Sequence[Finding], lacking: Sequence[str]) -> tuple[list[Finding], list[NotRun]]:
    """A library that nobody has may be in what is not here: then it was not checked."""
    out: list[Finding] = []
    not_run: list[NotRun] = []
    for one in found:
        if one.kind != "library" or one.severity != "fault":
            out.append(one)
            continue
        out.append(dataclasses.replace(one, severity="note", why="the set around it is not whole"))
        not_run.append(
            NotRun(
                check=f"symbols of {one.file}",
                reason=f"{', '.join(one.names)} was not found, and of the lock these are not in the "
                f"cache: {', '.join(lacking[:4])}{' …' if len(lacking) > 4 else ''}",
            )
        )
    return out, list(dict.fromkeys(not_run))


def _sentence(row: OpenSymbol) -> str:
    version = f" (version {row.version})" if row.version else ""
    loaded = "" if row.loaded_for == row.needed_by else f" when {row.loaded_for} is loaded"
    known = f"; it is in {', '.join(row.found_in)}" if row.found_in else ""
    expected = f"; {row.expected_in} should have it" if row.expected_in else ""
    return f"undefined symbol {row.demangled}{version}{loaded}{expected}{known}"


def _row(one: Open, context: Context, neighbours: Sequence[Wheel]) -> OpenSymbol:
    name = one.symbol.name
    readable = demangle(name)
    # A wheel that bundles a stub of the driver is no place to get it from.
    driver = name in data("libcuda.json")["names"]
    holders = () if driver else tuple(_holders(name, neighbours))
    expected = one.symbol.library or (
        holders[0].rpartition("/")[2] if holders else _expected(name, context.policy.providers)
    )
    return OpenSymbol(
        name=name, demangled=readable, version=one.symbol.version,
        wheel=one.user.wheel.filename, needed_by=one.user.path, loaded_for=one.root.path,
        expected_in=expected, found_in=holders,
    )  # fmt: skip


def _holders(name: str, neighbours: Iterable[Wheel]) -> Iterator[str]:
    for wheel in neighbours:
        for binary in wheel.binaries:
            if binary.elf and name in binary.elf.exports.plain:
                yield f"{wheel.distribution} {wheel.version}: {binary.path}"


def _expected(name: str, providers: Iterable[Provider]) -> str:
    for provider in providers:
        if re.search(provider.pattern, name):
            return provider.library
    return ""
