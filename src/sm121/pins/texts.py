"""Texts that pins, policies and manifests hold, checked where they are read."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field


def _hex(length: int, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(rf"[0-9a-f]{{{length}}}", value):
            raise ValueError(f"{what} must be {length} lower-case hex digits")
        return value

    return AfterValidator(check)


def _version(value: str) -> str:
    try:
        Version(value)
    except InvalidVersion as error:
        raise ValueError(f"{value!r} is not a version (PEP 440)") from error
    return value


def _distribution(value: str) -> str:
    if canonicalize_name(value) != value:
        raise ValueError(f"distribution names are normalised: write {canonicalize_name(value)!r}")
    return value


def _requirement(value: str) -> str:
    try:
        Requirement(value)
    except InvalidRequirement as error:
        raise ValueError(f"{value!r} is not a requirement (PEP 508): {error}") from error
    return value


def _relative(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{value!r} must be a relative path that stays inside")
    return value


def _git_ref(value: str) -> str:
    # A ref that starts with a dash would reach git as an option.
    if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z._/+-]*", value) or ".." in value:
        raise ValueError(f"{value!r} is not a git tag, branch or commit")
    return value


def _wheel_filename(value: str) -> str:
    try:
        parse_wheel_filename(value)
    except InvalidWheelFilename as error:
        raise ValueError(f"{value!r} is not the name of a wheel: {error}") from error
    return value


Sha256 = Annotated[str, _hex(64, "a sha256")]
Commit = Annotated[str, _hex(40, "a commit")]
GitRef = Annotated[str, AfterValidator(_git_ref)]
VersionText = Annotated[str, AfterValidator(_version)]
Distribution = Annotated[str, AfterValidator(_distribution)]
RequirementText = Annotated[str, AfterValidator(_requirement)]
WheelFilename = Annotated[str, AfterValidator(_wheel_filename)]
RelativePath = Annotated[str, AfterValidator(_relative)]
CompiledSource = Annotated[
    str, AfterValidator(_relative), Field(pattern=r"^(\{[^{}/]+\}/)?[^{}/][^{}]*$")
]
Arch = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9][af]?$")]
GlibcText = Annotated[str, Field(pattern=r"^2\.[0-9]+$")]
PythonText = Annotated[str, Field(pattern=r"^3\.[0-9]+$")]
TargetName = Literal["linux-aarch64", "linux-x86_64"]
