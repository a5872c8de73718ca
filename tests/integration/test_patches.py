"""The series on real git repositories: stable, whole, and clear when it does not fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm121.errors import NetworkFault, PatchFailed
from sm121.gitrepo import Repository
from sm121.patches.apply import AppliedSeries, apply_series
from sm121.patches.lint import lint_series
from sm121.patches.series import load_series
from sm121.patches.style import check_style
from support.gits import BODY, Work

TEXT = "".join(f"line {n}\n" for n in range(1, 61))


def changed(number: int, to: str = "CHANGED") -> str:
    return TEXT.replace(f"line {number}\n", f"{to}\n")


@dataclass
class Bench:
    """An upstream to make patches in, a series, and the pipeline's repository."""

    upstream: Work
    folder: Path
    repository: Repository

    def patch(self, name: str, files, *options: str, keep: bool = False, **how) -> Path:
        """Make a patch against upstream's HEAD and append it to the series."""
        path = self.upstream.make_patch(
            self.folder / f"{name}.patch", files, *options, keep=keep, **how
        )
        self.enlist(name)
        return path

    def enlist(self, name: str) -> None:
        with (self.folder / "series").open("a") as series:
            series.write(f"{name}.patch\n")

    def base(self) -> str:
        return self.repository.fetch_commit(self.upstream.url, ref="main", timeout_s=60)

    def apply(self) -> AppliedSeries:
        return apply_series(self.repository, self.base(), load_series(self.folder))

    def failure(self) -> PatchFailed:
        with pytest.raises(PatchFailed) as raised:
            self.apply()
        assert raised.value.exit_code == 1
        return raised.value

    def lint(self) -> list[str]:
        return lint_series(self.repository, load_series(self.folder), self.apply())


@pytest.fixture
def bench(tmp_path: Path, repository: Repository) -> Bench:
    upstream = Work.init(tmp_path / "upstream")
    upstream.commit({"a.txt": TEXT, "b.txt": TEXT, "code.py": "x = 1\ny = 2\nz = 3\n"})
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "series").write_text("")
    return Bench(upstream, folder, repository)


# --- what applies -------------------------------------------------------------------


def test_patches_become_commits_with_their_own_author_and_ours_as_committer(
    bench: Bench, tmp_path: Path
) -> None:
    bench.patch("first", {"a.txt": changed(10)}, subject="[Bugfix] Change ten")
    bench.patch("second", {"b.txt": changed(20)})
    applied = bench.apply()
    assert [p.status for p in applied.patches] == ["applied", "applied"]
    assert [p.name for p in applied.patches] == ["first", "second"]
    assert applied.patches[0].subject == "[Bugfix] Change ten"
    assert applied.patches[0].upstream_status == "Pending"
    assert applied.commit == applied.patches[1].commit
    assert bench.repository.read(applied.commit, "a.txt") == changed(10)
    assert bench.repository.read(applied.commit, "b.txt") == changed(20)
    assert bench.repository.read(applied.patches[0].commit, "b.txt") == TEXT
    raw = str(bench.repository._git.cat_file("commit", applied.patches[0].commit))
    assert f"parent {applied.base}" in raw
    assert "author Ada Upstream <ada@example.invalid> 1767323045 +0000" in raw
    assert "committer sm121 <sm121@localhost> 1767323045 +0000" in raw
    assert "[Bugfix] Change ten\n\nSymptom: it breaks." in raw


def test_same_series_has_the_same_ids_twice_and_elsewhere(bench: Bench, tmp_path: Path) -> None:
    bench.patch("first", {"a.txt": changed(10)})
    bench.patch("second", {"b.txt": changed(20)})
    first, again = bench.apply(), bench.apply()
    other = Repository(tmp_path / "elsewhere/own.git")
    bench.repository = other
    elsewhere = bench.apply()
    other.close()
    assert first == again == elsewhere


def test_offset_is_applied_and_reported(bench: Bench) -> None:
    bench.patch("moved", {"a.txt": changed(50)})
    bench.upstream.commit({"a.txt": "new 1\nnew 2\nnew 3\n" + TEXT})
    (patch,) = bench.apply().patches
    assert (patch.status, patch.offset) == ("applied", 3)
    with pytest.raises(PatchFailed) as raised:
        bench.lint()
    assert "moved.patch: applies only 3 lines off; export it again" in raised.value.details


def test_fuzz_is_not_allowed(bench: Bench) -> None:
    """A changed context line: patch(1) would apply it all the same."""
    bench.patch("strict", {"a.txt": changed(10)})
    bench.upstream.commit({"a.txt": changed(8, "other context")})
    assert "a.txt" in "\n".join(bench.failure().details)


