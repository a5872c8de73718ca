"""Which wheels of a lock need repair, and how. Only metadata changes and whole members go:
no byte of any binary is touched.

- A requirement that the pins overrule (stack.toml, overrides) is rewritten to the locked
  version, so that an installed environment passes `uv pip check`.
- A wheel that yields (stack.toml, yields) loses the paths that the other wheel owns too, so
  that the installed files are the other's, whatever the installer's order.
- A wheel whose WHEEL names no tag that its file name has (nvidia-cusparselt-cu13 0.8.0 for aarch64
  says `manylinux2014_sbsa`, which no installer knows) gets the file name's, since `uv pip check`
  goes by what was installed, and refuses it on every aarch64 machine.

A repaired wheel has a build tag (`torch-2.11.0-1sm121-…`), so that it is never taken for the
original, and says in `<dist-info>/sm121-repair.json` what was done to which file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name, parse_wheel_filename

from sm121.errors import FamilyFault
from sm121.lock.pylock import LockedFile
from sm121.pins.model import Stack
from sm121.repair.wheel import Wheel, read_wheel, rewrite_wheel

BUILD_TAG = "1sm121"
NOTE = "sm121-repair.json"
NOTICE = "repaired for use on one's own nodes: not the vendor's file, and not for publishing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """What is done to one wheel. changes: a line each, for manifest and SBOM."""

    original: LockedFile
    edits: Mapping[str, bytes]
    removed: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def filename(self) -> str:
        """The original's name with our build tag in its place (PEP 427)."""
        name, version, rest = self.original.filename.split("-", 2)
        return f"{name}-{version}-{BUILD_TAG}-{rest}"


def plan_repairs(
    stack: Stack, files: Mapping[str, LockedFile], wheels: Mapping[str, Wheel]
) -> list[Repair]:
    """The repairs that a set of wheels needs; both mappings are by distribution.

    Raises FamilyFault if a wheel is to yield to one that is not in the set.
    """
    repairs = []
    for name, wheel in sorted(wheels.items()):
        metadata, changes = _corrected_metadata(stack, wheel, files)
        tags = _corrected_tags(wheel, changes)
        removed: list[str] = []
        if (pin := stack.yields.get(name)) is not None:
            if pin.to not in wheels:
                raise FamilyFault(
                    f"{name} yields to {pin.to}, which is not in the lock.",
                    cause=f"stack.toml, yields.{name}",
                    remedy="Write the extra that brings it, or drop the entry.",
                )
            theirs = wheels[pin.to].installed()
            common = [path for path in wheel.installed() if path in theirs]
            # Members of a wheel without .data are at their installed path.
            removed = sorted(path for path in common if path in wheel.record)
            differ = sum(wheel.record[p].digest != theirs[p].digest for p in removed)
            if removed:
                changes.append(
                    f"{len(removed)} files left out that {pin.to} owns too ({differ} of them "
                    f"with different content)"
                )
        if not changes:
            continue
        note = {
            "schema_version": 1,
            "original": {"filename": files[name].filename, "sha256": files[name].sha256},
            "changes": changes,
            "notice": NOTICE,
        }
        edits = {"WHEEL": _with_build_tag(tags), NOTE: json.dumps(note, indent=1) + "\n"}
        if metadata != wheel.metadata:
            edits["METADATA"] = metadata
        repairs.append(
            Repair(
                original=files[name],
                edits={f"{wheel.dist_info}/{n}": text.encode() for n, text in edits.items()},
                removed=tuple(removed),
                changes=tuple(changes),
            )
        )
    return repairs


def write_repair(repair: Repair, source: Path, output: Path) -> None:
    """Make the repaired wheel of an original at `source`, and read it back."""
    rewrite_wheel(source, output, edits=repair.edits, removed=repair.removed)
    read_wheel(output)


def _corrected_metadata(
    stack: Stack, wheel: Wheel, files: Mapping[str, LockedFile]
) -> tuple[str, list[str]]:
    """METADATA with every overruled requirement at the locked version; what was changed.

    Works on lines, so that everything else, the description too, stays byte for byte.
    """
    changes = []
    lines = wheel.metadata.splitlines(keepends=True)
    for index, line in enumerate(lines):
        text = line.rstrip("\r\n")
        if not text:
            break  # the description begins
        key, _, value = text.partition(": ")
        if key.lower() != "requires-dist":
            continue
        asked = Requirement(value)
        name = canonicalize_name(asked.name)
        if name not in stack.overrides or name not in files:
            continue
        version = files[name].version
        if asked.specifier.contains(version, prereleases=True):
            continue
        before, asked.specifier = str(asked.specifier), SpecifierSet(f"=={version}")
        lines[index] = f"{key}: {asked}" + line[len(text) :]
        changes.append(f"METADATA: Requires-Dist {name}{before} is now {name}=={version}")
    return "".join(lines), changes


def _corrected_tags(wheel: Wheel, changes: list[str]) -> str:
    """WHEEL's text, with the file name's tags if it names none of them; what was changed is added."""
    named = sorted(map(str, parse_wheel_filename(wheel.filename)[3]))
    lines = wheel.tags.rstrip("\n").split("\n")
    told = [line.removeprefix("Tag:").strip() for line in lines if line.startswith("Tag:")]
    if {str(tag) for text in told for tag in parse_tag(text)} & set(named):
        return wheel.tags
    kept = [line for line in lines if not line.startswith("Tag:")]
    changes.append(f"WHEEL: Tag {', '.join(told)} is now {', '.join(named)}")
    return "\n".join([*kept, *(f"Tag: {tag}" for tag in named)]) + "\n"


def _with_build_tag(tags: str) -> str:
    """WHEEL says the build tag that the file name has (binary-distribution-format)."""
    kept = [line for line in tags.rstrip("\n").split("\n") if not line.startswith("Build:")]
    place = next(i for i, line in enumerate(kept) if line.startswith("Tag:"))
    return "\n".join([*kept[:place], f"Build: {BUILD_TAG}", *kept[place:]]) + "\n"
