"""One upstream change, one verdict: `rebase --check` on real repositories."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gits import Work
from support.rebasing import lines

CONFLICTING = {"a.txt": lines(l10="upstream's way", l11="and more")}


def test_untouched_series_is_clean(desk) -> None:
    desk.project.patch("one", {"a.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"b.txt": lines(l1="elsewhere")})
    assert desk.verdicts("--onto", "v1.3.0") == {"one": "clean"}


def test_moved_lines_are_an_offset_of_so_many_lines(desk) -> None:
    desk.project.patch("one", {"a.txt": lines(l30="ours")})
    desk.project.release("1.3.0", {"a.txt": "new\nnew\nnew\n" + lines()})
    (row,) = desk.report("--check", "--onto", "v1.3.0")["onto"]
    (patch,) = row["patches"]
    assert (patch["verdict"], patch["offset"]) == ("clean with offset", 3)
    assert [(h["line"], h["line_now"], h["state"]) for h in patch["hunks"]] == [(30, 33, "applies")]


def test_changed_neighbour_that_git_apply_refuses_is_placed_by_the_merge(desk) -> None:
    """cases.md 15: the context differs, our lines do not; nothing goes on unpatched."""
    desk.project.patch("one", {"a.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": lines(l8="neighbour moved")})
    (row,) = desk.report("--check", "--onto", "v1.3.0")["onto"]
    (patch,) = row["patches"]
    assert patch["verdict"] == "clean with offset"
    assert patch["hunks"][0]["beside"] is True


def test_touching_neighbour_is_a_conflict_with_file_hunk_and_both_texts(desk) -> None:
    desk.project.patch("one", {"a.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": lines(l11="neighbour moved")})
    (row,) = desk.report("--check", "--onto", "v1.3.0", code=1)["onto"]
    (patch,) = row["patches"]
    (hunk,) = patch["hunks"]
    assert (patch["verdict"], hunk["state"], hunk["file"], hunk["line"]) == (
        "conflict", "conflict", "a.txt", 10,
    )  # fmt: skip
    assert hunk["upstream"] == ["line 10", "neighbour moved"]
    assert hunk["ours"] == ["ours", "line 11"]
    assert "Upstream changes" in hunk["recent"][0]


def test_same_lines_another_way_is_superseded_with_upstreams_version_beside_ours(desk) -> None:
    desk.project.patch("one", {"a.txt": lines(l10="ours")})
    desk.project.release("1.3.0", CONFLICTING)
    said = desk.rebase("--check", "--onto", "v1.3.0", code=1)
    assert "superseded: a.txt:10" in said
    (beside,) = (line for line in said.splitlines() if "upstream's way" in line)
    assert [part.strip() for part in beside.split("|")] == ["upstream's way", "ours"]


def test_lines_that_were_only_moved_or_reflowed_are_a_conflict_not_superseded(desk) -> None:
    desk.project.patch("moved", {"a.txt": lines(l10="ours")})
    desk.project.patch("reflowed", {"b.txt": lines(l10="ours")})
    gone = lines(l10="upstream's way")
    desk.project.release(
        "1.3.0", {"a.txt": gone + "tail\nline 9\nline 10\n", "b.txt": lines(l10="line\n    10")}
    )
    verdicts = desk.verdicts("--onto", "v1.3.0", code=1)
    # One short line proves nothing about where it went; the reflowed text is the same text.
    assert verdicts == {"moved": "superseded", "reflowed": "conflict"}


def test_removed_file_is_superseded_and_says_so(desk) -> None:
    desk.project.patch("one", {"a.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": None, "z.txt": "something else\n"})
    assert "superseded: upstream removed a.txt" in desk.rebase(
        "--check", "--onto", "v1.3.0", code=1
    )


def test_renamed_file_takes_the_patch_with_it(desk) -> None:
    desk.project.patch("one", {"a.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": None, "sub/new.txt": lines(l30="x")})
    said = desk.rebase("--check", "--onto", "v1.3.0")
    assert desk.verdicts("--onto", "v1.3.0") == {"one": "clean with offset"}
    assert "offset" in said


def test_whole_patch_upstream_is_upstreamed_with_the_place_as_proof(desk) -> None:
    desk.project.patch("one", {"a.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": "top\n" + lines(l10="ours", l30="x")})
    (row,) = desk.report("--check", "--onto", "v1.3.0")["onto"]
    (patch,) = row["patches"]
    assert patch["verdict"] == "upstreamed"
    assert patch["why"] == "all 1 hunk(s) are there, line for line: a.txt:11"


def test_half_upstream_says_which_hunks_and_keeps_the_rest(desk) -> None:
    desk.project.patch("one", {"a.txt": lines(l10="ours", l30="ours too"), "b.txt": lines(l5="b")})
    desk.project.release("1.3.0", {"a.txt": lines(l10="ours")})
    (row,) = desk.report("--check", "--onto", "v1.3.0")["onto"]
    (patch,) = row["patches"]
    assert patch["verdict"] == "upstreamed in part"
    assert [(h["file"], h["line"], h["state"]) for h in patch["hunks"]] == [
        ("a.txt", 10, "upstreamed"), ("a.txt", 30, "applies"), ("b.txt", 5, "applies"),
    ]  # fmt: skip


def test_upstreamed_first_and_valid_second(desk) -> None:
    """cases.md 16: the first one is reported, the second carried."""
    desk.project.patch("first", {"a.txt": lines(l10="ours")})
    desk.project.patch("second", {"b.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": lines(l10="ours")})
    assert desk.verdicts("--onto", "v1.3.0") == {"first": "upstreamed", "second": "clean"}
    said = desk.rebase("--onto", "v1.3.0")
    assert "first   upstreamed" in said


def test_conflict_does_not_hide_the_patches_after_it(desk) -> None:
    patch = desk.project.patch
    patch("bad", {"a.txt": lines(l10="ours")})
    patch("good", {"b.txt": lines(l10="ours")})
    patch("needs-bad", {"a.txt": lines(l10="ours, better")})
    patch("also-bad", {"c.txt": lines(l10="ours")})
    patch("far-from-bad", {"a.txt": lines(l10="ours, better", l35="far")})
    desk.project.release("1.3.0", {**CONFLICTING, "c.txt": lines(l10="upstream's")})
    (row,) = desk.report("--check", "--onto", "v1.3.0", code=1)["onto"]
    found = {p["name"]: (p["verdict"], p["depends_on"]) for p in row["patches"]}
    assert found == {
        "bad": ("superseded", []),
        "good": ("clean", []),
        "needs-bad": ("depends", ["bad"]),
        "also-bad": ("superseded", []),
        "far-from-bad": ("clean", []),
    }


def test_patch_with_its_own_conflict_and_a_dependence_says_both(desk) -> None:
    desk.project.patch("bad", {"a.txt": lines(l10="ours")})
    desk.project.patch("both", {"a.txt": lines(l10="ours, better"), "c.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {**CONFLICTING, "c.txt": lines(l11="upstream's")})
    (row,) = desk.report("--check", "--onto", "v1.3.0", code=1)["onto"]
    both = row["patches"][1]
    assert (both["verdict"], both["depends_on"]) == ("conflict", ["bad"])


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ({"new.txt": "n\n"}, {"new.txt": "n\n"}, "upstreamed"),
        ({"new.txt": "n\n"}, {"new.txt": "other\n"}, "conflict"),
        ({"new.txt": "n\n"}, {"b.txt": "x\n"}, "clean"),
        ({"a.txt": None}, {"a.txt": None}, "upstreamed"),
        ({"a.txt": None}, {"a.txt": lines(l3="x")}, "conflict"),
        ({"bin": b"\0\1"}, {"bin": b"\0\1"}, "upstreamed"),
        ({"bin": b"\0\1"}, {"bin": b"\0\2"}, "conflict"),
        ({"d.bin": b"\0new"}, {"d.bin": b"\0their"}, "conflict"),
        ({"d.bin": b"\0new"}, {"b.txt": "x\n"}, "clean"),
        ({"nn.txt": "a\nb"}, {"nn.txt": "a\nb"}, "upstreamed"),
        ({"crlf.txt": "a\r\nB\r\n"}, {"crlf.txt": "a\r\nB\r\n"}, "upstreamed"),
        ({"cr.txt": "a\rB\nc\n"}, {"cr.txt": "a\rB\nc\n"}, "upstreamed"),
        ({"latin.txt": b"gr\xfcn\n"}, {"latin.txt": b"gr\xf6n\n"}, "superseded"),
    ],
)
def test_every_kind_of_file_has_a_verdict(desk, ours, theirs, verdict: str) -> None:
    first = {"d.bin": b"\0old", "nn.txt": "a\nb\n", "crlf.txt": "a\r\nb\r\n", "cr.txt": "a\rb\nc\n",
             "latin.txt": b"gr\xe4n\n"}  # fmt: skip
    desk.project.upstream.git("tag", "-d", "v1.2.3")
    desk.project.pins["vllm"]["commit"] = desk.project.upstream.commit(first)
    desk.project.upstream.git("tag", "v1.2.3")
    desk.project.repin()
    desk.project.ours.git("pull", "-q")
    desk.project.patch("one", ours)
    desk.project.release("1.3.0", theirs)
    code = int(verdict in ("conflict", "superseded"))
    assert desk.verdicts("--onto", "v1.3.0", code=code) == {"one": verdict}


ODD = ["new\nline", "tab\tt", 'quo"te', "-dash", "latin\udcfc.txt", ":(top)x"]


def test_conflicts_in_odd_file_names_can_be_carried(desk) -> None:
    desk.project.upstream.git("tag", "-d", "v1.2.3")
    desk.project.pins["vllm"]["commit"] = desk.project.upstream.commit(dict.fromkeys(ODD, lines()))
    desk.project.upstream.git("tag", "v1.2.3")
    desk.project.repin()
    desk.project.ours.git("pull", "-q")
    desk.project.patch("one", dict.fromkeys(ODD, lines(l10="ours")))
    desk.project.release("1.3.0", dict.fromkeys(ODD, lines(l11="theirs")))
    assert desk.verdicts("--onto", "v1.3.0", code=1) == {"one": "conflict"}
    desk.rebase("--onto", "v1.3.0", code=1)
    for name in ODD:
        assert "<<<<<<< upstream\n" in (desk.project.tree.path / name).read_text()
    desk.project.tree.write(dict.fromkeys(ODD, lines(l10="ours", l11="theirs")))
    desk.project.tree.git("add", ".")
    assert "nothing is written yet" in desk.rebase("--continue")
    desk.rebase("--abort")
    assert "(r)" in desk.rebase("--check", "--onto", "v1.3.0")


def test_changed_mode_has_a_verdict(desk) -> None:
    (desk.project.ours.path / "a.txt").chmod(0o755)
    desk.project.patch("mode", {})
    desk.project.release("1.3.0", {"a.txt": lines(l3="x")})
    assert desk.verdicts("--onto", "v1.3.0") == {"mode": "clean"}
    (desk.project.upstream.path / "a.txt").chmod(0o755)
    desk.project.release("1.4.0", {"b.txt": "x\n"})
    assert desk.verdicts("--onto", "v1.4.0") == {"mode": "upstreamed"}


# --- nothing is dropped in silence --------------------------------------------------


def am(desk, tag: str, tmp_path: Path) -> str:
    """The same series by `git am -3`; returns the commits that it made."""
    clone = Work(tmp_path / "am")
    desk.project.upstream.git("clone", "-q", desk.project.upstream.path, clone.path)
    clone.git("checkout", "-q", tag)
    clone.git("am", "-3", "-q", *(desk.project.folder / f"{n}.patch" for n in desk.project.names))
    return clone.git("log", "--format=%s", f"{tag}..HEAD")


def test_what_git_am_3_drops_with_exit_0_is_reported_and_recorded(desk, tmp_path: Path) -> None:
    desk.project.patch("gone", {"a.txt": lines(l10="ours")})
    desk.project.patch("kept", {"b.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": lines(l10="ours")})
    assert am(desk, "v1.3.0", tmp_path) == "Do kept"
    said = desk.rebase("--onto", "v1.3.0", "--accept", code=2)  # no sdist, no release
    assert "gone" in said
    record = desk.project.root
    assert not (record / "patches/vllm/1.3.0").exists()


def test_what_git_am_3_shrinks_with_exit_0_is_upstreamed_in_part(desk, tmp_path: Path) -> None:
    desk.project.patch("half", {"a.txt": lines(l10="ours"), "b.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": lines(l10="ours")})
    assert am(desk, "v1.3.0", tmp_path) == "Do half"
    assert desk.verdicts("--onto", "v1.3.0") == {"half": "upstreamed in part"}