CONTENT = bytes(range(256)) * 8


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"bin": CONTENT}, {"bin": CONTENT[::-1]}),
        ({}, {"new/bin": CONTENT}),
        ({"crlf.txt": "one\r\ntwo\r\nthree\r\n"}, {"crlf.txt": "one\r\nTWO\r\nthree\r\n"}),
        ({"mixed.txt": "one\r\ntwo\nthree\r\n"}, {"mixed.txt": "one\r\ntwo\n3\n"}),
        ({"nn": "a\nb"}, {"nn": "a\nc"}),
        ({"nn": "a\nb"}, {"nn": "a\nb\n"}),
        ({"nn": "a\nb\n"}, {"nn": "a\nb"}),
        ({"latin1.txt": b"gr\xfc\xdfe\nx\n"}, {"latin1.txt": b"gr\xfc\xdfe!\nx\n"}),
        ({"gone.txt": "x\n"}, {"gone.txt": None}),
        ({}, {"empty": ""}),
        ({"trail": "a\n"}, {"trail": "a  \t\nb \n"}),
        ({"w ä.txt": "a\n"}, {"w ä.txt": "b\n"}),
    ],
    ids=[
        "binary", "new binary", "crlf", "mixed line ends", "no newline", "newline added",
        "newline removed", "latin-1", "removed", "empty", "trailing space", "odd name",
    ],
)  # fmt: skip
def test_every_kind_of_content_arrives_byte_for_byte(
    bench: Bench, tmp_path: Path, before, after
) -> None:
    bench.upstream.commit(before)
    bench.patch("kind", after)
    applied = bench.apply()
    bench.repository.export(applied.commit, tmp_path / "out")
    for name, content in after.items():
        file = tmp_path / "out" / name
        if content is None:
            assert not file.exists()
        else:
            assert file.read_bytes() == (content.encode() if isinstance(content, str) else content)


def test_rename_with_a_change_arrives(bench: Bench, tmp_path: Path) -> None:
    bench.upstream.git("mv", "a.txt", "renamed.txt")
    bench.patch("rename", {"renamed.txt": changed(3)}, "-M")
    assert "rename to renamed.txt" in (bench.folder / "rename.patch").read_text()
    applied = bench.apply()
    assert bench.repository.read(applied.commit, "a.txt") is None
    assert bench.repository.read(applied.commit, "renamed.txt") == changed(3)


def test_change_of_mode_and_a_link_arrive(bench: Bench, tmp_path: Path) -> None:
    (bench.upstream.path / "a.txt").chmod(0o755)
    (bench.upstream.path / "link").symlink_to("b.txt")
    bench.patch("mode", {})
    bench.repository.export(bench.apply().commit, tmp_path / "out")
    assert os.access(tmp_path / "out/a.txt", os.X_OK)
    assert (tmp_path / "out/link").readlink() == Path("b.txt")


def test_message_that_is_not_ascii_is_kept(bench: Bench) -> None:
    path = bench.patch(
        "umlaut", {"a.txt": changed(1)}, subject="[Doc] Größe – 大小", body=BODY + "Zoë\n"
    )
    assert b"=?UTF-8?" in path.read_bytes()
    (patch,) = bench.apply().patches
    assert patch.subject == "[Doc] Größe – 大小"
    assert "Zoë" in str(bench.repository._git.cat_file("commit", patch.commit))


def test_message_that_is_not_utf8_is_no_crash(bench: Bench) -> None:
    path = bench.patch("latin", {"a.txt": changed(1)}, subject="[Doc] Plain")
    data = path.read_bytes().replace(b"Symptom: it breaks.", b"Symptom: Gr\xf6\xdfe.")
    path.write_bytes(data)
    (patch,) = bench.apply().patches
    assert "Gr\ufffd\ufffde" in str(bench.repository._git.cat_file("commit", patch.commit))


def test_patch_id_is_of_the_change_and_not_of_the_place(bench: Bench) -> None:
    bench.patch("one", {"a.txt": changed(50)})
    ids = [bench.apply().patches[0].patch_id]
    bench.upstream.commit({"a.txt": "new\n" + TEXT})
    bench.upstream.make_patch(
        bench.folder / "one.patch", {"a.txt": "new\n" + changed(50)}, keep=False
    )
    ids.append(bench.apply().patches[0].patch_id)
    assert ids[0] == ids[1]
    assert len(ids[0]) == 40


def test_empty_series_is_the_base(bench: Bench) -> None:
    applied = bench.apply()
    assert (applied.commit, applied.patches) == (applied.base, ())


