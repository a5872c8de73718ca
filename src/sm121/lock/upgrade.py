"""`lock --upgrade NAME`: move one package by editing its pin, so that the lock stays a
function of stack.toml.

A pinned distribution (family, cuda.toolkit, installer) gets another version there. Any other
one is held by `lock-date`; a date of its own in `[lock-newer]` lets it see later files, and so
does one for each package that has to move with it (pydantic pins pydantic-core exactly).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sm121.errors import UsageFault
from sm121.index import compile_lock
from sm121.lock.pylock import Target, read_lock
from sm121.lock.resolve import resolve_files
from sm121.pins.model import Stack


def parse_wish(text: str) -> tuple[str, str]:
    """'torch' or 'torch==2.12.0' → (name, version or ''). Raises UsageFault."""
    try:
        wish = Requirement(text)
        exact = [s.version for s in wish.specifier]
        if [s.operator for s in wish.specifier] in ([], ["=="]) and not wish.extras:
            return canonicalize_name(wish.name), exact[0] if exact else ""
    except InvalidRequirement:
        pass
    raise UsageFault(
        f"--upgrade {text}: not a package to move.", remedy="Write NAME or NAME==VERSION."
    )


def newest(name: str, target: Target, *, log: Path) -> str:
    """The newest version that the index has a wheel of for the target."""
    files = compile_lock(
        [name], uv_platform=target.uv_platform, python=target.python,
        arguments=["--no-deps"], log=log,
    )  # fmt: skip
    return files[0].version


def moving(
    stack: Stack, name: str, target: Target, requirement_files: Mapping[str, str], lock: Path, *,
    now: datetime, log: Path,
) -> list[str]:  # fmt: skip
    """Packages that must be newer than `lock-date` for one that is not pinned to be its newest.

    uv is asked what it would change in the present lock, all others kept if possible.
    """
    free = stack.model_copy(update={"lock_date": now})
    files = resolve_files(
        free, "family", target, requirement_files, log=log, keeping=lock, upgrade=name
    )
    before: dict[str, str] = {p.name: str(p.version) for p in read_lock(lock).packages}
    return sorted(
        {file.distribution for file in files if before.get(file.distribution) != file.version}
    )


def edit_pin(text: str, stack: Stack, name: str, version: str, *, now: datetime) -> str:
    """stack.toml's text with one pin moved; everything else, comments too, stays.

    version '': allowed only for a distribution that is not pinned, which then may be as new
    as `now`. Raises UsageFault for a version of one that is not pinned.
    """
    key = re.escape(name)
    if name in stack.family:
        return _replace(text, rf"^\[family\.{key}\]\n(?:(?!\[).*\n)*?version\s*=\s*", version)
    for section, pins in (("cuda.toolkit", stack.cuda.toolkit), ("installer", stack.installer)):
        if name in pins:
            head = re.escape(section)
            return _replace(text, rf"^\[{head}\]\n(?:(?!\[).*\n)*?{key}\s*=\s*", version)
    if version:
        raise UsageFault(
            f"{name} is not pinned in stack.toml, so it can't be moved to a certain version.",
            remedy=f"Use `--upgrade {name}` for its newest, or pin it as [family.{name}].",
        )
    entry = f"{name} = {now.astimezone(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}\n"
    if name in stack.lock_newer:
        return re.sub(rf"^{key}\s*=\s*\d{{4}}-.*\n", entry, text, count=1, flags=re.MULTILINE)
    if "[lock-newer]\n" in text:
        return text.replace("[lock-newer]\n", f"[lock-newer]\n{entry}", 1)
    reason = (
        "# Packages that may be newer than lock-date: moved by `nox -s lock -- --upgrade NAME`.\n"
    )
    return f"{text.rstrip()}\n\n{reason}[lock-newer]\n{entry}"


def _replace(text: str, before: str, version: str) -> str:
    changed, count = re.subn(
        rf'({before})"[^"]*"', rf'\g<1>"{version}"', text, count=1, flags=re.MULTILINE
    )
    assert count == 1, before
    return changed
