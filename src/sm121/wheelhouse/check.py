"""Checks of a gathered set of wheels, before it becomes the wheelhouse."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

from sm121.errors import WheelFault
from sm121.lock.pylock import Target
from sm121.repair.wheel import Wheel, read_wheel
from sm121.rules.build import build_from_version, version_file
from sm121.rules.engine import Member, evaluate, require
from sm121.rules.model import Rules
from sm121.wheelhouse.manifest import Check


def check_set(folder: Path, rules: Rules, target: Target) -> tuple[dict[str, Wheel], list[Check]]:
    """Check every wheel of a folder as the set that will be installed.

    Returns the wheels by file name, and the verdicts for the manifest. Raises FamilyFault
    (a rule is broken) or WheelFault (a tag or a requirement does not fit).
    """
    paths = sorted(folder.glob("*.whl"))
    wheels = {path.name: read_wheel(path) for path in paths}
    if faults := wrong_tags([p.name for p in paths], target):
        raise WheelFault(
            f"{len(faults)} wheel(s) are not for {target.tag}.", details=faults,
            remedy="Run `nox -s lock`; a wheel built elsewhere needs the target's platform tag.",
        )  # fmt: skip
    members = [
        Member(
            distribution=wheel.distribution,
            version=wheel.version,
            build=_build(folder / name, wheel),
            place=name,
            files={path: entry.digest for path, entry in wheel.installed().items()},
        )
        for name, wheel in wheels.items()
    ]
    require(
        evaluate(rules, members, machine=target.machine),
        "The set of wheels",
        remedy="Nothing was replaced. Correct stack.toml (family, yields) and run `nox -s lock`.",
    )
    unmet = unmet_requirements(list(wheels.values()), target)
    if unmet:
        raise WheelFault(
            "An installed environment would not pass `uv pip check`.", details=unmet,
            remedy="Add the distribution to [overrides] in stack.toml, or correct its pin.",
        )  # fmt: skip
    shared = sum(len(m.files) for m in members) - len({p for m in members for p in m.files})
    return wheels, [
        Check(name="tags", verdict="passed", detail=f"every wheel fits {target.tag}"),
        Check(
            name="family", verdict="passed",
            detail=f"{len(rules.rules)} rules of pins/rules.toml hold; no path has two contents "
            f"({shared} path(s) are in two wheels with the same content)",
        ),
        Check(
            name="requirements", verdict="passed",
            detail="every Requires-Dist of every wheel is met by the set",
        ),
    ]  # fmt: skip


def wrong_tags(filenames: Sequence[str], target: Target) -> list[str]:
    """Wheels that the target's installer would not accept, each with its tags."""
    accepted = set(target.tags())
    return [
        f"{name}: tagged {', '.join(sorted({t.platform for t in tags}))}, wanted {target.tag}"
        for name in filenames
        if accepted.isdisjoint(tags := parse_wheel_filename(name)[3])
    ]


def unmet_requirements(wheels: Sequence[Wheel], target: Target) -> list[str]:
    """What `uv pip check` would say of the installed set: missing and wrong versions."""
    have = {wheel.distribution: wheel.version for wheel in wheels}
    environment: Mapping[str, object] = {**target.environment(), "extra": ""}
    return [
        f"{wheel.distribution} {wheel.version} wants {asked}, the set has {have.get(name, 'none')}"
        for wheel in wheels
        for asked in wheel.requirements()
        if asked.marker is None or asked.marker.evaluate(environment)  # type: ignore[arg-type]
        if (name := canonicalize_name(asked.name)) not in have
        or not asked.specifier.contains(have[name], prereleases=True)
    ]


def _build(path: Path, wheel: Wheel) -> str:
    name = version_file(wheel.distribution)
    if name not in wheel.record:
        return ""
    with zipfile.ZipFile(path) as archive:
        return build_from_version(archive.read(name).decode(errors="replace"))