# --- what does not ------------------------------------------------------------------


def test_failing_hunk_names_file_line_searched_lines_and_the_next_command(bench: Bench) -> None:
    """cases.md 15: upstream moved a neighbouring line."""
    bench.patch("good", {"b.txt": changed(5)})
    bench.patch("broken", {"a.txt": changed(10)})
    bench.patch("later", {"b.txt": changed(40)})
    bench.upstream.commit({"a.txt": changed(11, "neighbour moved")})
    failure = bench.failure()
    details = "\n".join(failure.details)
    assert "1 patch(es)" in failure.what
    assert "nothing was built" in failure.what
    assert failure.details[0] == "broken.patch:"
    assert "patch failed: a.txt:7" in details
    for searched in ("  | line 10", "  | line 11", "  | line 13"):
        assert searched in details
    assert "these after it apply without it: later" in details
    assert str(bench.folder / "broken.patch") in failure.remedy
    assert "nox -s patch" in failure.remedy


def test_every_failing_patch_is_reported(bench: Bench) -> None:
    bench.patch("one", {"a.txt": changed(10)})
    bench.patch("two", {"b.txt": changed(20)})
    bench.upstream.commit({"a.txt": changed(11, "x"), "b.txt": changed(21, "y")})
    failure = bench.failure()
    assert "2 patch(es)" in failure.what
    assert {"one.patch:", "two.patch:"} <= set(failure.details)


def test_patch_that_needs_a_failed_one_is_not_called_good(bench: Bench) -> None:
    bench.patch("first", {"a.txt": changed(10)}, keep=True)
    bench.patch("needs-first", {"a.txt": changed(10).replace("CHANGED", "AGAIN")}, keep=True)
    bench.upstream.git("reset", "-q", "--hard", "HEAD~2")
    bench.upstream.commit({"a.txt": changed(11, "x")})
    failure = bench.failure()
    assert {"first.patch:", "needs-first.patch:"} <= set(failure.details)
    assert not any("apply without it" in line for line in failure.details)


def test_failure_leaves_no_commit_behind_that_could_be_taken_for_whole(bench: Bench) -> None:
    bench.patch("broken", {"a.txt": changed(10)})
    bench.upstream.commit({"a.txt": changed(11, "x")})
    bench.failure()
    assert bench.repository.commit_of("refs/sm121/patched/1.2.3") is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text.split("diff --git")[0],
        lambda text: text[: text.index("+CHANGED")],
        lambda text: text.replace(" line 9\n", " line nine\n"),
        lambda text: text.replace("a/a.txt", "a/none.txt").replace("b/a.txt", "b/none.txt"),
        lambda text: text.replace("a/a.txt", "a/../evil").replace("b/a.txt", "b/../evil"),
    ],
    ids=["empty", "no diff", "cut off", "edited by hand", "no such file", "outside"],
)
def test_spoilt_patch_is_a_failure_that_names_it(bench: Bench, spoil) -> None:
    path = bench.patch("spoilt", {"a.txt": changed(10)})
    path.write_text(spoil(path.read_text()))
    failure = bench.failure()
    assert "spoilt.patch" in "\n".join([failure.what, *failure.details])


@pytest.mark.parametrize("header", ["From", "Date"])
def test_patch_without_author_or_date_is_refused(bench: Bench, header: str) -> None:
    """Without a date git takes the time of day, and the ids change with every run."""
    path = bench.patch("nameless", {"a.txt": changed(10)})
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(f"{header}: ")))
    failure = bench.failure()
    assert "nameless.patch" in "\n".join([failure.what, *failure.details])


# --- what upstream has --------------------------------------------------------------


def test_upstreamed_first_and_valid_second(bench: Bench) -> None:
    """cases.md 16: the first one is reported, the second applied."""
    bench.patch("fixed-upstream", {"a.txt": changed(10)})
    bench.patch("still-ours", {"b.txt": changed(20)})
    bench.upstream.commit({"a.txt": changed(10)})
    applied = bench.apply()
    assert [(p.name, p.status) for p in applied.patches] == [
        ("fixed-upstream", "upstreamed"), ("still-ours", "applied"),
    ]  # fmt: skip
    assert applied.patches[0].commit == ""
    assert bench.repository.read(applied.commit, "b.txt") == changed(20)
    assert f"parent {applied.base}" in str(bench.repository._git.cat_file("commit", applied.commit))


