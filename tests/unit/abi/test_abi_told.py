"""What the importer told, among what modules print."""

import json

import pytest

from sm121.abi.importer import MARK
from sm121.abi.told import read_told


def line(*fields):
    return MARK + json.dumps(fields)


def read(*lines):
    return read_told("\n".join(lines))


def test_verdicts_and_where_it_ended():
    told, current = read(
        "torch says", line("a", "begin", ""), "x", line("a", "pass", "how"),
        line("b", "begin", ""), line("b", "fail", "why"), line("c", "begin", ""), "Aborted",
    )  # fmt: skip
    assert told == {"a": ("pass", "how"), "b": ("fail", "why")}
    assert current == "c"


@pytest.mark.parametrize(
    "foreign",
    [
        MARK + "no JSON", MARK, MARK + "{}", MARK + "1", MARK + '"abc"', MARK + '["a", "pass"]',
        line("b", "pass", ""), line("b", "begin", ""), line("a", "other", ""),
    ],
)  # fmt: skip
def test_a_line_of_another_is_a_failure_of_the_module(foreign):
    told, current = read(
        line("a", "begin", ""), foreign, line("a", "pass", ""),
        line("b", "begin", ""), line("b", "pass", ""),
    )  # fmt: skip
    assert told["a"][0] == "fail"
    assert foreign in told["a"][1]
    assert told["b"] == ("pass", "")
    assert current == ""


def test_when_nothing_is_imported_it_is_nobodys():
    told, current = read(line("a", "begin", ""), line("a", "pass", ""), MARK + "no JSON")
    assert told == {"a": ("pass", "")}
    assert current == ""
