"""What people see: units, tables, errors, progress on a terminal and off it."""

from __future__ import annotations

import io

import pytest

from sm121 import ui as ui_module
from sm121.errors import CheckFailed
from sm121.ui import Ui, human_bytes, human_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (419_700_000, "419.7 MB"),
        (3_560_000_000, "3.56 GB"), (1_500_000_000_000, "1500.00 GB"),
    ],
)  # fmt: skip
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (0.44, "0.4 s"), (52.3, "52 s"), (60, "1 min 00 s"),
        (185, "3 min 05 s"), (3599, "59 min 59 s"), (7800, "2 h 10 min"),
    ],
)  # fmt: skip
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_error_has_what_details_why_and_next_each_on_its_line(screen) -> None:
    screen.ui.error(CheckFailed("It broke.", cause="since", remedy="mend it", details=["a", "b"]))
    assert screen.text.splitlines() == [
        "error: It broke.", "    a", "    b", "  why:  since", "  next: mend it",
    ]  # fmt: skip
    assert screen.out.getvalue() == ""


def test_no_control_characters_off_a_terminal(screen) -> None:
    ui = screen.ui
    ui.stage("compile", "run", "first run")
    ui.note("a note")
    ui.table(("one", "two"), [("x", "y")])
    with ui.progress("fetch") as progress:
        progress.update("1 of 2")
        progress.update("2 of 2", final=True)
    ui.error(CheckFailed("bad"))
    assert "\x1b" not in screen.text
    assert "\r" not in screen.text


def test_table_aligns_its_columns(screen) -> None:
    screen.ui.table(("wheel", "size"), [("a-long-name", "1 MB"), ("b", "22 MB")])
    lines = screen.text.splitlines()
    assert [line.index(s) for line, s in zip(lines, ("size", "1 MB", "22 MB"), strict=True)] == [
        lines[0].index("size")
    ] * 3


def test_progress_off_a_terminal_is_sparse_and_keeps_the_last(
    screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(ui_module.time, "monotonic", lambda: now)
    with screen.ui.progress("compile") as progress:
        for step in range(100):
            now += 0.1
            progress.update(f"{step}/100")
        progress.update("100/100", final=True)
    lines = screen.text.splitlines()
    assert 3 <= len(lines) <= 4
    assert lines[-1].split() == ["compile", "100/100"]


def test_progress_on_a_terminal_is_one_line_that_is_gone_before_the_next() -> None:
    err = Terminal()
    ui = Ui(out=io.StringIO(), err=err)
    with ui.progress("compile") as progress:
        progress.update("1/2")
        ui.note("meanwhile")
        progress.update("2/2", final=True)
    text = err.getvalue()
    assert text.count("\n") == 1
    assert "\r\x1b[K" + "  \x1b[33mnote:" in text
    assert text.endswith("\r\x1b[K")


def test_quiet_keeps_notes_and_errors() -> None:
    err = io.StringIO()
    ui = Ui(out=io.StringIO(), err=err, quiet=True)
    ui.say("chatter")
    ui.note("a fallback")
    ui.error(CheckFailed("bad"))
    assert err.getvalue().splitlines() == ["  note: a fallback", "error: bad"]


def test_results_go_to_standard_output_only(screen) -> None:
    screen.ui.result("value")
    assert (screen.out.getvalue(), screen.text) == ("value\n", "")