def test_nothing_is_dropped_in_silence_as_git_am_3_does(bench: Bench, tmp_path: Path) -> None:
    """The same input given to `git am -3`: exit 0, no commit, no word on standard error."""
    path = bench.patch("fixed-upstream", {"a.txt": changed(10)})
    bench.upstream.commit({"a.txt": changed(10)})
    clone = Work(tmp_path / "clone")
    bench.upstream.git("clone", "-q", bench.upstream.path, clone.path)
    before = clone.git("rev-parse", "HEAD")
    clone.git("am", "-3", "-q", path)
    assert clone.git("rev-parse", "HEAD") == before
    (patch,) = bench.apply().patches
    assert (patch.name, patch.status, patch.subject) == (
        "fixed-upstream", "upstreamed", "[Test] Change something",
    )  # fmt: skip
    with pytest.raises(PatchFailed) as raised:
        bench.lint()
    assert (
        "fixed-upstream.patch: upstream has it; delete it from the series" in raised.value.details
    )


def test_half_upstreamed_is_a_failure_and_not_upstreamed(bench: Bench) -> None:
    bench.patch("half", {"a.txt": changed(10), "b.txt": changed(10)})
    bench.upstream.commit({"a.txt": changed(10)})
    assert bench.failure().details[0] == "half.patch:"


# --- lint ---------------------------------------------------------------------------

PASSED = [
    "1 patches: headers, order, no fuzz, no offset, no junk, upstream's folders only",
    "1 Python files parse",
]


def test_good_series_passes_and_says_what_was_checked(bench: Bench) -> None:
    bench.patch("good", {"code.py": "x = 1\ny = 5\nz = 3\n"})
    assert bench.lint() == PASSED


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"body": BODY.replace("Upstream-Status: Pending\n", "")}, "0 Upstream-Status trailers"),
        ({"body": BODY.replace("Signed-off-by", "Acked-by")}, "no Signed-off-by"),
        ({"subject": "x" * 120}, "longer than 100"),
        ({"body": "Upstream-Status: Pending\nSigned-off-by: A <a@b>\n"}, "symptom, cause, fix"),
    ],
)
def test_each_header_fault_is_told_with_the_patch(bench: Bench, how, fault: str) -> None:
    bench.patch("bad", {"code.py": "x = 1\ny = 5\nz = 3\n"}, **how)
    with pytest.raises(PatchFailed, match="1 fault") as raised:
        bench.lint()
    (line,) = raised.value.details
    assert line.startswith("bad.patch: ")
    assert fault in line


def faults(bench: Bench) -> tuple[str, ...]:
    with pytest.raises(PatchFailed) as raised:
        bench.lint()
    return raised.value.details


def test_signature_after_the_diff_is_a_fault(bench: Bench) -> None:
    path = bench.patch("signed", {"code.py": "x = 1\ny = 5\nz = 3\n"}, "--signature=2.39.5")
    line = path.read_text().splitlines().index("-- ") + 1
    assert faults(bench) == (
        f"signed.patch:{line}: no part of the diff (a signature? --no-signature)",
    )


@pytest.mark.parametrize("where", ["between", "end"])
def test_words_that_git_skips_are_a_fault(bench: Bench, where: str) -> None:
    """Whatever stands behind or between diffs, git applies the rest without a word."""
    path = bench.patch("talkative", {"a.txt": changed(10), "b.txt": changed(10)})
    text = path.read_text()
    cut = text.rindex("diff --git ") if where == "between" else len(text)
    path.write_text(f"{text[:cut]}On Monday somebody wrote:\n{text[cut:]}")
    assert [p.status for p in bench.apply().patches] == ["applied"]
    line = text[:cut].count("\n") + 1
    assert faults(bench) == (
        f"talkative.patch:{line}: no part of the diff (a signature? --no-signature)",
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"bin": CONTENT}, {"bin": CONTENT[::-1]}),
        ({"nn.txt": "a\nb"}, {"nn.txt": "a\nc"}),
        ({"gone.txt": "x\n"}, {"gone.txt": None}),
        ({}, {"empty": ""}),
        ({"cr.txt": "one\r\ntwo\rthree\n\n-- \n"}, {"cr.txt": "one\r\n2\rthree\n\n-- \n"}),
    ],
    ids=["binary", "no newline", "deleted", "empty", "lone carriage return"],
)
def test_no_kind_of_diff_is_taken_for_junk(bench: Bench, before, after) -> None:
    bench.upstream.commit(before)
    bench.patch("any", after)
    assert not [x for x in lint_faults(bench) if "no part of the diff" in x]


def lint_faults(bench: Bench) -> tuple[str, ...]:
    try:
        bench.lint()
    except PatchFailed as error:
        return error.details
    return ()


