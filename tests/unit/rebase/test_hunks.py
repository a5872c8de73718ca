"""The three-way judgement of hunks, without git: edits are given."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm121.rebase.hunks import Edit, edits_of, judge, lines_of, moved_line


def lines(text: str) -> list[bytes]:
    return [f"{word}\n".encode() for word in text.split()]


def edits(old: list[bytes], new: list[bytes]) -> list[Edit]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [Edit(a0, a1, b0, b1) for tag, a0, a1, b0, b1 in matcher.get_opcodes() if tag != "equal"]


def judged(before: str, ours: str, now: str):
    texts = [lines(text) for text in (before, ours, now)]
    return judge(*texts, edits(texts[0], texts[1]), edits(texts[0], texts[2]))


BEFORE = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda my ny xi"


@pytest.mark.parametrize(
    ("ours", "now", "state"),
    [
        (BEFORE.replace("gamma", "GAMMA"), BEFORE, "applies"),
        (BEFORE.replace("gamma", "GAMMA"), BEFORE.replace("kappa", "KAPPA"), "applies"),
        (BEFORE.replace("gamma", "GAMMA"), BEFORE.replace("gamma", "GAMMA"), "upstreamed"),
        (BEFORE.replace("gamma", "GAMMA"), BEFORE.replace("gamma", "other"), "superseded"),
        (BEFORE.replace("gamma", "GAMMA"), BEFORE.replace("delta", "other"), "conflict"),
        (BEFORE.replace("gamma ", ""), BEFORE.replace("gamma ", ""), "upstreamed"),
        (BEFORE.replace("gamma ", ""), BEFORE.replace("gamma", "gam ma"), "conflict"),
        (BEFORE.replace("gamma", "gamma new"), BEFORE.replace("gamma", "gamma other"), "conflict"),
        (BEFORE.replace("gamma", "gamma new"), BEFORE.replace("gamma delta", "x y"), "superseded"),
        (BEFORE.replace("gamma", "gamma new"), BEFORE.replace("gamma", "gamma new"), "upstreamed"),
    ],
)  # fmt: skip
def test_state_of_a_hunk(ours: str, now: str, state: str) -> None:
    assert [hunk.state for hunk in judged(BEFORE, ours, now)] == [state]


def test_offset_counts_only_what_upstream_did_before() -> None:
    (hunk,) = judged(BEFORE, BEFORE.replace("ny", "NY"), "one two " + BEFORE.replace("alpha ", ""))
    assert (hunk.state, hunk.offset, hunk.line) == ("applies", 1, 13)


def test_changed_context_is_said() -> None:
    ours = BEFORE.replace("gamma", "GAMMA")
    (near,) = judged(BEFORE, ours, BEFORE.replace("epsilon", "E"))
    (far,) = judged(BEFORE, ours, BEFORE.replace("kappa", "K"))
    assert (near.beside, far.beside) == (True, False)


def test_long_run_that_stands_elsewhere_is_moved_not_superseded() -> None:
    before = "a1 a2 this_is_a_long_line_of_code and_one_more_of_them b1 b2 b3"
    now = "a1 a2 changed b1 b2 b3 this_is_a_long_line_of_code and_one_more_of_them"
    ours = before.replace("this_is_a_long_line_of_code and_one_more_of_them", "ours")
    (hunk,) = judged(before, ours, now)
    assert (hunk.state, hunk.meetings[0].moved) == ("conflict", 7)


def test_line_like_the_one_beside_our_addition_is_no_proof_that_it_moved() -> None:
    """gb10-memory on 0.30: one line of a call stands in another block too."""
    before = "peak_of_torch_minus_peak_before ) total_of_what_is_consumed_is_( x y z"
    ours = before.replace(" total", " ours total")
    now = "rewritten x y z other_block total_of_what_is_consumed_is_("
    (hunk,) = judged(before, ours, now)
    assert (hunk.state, hunk.whole.moved) == ("superseded", 0)
    both = f"{now} peak_of_torch_minus_peak_before total_of_what_is_consumed_is_("
    (hunk,) = judged(before, ours, both)
    assert (hunk.state, hunk.whole.moved) == ("conflict", 7)


def test_neighbour_that_was_only_made_longer_is_still_there() -> None:
    """nccl-guard on 0.30: imports beside ours that import more."""
    before = "a import_of_one import_of_two b"
    ours = before.replace("import_of_two", "import_of_ours import_of_two")
    longer = "a changed import_of_two,_and_of_three b"
    (hunk,) = judged(before, ours, longer)
    assert hunk.state == "conflict"
    (hunk,) = judged(before, ours, "a changed import_of_six b")
    assert hunk.state == "superseded"


def test_all_places_of_a_hunk_are_shown() -> None:
    """shape-dispatch on 0.28: a comment in conflict, and below it the code."""
    ours = BEFORE.replace("gamma", "GAMMA").replace("zeta", "ZETA")
    now = BEFORE.replace("gamma", "x y").replace("zeta", "z")
    (hunk,) = judged(BEFORE, ours, now)
    assert list(hunk.whole.before) == lines("gamma delta epsilon zeta")
    assert list(hunk.whole.upstream) == lines("x y delta epsilon z")
    assert list(hunk.whole.ours) == lines("GAMMA delta epsilon ZETA")


def test_what_we_add_is_found_elsewhere_whatever_its_comment() -> None:
    """ragged-indexer on 0.28 and 0.30: upstream has the clamp, with a comment of its own."""
    added = b"length = maximum(length, 0)\n"
    before = [b"a\n", b"length = plain\n", b"b\n"]
    patched = [b"a\n", b"# why\n", added, b"b\n"]
    ours = [Edit(1, 2, 1, 3)]

    def there(old: list[bytes], now: list[bytes], theirs: list[Edit]) -> int:
        (hunk,) = judge(old, patched, now, ours, theirs)
        return hunk.whole.there

    assert there(before, [b"a\n", b"# theirs\n", b"  " + added, b"b\n"], ours) == 3
    assert there(before, [b"a\n", b"x\n", b"b\n"], [Edit(1, 2, 1, 2)]) == 0
    was = [*before, added]
    assert there(was, [b"a\n", b"x\n", b"b\n", added], [Edit(1, 2, 1, 2)]) == 0


def test_two_edits_of_one_hunk_can_differ() -> None:
    ours = BEFORE.replace("gamma", "GAMMA").replace("zeta", "ZETA")
    (hunk,) = judged(BEFORE, ours, BEFORE.replace("gamma", "GAMMA"))
    assert hunk.state == "in part"


@pytest.mark.parametrize(
    "content", [b"", b"a", b"a\n", b"a\r\nb\rc\n", b"\r", b"\n\n", b"a\x0cb\n"]
)
def test_lines_are_gits(content: bytes) -> None:
    assert b"".join(lines_of(content)) == content
    assert all(line.count(b"\n") <= 1 for line in lines_of(content))


def test_edits_of_a_diff_without_context() -> None:
    diff = b"@@ -3 +3,2 @@ def f():\n-x\n+y\n+z\n@@ -7,2 +8,0 @@\n-a\n-b\n@@ -10,0 +10 @@\n+c\n"
    assert edits_of(diff) == [Edit(2, 3, 2, 4), Edit(6, 8, 8, 8), Edit(10, 10, 9, 10)]
    assert edits_of(b"") == []


def test_lines_move_with_the_edits_before_them() -> None:
    found = [Edit(2, 3, 2, 5), Edit(6, 8, 8, 8)]
    assert [moved_line(found, line) for line in (0, 2, 3, 6, 9)] == [0, 2, 5, 8, 9]


WORDS = st.lists(st.sampled_from("abcdefg"), max_size=14).map(" ".join)


@settings(max_examples=200)
@given(before=WORDS, ours=WORDS, now=WORDS)
def test_upstreamed_everywhere_means_that_our_change_is_there(
    before: str, ours: str, now: str
) -> None:
    """The proof is sound: redo our edits on `now` at the proven places and nothing changes."""
    texts = [lines(text) for text in (before, ours, now)]
    for hunk in judge(*texts, edits(texts[0], texts[1]), edits(texts[0], texts[2])):
        for meeting in hunk.meetings:
            if meeting.state == "upstreamed":
                assert list(meeting.upstream) == texts[2][meeting.first : meeting.last]
                assert meeting.upstream == meeting.ours
            assert 0 <= meeting.first <= meeting.last <= len(texts[2])
        whole = hunk.whole
        assert list(whole.upstream) in ([], texts[2][whole.first : whole.last])
        assert list(whole.before) in ([], texts[0][whole.low : whole.high])
        assert all(
            whole.low <= m.low <= m.high <= whole.high
            for m in hunk.meetings if m.state != "applies"
        )  # fmt: skip
