"""Steps and their results, as data. Published as acceptance.schema.json; tested to be equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm121.published import report_text, schema_text_of

SCHEMA_FILE = Path(__file__).with_name("acceptance.schema.json")

Verdict = Literal["pass", "fail", "not run"]


class NotRun(Exception):
    """A step can't be run here; the text says what is missing."""


class StepFailed(Exception):
    """A step was run, and what it was to show does not hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One step. figures: what was seen, for a table; the reason where it was not run or failed."""

    step: str
    where: str
    verdict: Verdict
    figures: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """The whole run. commit: of this checkout, '' if it is none of git's."""

    schema_version: Literal[1]
    stack: str
    commit: str
    date: str
    results: tuple[Result, ...]

    def count(self, verdict: Verdict) -> int:
        return sum(result.verdict == verdict for result in self.results)


def to_json(acceptance: Acceptance) -> str:
    """As JSON text, per acceptance.schema.json."""
    return report_text(acceptance)


def schema_text() -> str:
    """The JSON schema (2020-12) of a run."""
    return schema_text_of(Acceptance)


def table(acceptance: Acceptance) -> str:
    """Rows in Markdown, as README's status table has them: what, where, result."""
    lines = ["| what | where | result |", "|---|---|---|"]
    for one in acceptance.results:
        text = f"**{one.verdict}**" + (f": {one.figures}" if one.figures else "")
        # A cell ends at a bar, and a row at a line's end.
        cells = (one.step, one.where, text)
        lines.append("| " + " | ".join(" ".join(c.replace("|", "/").split()) for c in cells) + " |")
    return "\n".join(lines) + "\n"
