"""The series file, and what a patch's message must say."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sm121.errors import PatchFailed
from sm121.patches.apply import failing_hunks
from sm121.patches.lint import header_faults
from sm121.patches.series import load_series
from support.gits import BODY


def series(folder: Path, listing: str | None, *files: str) -> Path:
    for name in files:
        (folder / name).write_text(name)
    if listing is not None:
        (folder / "series").write_text(listing)
    return folder


def faults(folder: Path) -> tuple[str, ...]:
    with pytest.raises(PatchFailed) as raised:
        load_series(folder)
    assert raised.value.remedy
    return raised.value.details


def test_order_is_the_series_and_not_the_alphabet(tmp_path: Path) -> None:
    folder = series(
        tmp_path, "# why\nz-last.patch  # comment\n\n  a-b2.patch\n", "a-b2.patch", "z-last.patch"
    )
    loaded = load_series(folder)
    assert [p.name for p in loaded] == ["z-last", "a-b2"]
    assert loaded[0].path == folder / "z-last.patch"
    assert loaded[0].sha256 == hashlib.sha256(b"z-last.patch").hexdigest()


def test_series_may_be_empty(tmp_path: Path) -> None:
    assert load_series(series(tmp_path, "# nothing yet\n")) == []


def test_missing_series_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(PatchFailed, match="series does not exist"):
        load_series(tmp_path)


@pytest.mark.parametrize(
    ("listing", "files", "expected"),
    [
        ("a.patch\n", [], "a.patch: listed, but there is no such file"),
        (
            "shape-dispach.patch\n",
            ["shape-dispatch.patch"],
            "shape-dispach.patch: listed, but there is no such file (is it shape-dispatch.patch?)",
        ),
        ("", ["left.patch"], "left.patch: not listed in series"),
        ("a.patch\na.patch\n", ["a.patch"], "a.patch: listed twice"),
        ("0001-a.patch\n", ["0001-a.patch"], "0001-a.patch: names are lower-case words"),
        ("Big.patch\n", ["Big.patch"], "Big.patch: names are lower-case words"),
    ],
)
def test_series_and_files_must_agree(
    tmp_path: Path, listing: str, files: list[str], expected: str
) -> None:
    assert any(f.startswith(expected) for f in faults(series(tmp_path, listing, *files)))


def test_all_faults_of_a_series_are_told_at_once(tmp_path: Path) -> None:
    folder = series(tmp_path, "gone.patch\na.patch\na.patch\n", "a.patch", "left.patch")
    assert len(faults(folder)) == 3


def test_the_real_series_load(root: Path) -> None:
    folders = [p.parent for p in (root / "patches").glob("*/*/series")]
    assert folders
    for folder in folders:
        assert load_series(folder)


# --- messages -----------------------------------------------------------------------


def test_a_good_message_has_no_fault() -> None:
    assert header_faults("[Bugfix] Repair it", BODY) == []


@pytest.mark.parametrize(
    "status",
    [
        "Pending", "Pending [soon]", "Submitted [https://example.invalid/1]",
        "Backport [https://example.invalid/2]", "Inappropriate [pins of one stack]",
    ],
)  # fmt: skip
def test_known_upstream_states(status: str) -> None:
    body = BODY.replace("Upstream-Status: Pending", f"Upstream-Status: {status}")
    assert header_faults("Subject", body) == []


@pytest.mark.parametrize(
    ("subject", "old", "new", "fault"),
    [
        ("", "", "", "no subject"),
        ("x" * 101, "", "", "longer than 100"),
        ("S", "Upstream-Status: Pending\n", "", "0 Upstream-Status trailers"),
        ("S", "Fix:", "Upstream-Status: Pending\nFix:", "2 Upstream-Status trailers"),
        ("S", "Status: Pending", "Status: Maybe", "'Maybe'"),
        ("S", "Status: Pending", "Status: Submitted", "Submitted needs a link"),
        ("S", "Status: Pending", "Status: Backport", "Backport needs a link"),
        ("S", "Status: Pending", "Status: Inappropriate", "Inappropriate needs a link"),
        ("S", "Signed-off-by: ", "Signed: ", "no Signed-off-by"),
    ],
)
def test_each_fault_of_a_message_is_named(subject: str, old: str, new: str, fault: str) -> None:
    body = BODY.replace(old, new, 1) if old else BODY
    (found,) = header_faults(subject, body)
    assert fault in found


def test_a_message_without_reasons_is_a_fault() -> None:
    body = "Upstream-Status: Pending\nSigned-off-by: A <a@b>\n"
    (fault,) = header_faults("S", body)
    assert "symptom, cause, fix" in fault


# --- hunks --------------------------------------------------------------------------


def test_failing_hunks_keep_the_searched_lines_and_drop_chatter() -> None:
    output = [
        "Checking patch a.txt...",
        "error: while searching for:",
        "one",
        "two",
        "error: patch failed: a.txt:10",
        "Checking patch b.txt...",
        "Hunk #1 succeeded at 3 (offset 1 line).",
        "error: b.txt: does not exist in index",
    ]
    assert failing_hunks(output) == [
        "the tree has no longer these lines:",
        "  | one",
        "  | two",
        "patch failed: a.txt:10",
        "b.txt: does not exist in index",
    ]
