"""The table that is pasted, the published schema, and what becomes of a step."""

from __future__ import annotations

import json

import jsonschema
import pytest

from sm121.acceptance.model import (
    SCHEMA_FILE,
    Acceptance,
    NotRun,
    Result,
    StepFailed,
    schema_text,
    table,
    to_json,
)
from sm121.acceptance.places import PAYLOAD
from sm121.commands.acceptance import run_step
from sm121.errors import ToolFailed


def acceptance(*results: Result) -> Acceptance:
    return Acceptance(
        schema_version=1, stack="0.26.0", commit="c" * 40, date="2026-11-30", results=results
    )


def test_committed_schema_is_the_models() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()


def test_a_run_is_valid_by_the_published_schema() -> None:
    data = json.loads(to_json(acceptance(run_step("x", "a", lambda: "1"))))
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.validate(data, schema)
    data["results"][0]["verdict"] = "perhaps"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


def test_what_becomes_of_a_step() -> None:
    def missing() -> str:
        raise NotRun("no GPU")

    def wrong() -> str:
        raise StepFailed("a sum is wrong")

    got = [run_step("x", "a", step) for step in (lambda: "12 GB/s", missing, wrong)]
    assert [(r.verdict, r.figures) for r in got] == [
        ("pass", "12 GB/s"), ("not run", "no GPU"), ("fail", "a sum is wrong"),
    ]  # fmt: skip
    assert acceptance(*got).count("fail") == 1


@pytest.mark.parametrize(
    ("error", "figures"),
    [
        (ToolFailed("git failed.", returncode=1, cause="a lock"), "git failed. a lock"),
        (json.JSONDecodeError("Expecting value", "{'", 1), "JSONDecodeError: Expecting value"),
        (IndexError("list index out of range"), "IndexError: list index out of range"),
        (PermissionError(13, "Permission denied"), "PermissionError: [Errno 13] Permission denied"),
    ],
)
def test_what_a_node_does_wrong_ends_no_run(error: Exception, figures: str) -> None:
    def step() -> str:
        raise error

    result = run_step("x", "a", step)
    assert result.verdict == "fail"
    assert result.figures.startswith(figures)


def test_a_fault_of_ours_is_no_result() -> None:
    with pytest.raises(ZeroDivisionError):
        run_step("x", "a", lambda: str(1 / 0))


def test_rows_stay_rows() -> None:
    rows = table(
        acceptance(
            Result(step="`x`", where="a", verdict="fail", figures="a | b\nc", seconds=1.0),
            Result(step="y", where="b", verdict="not run", figures="", seconds=1.0),
        )
    ).splitlines()
    assert rows[2:] == ["| `x` | a | **fail**: a / b c |", "| y | b | **not run** |"]


@pytest.mark.parametrize("name", ["allreduce.py", "extensions.py"])
def test_payloads_are_python(name: str) -> None:
    compile((PAYLOAD / name).read_text(), name, "exec")
