"""What doctor found, as data. Published as doctor.schema.json; tested to be equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm121.published import report_text, schema_text_of

SCHEMA_FILE = Path(__file__).with_name("doctor.schema.json")

Role = Literal["build", "run"]
Level = Literal["ok", "warning", "fault", "not needed", "not run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check. found: what is there, one sentence. build, run: what that means for each role.

    cause, remedy: for a warning or a fault of either role: why, and what to do next.
    """

    name: str
    found: str
    build: Level
    run: Level
    cause: str = ""
    remedy: str = ""

    def level(self, role: Role) -> Level:
        return self.build if role == "build" else self.run


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a build of one profile makes here, from nothing.

    seconds: without downloads. basis 'recorded': a run here compiled all of it in that time;
    'estimate': from what its objects were measured to cost here or elsewhere, or from figures of
    another machine, scaled by jobs; 'unknown': seconds is 0. text: how it was found.
    """

    profile: str
    default: bool
    components: tuple[str, ...]
    jobs: int
    jobs_reason: str
    seconds: float
    basis: Literal["recorded", "estimate", "unknown"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The whole answer. result: of the role that was asked for."""

    schema_version: Literal[1]
    role: Role
    stack: str
    target: str
    profile: str
    result: Literal["pass", "fail"]
    checks: tuple[Check, ...]
    plans: tuple[Plan, ...]

    def faults(self, role: Role) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.level(role) == "fault")


def to_json(diagnosis: Diagnosis) -> str:
    """As JSON text, per doctor.schema.json."""
    return report_text(diagnosis)


def schema_text() -> str:
    """The JSON schema (2020-12) of a diagnosis."""
    return schema_text_of(Diagnosis)
