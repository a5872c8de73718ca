"""METADATA, WHEEL and _version.py of the overlay, out of the release's.

Requires-Dist is corrected by what the patches change in vLLM's requirement files, so that it
is what our own builds have. Lines that nothing changes stay byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from sm121.errors import CheckFailed
from sm121.lock.resolve import REQUIREMENT_FILES

_EXTRA = re.compile(r";.*\bextra\b")


def listed_requirements(files: Mapping[str, str]) -> list[str]:
    """Requirements of vLLM's requirement files as its setup.py reads them: `-r` followed,
    options and comments dropped; normalised. files: text of each of REQUIREMENT_FILES.

    Raises CheckFailed for a line that is no requirement (PEP 508) or a file that is not given.
    """
    by_name = {PurePosixPath(path).name: text for path, text in files.items()}

    def read(name: str) -> list[str]:
        found: list[str] = []
        for line in by_name[name].split("\n"):
            if line.startswith("-r "):
                found += read(line.split()[1])
            elif line.strip() and not line.startswith(("--", "#")):
                # setuptools drops what follows " #" (pkg_resources, drop_comment).
                found.append(str(Requirement(line.partition(" #")[0].strip())))
        return found

    try:
        return read(PurePosixPath(REQUIREMENT_FILES[0]).name)
    except (InvalidRequirement, KeyError) as error:
        raise CheckFailed(
            "vLLM's requirement files can't be read.", cause=str(error),
            remedy="Correct the patch that touches them.",
        ) from error  # fmt: skip


def corrected_metadata(
    metadata: str, *, version: str, pristine: Sequence[str], patched: Sequence[str]
) -> tuple[str, list[str]]:
    """METADATA for the patched requirements; and what was changed, a line each.

    pristine, patched: of listed_requirements. What upstream's setup.py keeps out of METADATA
    (flashinfer-cubin) stays out. Raises CheckFailed if METADATA and the pristine files disagree.
    """
    head, separator, description = metadata.partition("\n\n")
    lines = head.split("\n")
    asked = {
        str(Requirement(line.partition(": ")[2])): line
        for line in lines
        if line.startswith("Requires-Dist: ") and not _EXTRA.search(line)
    }
    if unknown := sorted(asked.keys() - set(pristine)):
        raise CheckFailed(
            "The release's METADATA asks for what its requirement files do not list.",
            details=unknown[:10], cause="the wheel is not of this source",
            remedy="Pin the wheel of the same release in stack.toml, overlay.wheels.",
        )  # fmt: skip
    kept_out = {_name(r) for r in pristine if r not in asked}
    wanted = [r for r in patched if _name(r) not in kept_out]
    place = next((i for i, line in enumerate(lines) if line in asked.values()), len(lines))
    rest = [line for line in lines if line not in asked.values()]
    rest[place:place] = [asked.get(r, f"Requires-Dist: {r}") for r in wanted]
    at = next(i for i, line in enumerate(rest) if line.startswith("Version: "))
    rest[at] = f"Version: {version}"
    old, new = {_name(r): r for r in asked}, {_name(r): r for r in wanted}
    changes = [
        f"METADATA: {old.get(name, 'nothing')} is now {new.get(name, 'left out')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
    return "\n".join(rest) + separator + description, changes


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def corrected_tags(text: str, tag: str) -> str:
    """WHEEL with one tag in place of its own ('cp311-abi3-manylinux_2_28_aarch64')."""
    lines = text.rstrip("\n").split("\n")
    place = next(i for i, line in enumerate(lines) if line.startswith("Tag: "))
    kept = [line for line in lines if not line.startswith("Tag: ")]
    return "\n".join([*kept[:place], f"Tag: {tag}", *kept[place:]]) + "\n"


def corrected_version_file(text: str, *, old: str, new: str) -> str:
    """_version.py that says the overlay's version, as setuptools-scm would write it.

    Raises CheckFailed if it does not say the release's.
    """
    replacements = {
        f"__version__ = version = {old!r}\n": f"__version__ = version = {new!r}\n",
        f"__version_tuple__ = version_tuple = {_parts(old)!r}\n":
            f"__version_tuple__ = version_tuple = {_parts(new)!r}\n",
    }  # fmt: skip
    for before, after in replacements.items():
        if text.count(before) != 1:
            raise CheckFailed(
                "_version.py in the release's wheel is not of the form that is known.",
                cause=f"there is no line {before.strip()!r}",
                remedy="sm121.overlay.metadata has to learn the new form.",
            )
        text = text.replace(before, after)
    return text


def _parts(version: str) -> tuple[int | str, ...]:
    parsed = Version(version)
    return (*parsed.release, *([parsed.local] if parsed.local else []))
