"""What every check is given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sm121.abi.facts import Binary, Wheel
from sm121.abi.gpu import Arch
from sm121.abi.policy.model import Exempt, Policy
from sm121.abi.report import Finding, Kind
from sm121.lock.pylock import Target

# importlib.machinery.EXTENSION_SUFFIXES of a CPython: '.cpython-312-aarch64-linux-gnu.so'.
_SUFFIX = re.compile(r"\.(?:cpython-|cp)(\d)(\d+)(t?)(?:-[\w-]+)?\.so$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a manifest promises: profile, components in it, and those left out with reasons.

    patches: name → git patch-id. None of these for wheels without a manifest.
    """

    profile: str = ""
    built: tuple[str, ...] = ()
    left_out: dict[str, str] | None = None
    patches: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """subjects: judged. others: only there to be loaded with. installed: an environment."""

    subjects: tuple[Wheel, ...]
    others: tuple[Wheel, ...]
    target: Target
    arch: Arch
    policy: Policy
    expected: Expected
    installed: bool = False

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        return self.others + self.subjects

    def distribution(self, name: str) -> Wheel | None:
        """The wheel of a distribution; a judged one is preferred."""
        for wheel in (*self.subjects, *self.others):
            if wheel.distribution == name:
                return wheel
        return None

    def for_interpreter(self, binary: Binary) -> bool:
        """False for an extension module that the target's CPython would never look at."""
        match = _SUFFIX.search(binary.name)
        if match is None:
            return True
        return f"{match[1]}.{match[2]}{match[3]}" == self.target.python


def exemption(rules: Sequence[Exempt], path: str, wheel: Wheel) -> Exempt | None:
    """The first rule that covers a file."""
    for rule in rules:
        if rule.covers(path, wheel.distribution, wheel.version):
            return rule
    return None


def matches(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path, glob) for glob in globs)


def finding(
    kind: Kind,
    wheel: Wheel | None,
    file: str,
    text: str,
    *,
    exempt: Exempt | None = None,
    why: str = "",
    names: Sequence[str] = (),
    note: bool = False,
) -> Finding:
    """A fault, or a note where policy exempts it or `note` is set."""
    return Finding(
        kind=kind, severity="note" if exempt or note else "fault",
        wheel=wheel.filename if wheel else "", file=file, text=text,
        why=exempt.why if exempt else why, names=tuple(names),
    )  # fmt: skip