@pytest.mark.parametrize(
    ("content", "line", "fault"),
    [
        ("x = 1 \ny = 2\nz = 3\n", 1, "trailing whitespace."),
        ("x = 1\ny = 2\nz = 3\n\n\n", 4, "new blank line at EOF."),
        ("x = 1\n<<<<<<< ours\ny = 2\nz = 3\n", 2, "leftover conflict marker"),
    ],
)
def test_untidy_lines_are_a_fault(bench: Bench, content: str, line: int, fault: str) -> None:
    bench.patch("untidy", {"code.py": content})
    assert f"untidy.patch: code.py:{line}: {fault}" in faults(bench)


def test_a_folder_that_upstream_has_not_is_a_fault(bench: Bench) -> None:
    bench.patch("elsewhere", {"ours/new.txt": "x\n"})
    assert faults(bench) == ("elsewhere.patch: ours/new.txt is in a folder that upstream has not",)


# --- upstream's style ---------------------------------------------------------------

STYLE = {
    "pyproject.toml": '[tool.ruff.lint]\nselect = ["E", "F", "I"]\n',
    ".pre-commit-config.yaml": (
        "repos:\n- repo: https://github.com/astral-sh/ruff-pre-commit\n  rev: v0.14.0\n"
    ),
    "own/__init__.py": "",
}
TIDY = "import os\n\nimport yaml\n\nimport own\n\nprint(os, yaml, own)\n"


def style(bench: Bench, tmp_path: Path) -> str:
    return check_style(bench.repository, bench.apply(), offline=False, log=tmp_path / "style.log")


@pytest.mark.network
def test_tidy_patch_passes_upstreams_ruff(bench: Bench, tmp_path: Path) -> None:
    """`own` is upstream's, so it stands apart, also where the patch touches nothing of it."""
    bench.upstream.commit(STYLE)
    bench.patch("tidy", {"code.py": TIDY})
    assert style(bench, tmp_path) == "1 Python files pass upstream's ruff 0.14.0, check and format"


@pytest.mark.network
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (TIDY.replace("print(os, ", "print("), "untidy/code.py:1:8: F401"),
        (TIDY.replace("(os, yaml", "(os,yaml"), "Would reformat: untidy/code.py"),
        (TIDY.replace("yaml\n\nimport own", "yaml\nimport own"), "untidy/code.py:1:1: I001"),
    ],
    ids=["check", "format", "order of imports"],
)
def test_untidy_patch_is_named_with_ruffs_own_words(
    bench: Bench, tmp_path: Path, content: str, fault: str
) -> None:
    bench.upstream.commit(STYLE)
    bench.patch("untidy", {"code.py": content})
    with pytest.raises(PatchFailed, match=r"upstream's ruff 0\.14\.0") as raised:
        style(bench, tmp_path)
    assert [line for line in raised.value.details if line.startswith(fault)]


def test_style_that_upstream_does_not_check_is_said(bench: Bench, tmp_path: Path) -> None:
    bench.patch("any", {"code.py": "x=1\n"})
    assert style(bench, tmp_path).startswith("no style checked: ")


def test_ruff_that_can_not_be_had_is_said(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
    bench.upstream.commit(STYLE)
    bench.patch("any", {"code.py": TIDY})
    with pytest.raises(NetworkFault, match=r"ruff 0\.14\.0") as raised:
        check_style(bench.repository, bench.apply(), offline=True, log=tmp_path / "style.log")
    assert "style.log" in raised.value.cause


# --- syntax -------------------------------------------------------------------------


def test_python_that_does_not_parse_is_found_with_its_line(bench: Bench) -> None:
    bench.patch("bad", {"code.py": "x = 1\ny = (\nz = 3\n", "b.txt": changed(1)})
    with pytest.raises(PatchFailed) as raised:
        bench.lint()
    (line,) = raised.value.details
    assert line.startswith("bad.patch: code.py:2: ")


def test_python_that_is_not_utf8_is_no_crash(bench: Bench) -> None:
    bench.upstream.commit({"latin1.py": b"# -*- coding: latin-1 -*-\ns = '\xe4'\n"})
    bench.patch("latin", {"latin1.py": b"# -*- coding: latin-1 -*-\ns = '\xfc'\n"})
    assert bench.lint() == PASSED


def test_all_faults_of_a_series_are_told_at_once(bench: Bench) -> None:
    body = BODY.replace("Signed-off-by", "Acked-by")
    bench.patch("one", {"a.txt": changed(1)}, body=body)
    bench.patch("two", {"b.txt": changed(1)}, "--signature=x", body=body)
    with pytest.raises(PatchFailed, match="3 fault"):
        bench.lint()
