"""Fingerprints, the reasons for running again, and a state file that can't be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm121.state import Record, State, fingerprint, why_changed


def record(**inputs: str) -> Record:
    return Record(fingerprint="f", inputs=inputs, result={"a": [1]}, log="l", seconds=1.5)


@given(st.dictionaries(st.text(), st.text(), min_size=2))
def test_fingerprint_does_not_depend_on_order(inputs: dict[str, str]) -> None:
    assert fingerprint(inputs) == fingerprint(dict(reversed(inputs.items())))


@given(st.dictionaries(st.text(), st.text()), st.dictionaries(st.text(), st.text()))
def test_other_inputs_have_another_fingerprint(one: dict[str, str], two: dict[str, str]) -> None:
    assert (fingerprint(one) == fingerprint(two)) == (one == two)


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ({"patch a": "1"}, {"patch a": "2"}, "patch a changed"),
        ({}, {"patch a": "1"}, "patch a is new"),
        ({"patch a": "1"}, {}, "patch a is gone"),
        ({"b": "1", "c": "1"}, {"b": "2", "a": "1"}, "b changed, a is new, c is gone"),
        (
            dict.fromkeys("abcde", "1"),
            dict.fromkeys("abcde", "2"),
            "a changed, b changed, c changed and 2 more",
        ),
    ],
)
def test_why_changed_names_the_inputs(
    before: dict[str, str], now: dict[str, str], text: str
) -> None:
    assert why_changed(record(**before), now) == text


def test_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    state = State.load(tmp_path / "build/state.json")
    assert state.records == {}
    state.put("compile/x", record(a="1"))
    state.put("source/x", record(b="2"))
    again = State.load(tmp_path / "build/state.json")
    assert again.records == {"compile/x": record(a="1"), "source/x": record(b="2")}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b"7", b"\xff\xfe", b'{"schema": 1}', b'{"schema": 1, "stages": []}',
        b'{"schema": 1, "stages": {"a": {}}}', b'{"schema": 1, "stages": {"a": 3}}',
    ],
)  # fmt: skip
def test_damaged_state_makes_every_stage_run(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(content)
    assert State.load(file).records == {}


def test_state_of_another_schema_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    State(path=file).put("a", record())
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "schema": data["schema"] + 1}))
    assert State.load(file).records == {}
