"""A rebase from start to acceptance: stops, resolutions, skips, aborts, and what is written."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from sm121.pins.load import load_stack
from sm121.rebase.report import SCHEMA_FILE, VERDICTS, schema_text
from support.rebasing import lines, sha256
from support.servers import serve_index

THEIRS = {"a.txt": lines(l10="upstream's way")}
RESOLVED = lines(l10="upstream's way, and ours")


@pytest.fixture
def index(desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose sdists are the index; put files there with `project.pack`."""
    folder = tmp_path / "index"
    folder.mkdir()
    with serve_index(folder) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
        yield folder


@pytest.fixture
def stopped(desk):
    """A rebase that waits at the second of three patches."""
    desk.project.patch("first", {"b.txt": lines(l10="ours")})
    desk.project.patch("second", {"a.txt": lines(l10="ours")})
    desk.project.patch("third", {"c.txt": lines(l10="ours")})
    (desk.project.root / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n- A thing.\n\n## 1.0\n\n- Old.\n"
    )
    desk.project.release("1.3.0", THEIRS)
    before = desk.project.data()
    said = desk.rebase("--onto", "v1.3.0", code=1)
    assert "Stopped at second: superseded." in said
    assert desk.project.data() == before
    return desk


def resolve(desk, text: str = RESOLVED) -> None:
    desk.project.tree.write({"a.txt": text})
    desk.project.tree.git("add", "a.txt")


def test_stop_leaves_a_worktree_with_markers_and_the_table_of_all_patches(stopped) -> None:
    tree = stopped.project.tree
    assert tree.git("status", "--porcelain") == "UU a.txt"
    text = (tree.path / "a.txt").read_text()
    assert (
        "<<<<<<< upstream\nupstream's way\n||||||| before\nline 10\n=======\nours\n>>>>>>> patch\n"
        in text
    )
    assert (tree.path / "b.txt").read_text() == lines(l10="ours")
    said = stopped.rebase(code=1)
    rows = [line.split() for line in said.splitlines()]
    assert ["third", "clean", "1", "-"] in rows


def test_resolved_continued_and_accepted_is_a_second_stack(stopped, index: Path) -> None:
    resolve(stopped)
    archive = stopped.project.pack(index, tag="v1.3.0")
    before = stopped.project.data()
    said = stopped.rebase("--continue")
    assert "nothing is written yet" in said
    assert '+version = "1.3.0"' in said
    assert "2:  " in said  # range-diff
    assert stopped.project.data() == before
    said = stopped.rebase("--accept")
    root, after = stopped.project.root, stopped.project.data()
    assert {k: v for k, v in after.items() if k in before and k != "CHANGELOG.md"} == {
        k: v for k, v in before.items() if k != "CHANGELOG.md"
    }
    new = root / "patches/vllm/1.3.0"
    assert (new / "series").read_text() == "# The order.\nfirst.patch\nsecond.patch\nthird.patch\n"
    assert "+upstream's way, and ours" in (new / "second.patch").read_text()
    pin = load_stack(root / "pins", "1.3.0").vllm
    assert (pin.version, pin.tag, pin.sdist_sha256) == ("1.3.0", "v1.3.0", sha256(archive))
    assert pin.commit == stopped.project.upstream.git("rev-parse", "v1.3.0")
    assert (
        "- The series of 1.2.3 carried to vLLM 1.3.0 (`patches/vllm/1.3.0`).\n\n## 1.0"
        in (root / "CHANGELOG.md").read_text()
    )
    assert not stopped.project.tree.path.exists()
    stopped.lint("--stack", "1.3.0")
    assert "nox -s lock -- --stack 1.3.0" in said


def test_dropped_patches_are_recorded_with_reason_and_release(desk, index: Path) -> None:
    desk.project.patch("theirs", {"a.txt": lines(l10="ours")})
    desk.project.patch("unwanted", {"b.txt": lines(l10="ours")})
    desk.project.patch("kept", {"c.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": lines(l10="ours"), "b.txt": lines(l10="new")})
    desk.project.pack(index, tag="v1.3.0")
    said = desk.rebase(
        "--onto",
        "v1.3.0",
        "--skip",
        "unwanted",
        "--why",
        "solved | by\n 1.3.0's rewrite",
        "--accept",
    )
    root = desk.project.root
    assert [p.name for p in sorted((root / "patches/vllm/1.3.0").iterdir())] == [
        "CHANGES.md", "kept.patch", "series",
    ]  # fmt: skip
    record = (root / "patches/vllm/1.3.0/CHANGES.md").read_text()
    assert "| `theirs` | upstreamed | upstreamed | 1 upstreamed | all 1 hunk(s) are there" in record
    assert "| skipped | 1 superseded | solved \\| by 1.3.0's rewrite |" in record
    assert (
        "Dropped there: `theirs` (upstream has it in 1.3.0), `unwanted` (solved | by 1.3.0's rewrite)."
        in (root / "CHANGELOG.md").read_text()
    )
    assert "unwanted" in said


