"""What `verify-target` found, as data. Published as target.schema.json; tested to be equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm121.published import report_text, schema_text_of

SCHEMA_FILE = Path(__file__).with_name("target.schema.json")

How = Literal["static", "native", "emulated", "not run"]
Verdict = Literal["pass", "fail", "not run"]
Driver = Literal["stub", "real", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One step. how: was only read (static), or ran on a processor of the target (native), or on an
    emulated one. text: what was found, or why it failed or was not run. facts: versions and counts.
    """

    step: str
    how: How
    verdict: Verdict
    text: str
    seconds: float = 0.0
    facts: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where the target's programs ran. python: whole version. system: whose libraries were used.
    emulator: its version, or ''. driver: 'stub' answers every call with an error and only lets
    libraries load. network: was there one? drift: packages of the root that are not as recorded.
    """

    how: Literal["native", "emulated"]
    machine: str
    python: str
    system: str
    emulator: str
    driver: Driver
    network: bool
    drift: tuple[str, ...]


def why_no_environment(rows: Iterable[Row]) -> str:
    """Why there was no environment to run anything in, '' if there was one. A row of one that was
    made has facts, also where it is unpacked and not installed."""
    steps = (row for row in rows if row.step == "install" and row.verdict == "not run")
    return next((row.text for row in steps if not row.facts), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The whole answer. result: `not run` if nothing failed and nothing could be run. python: the
    CPython that the wheelhouse is for, X.Y. machine: None if no program of the target was run.
    unproved: what a target's own machine may still show."""

    schema_version: Literal[1]
    result: Literal["pass", "fail", "not run"]
    stack: str
    target: str
    profile: str
    python: str
    complete: bool
    machine: Machine | None
    rows: tuple[Row, ...]
    unproved: tuple[str, ...]
    seconds: float

    @property
    def faults(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == "fail")

    @property
    def no_environment(self) -> str:
        """As why_no_environment, of these rows."""
        return why_no_environment(self.rows)


def to_json(report: Report) -> str:
    """The report as JSON text, per target.schema.json."""
    return report_text(report)


def schema_text() -> str:
    """The JSON schema (2020-12) of a report."""
    return schema_text_of(Report)
