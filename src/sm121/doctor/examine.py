"""Make every check, in the order in which a person would look."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from sm121.doctor.environment import check_environment
from sm121.doctor.gpu import check_gpu
from sm121.doctor.links import check_links
from sm121.doctor.machine import Machine
from sm121.doctor.mask import masker
from sm121.doctor.model import Check, Diagnosis, Role
from sm121.doctor.plans import plans
from sm121.doctor.reference import reference_of
from sm121.doctor.resources import (
    check_disk,
    check_locked_memory,
    check_memory,
    check_places,
    check_system,
)
from sm121.doctor.supplies import check_index, check_sources
from sm121.doctor.tools import (
    check_compilers,
    check_git,
    check_nvcc,
    check_python,
    check_shadow,
)


def examine(machine: Machine, *, role: Role, default: str, env: Path | None = None) -> Diagnosis:
    """All checks for both roles; the result is that of `role`. default: the profile that a plain
    `build` makes. Every text is free of credentials. Raises UsageFault for an env that is none.
    """
    hide = masker(machine.environment)
    checks = tuple(
        dataclasses.replace(
            check,
            found=hide(check.found),
            # Where all is well there is nothing to explain.
            cause=hide(check.cause) if _bad(check) else "",
            remedy=hide(check.remedy) if _bad(check) else "",
        )
        for check in _checks(machine, default, env)
    )
    failed = any(check.level(role) == "fault" for check in checks)
    context = machine.context
    return Diagnosis(
        schema_version=1, role=role, stack=context.stack_name,
        target=context.options.target, profile=context.options.profile,
        result="fail" if failed else "pass", checks=checks,
        plans=tuple(plans(context, default=default)),
    )  # fmt: skip


def _bad(check: Check) -> bool:
    return not {check.build, check.run}.isdisjoint({"warning", "fault"})


def _checks(machine: Machine, default: str, env: Path | None) -> Iterator[Check]:
    yield from _check_profile(machine, default)
    yield from check_system(machine)
    yield from check_memory(machine)
    yield from check_disk(machine, reference_of(machine.context.options.profile))
    yield from check_places(machine)
    yield from check_git(machine)
    yield from check_compilers(machine)
    yield from check_python(machine)
    yield from check_index(machine)
    yield from check_sources(machine)
    yield from check_gpu(machine)
    yield from check_nvcc(machine)
    yield from check_locked_memory()
    yield from check_links(machine)
    yield from check_shadow(machine)
    if env is not None:
        yield from check_environment(machine, env)


def _check_profile(machine: Machine, default: str) -> Iterator[Check]:
    """A plain `build` makes the default profile: can this stack build it at all?"""
    context = machine.context
    if default not in context.stack.profiles:
        yield Check(
            name="profile", build="warning", run="not needed",
            found=f"looking at {context.options.profile}",
            cause=f"stack {context.stack_name} can't build {default}, the default, yet",
            remedy=f"Name one for `build`: --profile {', '.join(context.stack.profiles)}.",
        )  # fmt: skip