# --- what is not finished is not taken ----------------------------------------------


def test_continue_before_the_conflict_is_resolved_names_the_file(stopped) -> None:
    assert "a.txt" in stopped.rebase("--continue", code=1)
    stopped.project.tree.write({"a.txt": RESOLVED})
    assert "still in conflict" in stopped.rebase("--continue", code=1)


def test_markers_left_in_an_added_file_are_refused(stopped) -> None:
    stopped.project.tree.git("add", "a.txt")
    said = stopped.rebase("--continue", code=1)
    assert "Conflict markers are left" in said


def test_edit_after_add_and_new_file_are_not_lost(stopped) -> None:
    resolve(stopped)
    stopped.project.tree.write({"a.txt": RESOLVED + "more\n", "new.txt": "x\n"})
    said = stopped.rebase("--continue", code=1)
    assert "2 file(s) were edited and not added" in said
    assert "new.txt" in said
    assert (stopped.project.tree.path / "a.txt").read_text() == RESOLVED + "more\n"


def test_resolution_that_leaves_nothing_wants_a_skip_with_a_reason(stopped) -> None:
    resolve(stopped, THEIRS["a.txt"])
    said = stopped.rebase("--continue", code=1)
    assert "nothing is left of it" in said
    assert "--skip second" in said
    assert "needs a --why" in stopped.rebase("--skip", "second", code=2)
    assert "needs a --why" in stopped.rebase("--skip", "second", "--why", "  ", code=2)
    said = stopped.rebase("--skip", "second", "--why", "upstream does it")
    assert "upstream does it" in said


def test_broken_python_is_refused(desk) -> None:
    desk.project.patch("one", {"vllm/other.py": "x = 2\n"})
    desk.project.release("1.3.0", {"vllm/other.py": "x = 3\n"})
    desk.rebase("--onto", "v1.3.0", code=1)
    desk.project.tree.write({"vllm/other.py": "x = (\n"})
    desk.project.tree.git("add", ".")
    assert "vllm/other.py:1" in desk.rebase("--continue", code=1)


def test_person_who_commits_is_understood(stopped) -> None:
    resolve(stopped)
    stopped.project.tree.git("commit", "-q", "-m", "Resolve")
    assert "nothing is written yet" in stopped.rebase("--continue")


def test_person_who_wanders_off_is_told(stopped) -> None:
    stopped.project.tree.git("reset", "-q", "--hard", "HEAD~1")
    assert "on another commit" in stopped.rebase("--continue", code=1)


def test_worktree_that_was_deleted_is_made_again(stopped) -> None:
    stopped.project.tree.git("worktree", "remove", "--force", ".")
    assert "Stopped at second" in stopped.rebase("--continue", code=1)
    assert stopped.project.tree.git("status", "--porcelain") == "UU a.txt"


def test_series_that_changes_meanwhile_is_noticed(stopped) -> None:
    resolve(stopped)
    path = stopped.project.folder / "third.patch"
    path.write_text(path.read_text().replace("+ours", "+other"))
    assert "was changed since" in stopped.rebase("--continue", code=1)
    assert "is ended" in stopped.rebase("--abort")


def test_abort_leaves_everything_as_before(stopped) -> None:
    before = stopped.project.data()
    resolve(stopped)
    stopped.rebase("--abort")
    assert stopped.project.data() == before
    assert not stopped.project.tree.path.exists()
    assert "No rebase is under way" in stopped.rebase("--continue", code=2)
    assert "No rebase is under way" in stopped.rebase("--abort", code=2)


def test_damaged_session_can_be_aborted(stopped) -> None:
    (stopped.project.root / "build/rebase/session.json").write_text('{"schema": 9}')
    assert "--abort" in stopped.rebase("--continue", code=2)
    assert "is ended" in stopped.rebase("--abort")


def test_second_start_does_not_destroy_the_first(stopped) -> None:
    resolve(stopped)
    assert "under way already" in stopped.rebase("--onto", "v1.3.0", code=2)
    assert (stopped.project.tree.path / "a.txt").read_text() == RESOLVED


WRONG = [
    (["--skip", "nobody", "--why", "x"], "no patch 'nobody'"),
    (["--skip", "first", "--why", "x"], "decided already"),
    (["--why", "x"], "each --why a --skip"),
    (["--continue", "--abort"], "two different things"),
    (["--continue", "--onto", "v1.3.0"], "two different things"),
    (["--abort", "--skip", "second", "--why", "x"], "leave --abort out"),
    (["--onto", "v1.3.0", "--onto", "v1.2.3"], "several --onto"),
    (["--commit", "0" * 40], "belongs to --accept"),
    (["--check", "--accept"], "use one of them"),
    (["--onto", "--upload-pack=x"], "expected one argument"),
    (["--onto=--upload-pack=x"], "not a release, tag, branch or commit"),
    (["--check", "--onto=--upload-pack=x"], "not a release, tag, branch or commit"),
    (["--check", "--onto", "no-such-branch"], "has no ref no-such-branch"),
    (["--check", "--onto", "1.2.3"], "is for 1.2.3 already"),
]


def test_wrong_usage_changes_nothing(stopped) -> None:
    session = stopped.project.root / "build/rebase/session.json"
    before = session.read_bytes()
    for argv, word in WRONG:
        assert word in stopped.rebase(*argv, code=2), argv
        assert session.read_bytes() == before


def test_later_patch_can_be_skipped_while_an_earlier_one_waits(stopped) -> None:
    said = stopped.rebase("--skip", "third", "--why", "not needed", code=1)
    assert "Stopped at second" in said
    resolve(stopped)
    assert "not needed" in stopped.rebase("--continue")


# --- resolutions are remembered -----------------------------------------------------


def test_resolution_is_remembered_after_an_abort_and_shared_after_acceptance(
    stopped, index: Path
) -> None:
    resolve(stopped, RESOLVED.replace("line 40", "edited outside the markers"))
    stopped.rebase("--continue")
    stopped.rebase("--abort")
    said = stopped.rebase("--check", "--onto", "v1.3.0")
    assert "superseded (r)" in said
    stopped.project.pack(index, tag="v1.3.0")
    said = stopped.rebase("--onto", "v1.3.0", "--accept")
    assert "remembered" in said
    root = stopped.project.root
    (shared,) = (root / "patches/vllm/rerere").iterdir()
    assert shared.read_text().startswith("second, a.txt, onto vLLM v1.3.0\n")
    assert "edited outside" in (root / "patches/vllm/1.3.0/second.patch").read_text()
    # Another machine: nothing but the project's own files.
    shutil.rmtree(root / "build")
    stopped.project.release("1.4.0", {"c.txt": lines(l40="x")})
    said = stopped.rebase("--check", "--onto", "v1.4.0")
    assert "superseded (r)" in said


def test_other_conflict_is_not_taken_for_the_remembered_one(stopped) -> None:
    resolve(stopped)
    stopped.rebase("--continue")
    stopped.rebase("--abort")
    stopped.project.release("1.4.0", {"a.txt": lines(l10="upstream's third way")})
    assert stopped.verdicts("--onto", "v1.4.0", code=1)["second"] == "superseded"
    assert "(r)" not in stopped.rebase("--check", "--onto", "v1.4.0", code=1)


# --- acceptance is careful ----------------------------------------------------------


def test_release_that_has_a_stack_already_is_not_overwritten(stopped, index: Path) -> None:
    stopped.project.pack(index, tag="v1.3.0")
    resolve(stopped)
    mine = stopped.project.root / "patches/vllm/1.3.0"
    mine.mkdir()
    (mine / "mine").write_text("x")
    assert "exists already" in stopped.rebase("--continue", "--accept", code=2)
    assert [p.name for p in mine.iterdir()] == ["mine"]


def test_branch_can_be_carried_onto_but_not_accepted(stopped) -> None:
    stopped.rebase("--abort")
    stopped.project.upstream.git("reset", "-q", "--hard", "v1.2.3")
    stopped.project.upstream.commit({"c.txt": lines(l40="x")})
    assert "nothing is written yet" in stopped.rebase("--onto", "main")
    before = stopped.project.data()
    assert "is no release" in stopped.rebase("--accept", code=2)
    assert stopped.project.data() == before


def test_unreachable_index_keeps_the_finished_rebase(stopped, monkeypatch) -> None:
    resolve(stopped)
    stopped.rebase("--continue")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    assert "no sdist of vLLM 1.3.0, or can't be asked" in stopped.rebase("--accept", code=2)
    assert "nothing is written yet" in stopped.rebase("--continue")


# --- json ---------------------------------------------------------------------------


def test_schema_is_the_published_one() -> None:
    assert SCHEMA_FILE.read_text() == schema_text()


def test_json_fits_the_schema_in_every_state(stopped, index: Path) -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    stopped.project.pack(index, tag="v1.3.0")
    reports = [stopped.report(code=1), stopped.report("--check", "--onto", "v1.3.0", code=1)]
    resolve(stopped)
    reports += [stopped.report("--continue"), stopped.report("--accept")]
    for report in reports:
        jsonschema.validate(report, schema)
        assert {p["verdict"] for row in report["onto"] for p in row["patches"]} <= set(VERDICTS)
    assert [r["state"] for r in reports] == ["stopped", "checked", "finished", "accepted"]
    assert reports[0]["stopped_at"] == "second"
    assert "1:" in reports[2]["range_diff"]
    assert "sdist-sha256" in reports[3]["proposal"]
    assert tomllib.loads((stopped.project.root / "pins/1.3.0/stack.toml").read_text())
