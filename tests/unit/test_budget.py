"""Memory that compilers share: shares are kept by locks, so processes are stood in for by handles."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from sm121.compile import budget
from sm121.compile.budget import take, taken

GIB = 1 << 30


def plenty() -> int:
    return 1000 * GIB


def hold(folder: Path, name: str, need: int) -> budget.Share:
    """A share of another process: taken under another name than this process's id."""
    share = take(str(folder), need=need, total=1000 * GIB, available=plenty)
    other = folder / f"{name}.share"
    Path(share.path).rename(other)
    share.path = str(other)
    return share


def later(folder: Path, **arguments: object) -> tuple[threading.Thread, list[budget.Share]]:
    """Ask in a thread: is it served, or does it wait?"""
    got: list[budget.Share] = []
    thread = threading.Thread(target=lambda: got.append(take(str(folder), **arguments)))  # type: ignore[arg-type]
    thread.start()
    thread.join(0.3)
    return thread, got


def test_first_one_is_served_whatever_it_needs(tmp_path: Path) -> None:
    share = take(str(tmp_path), need=50 * GIB, total=GIB, available=lambda: 0)
    assert taken(str(tmp_path)) == [50 * GIB]
    share.give_back()
    assert taken(str(tmp_path)) == []
    assert share.waited < 0.3


def test_one_that_fits_beside_another_is_served(tmp_path: Path) -> None:
    first = hold(tmp_path, "1", 6 * GIB)
    second = take(str(tmp_path), need=4 * GIB, total=10 * GIB, available=plenty)
    assert sorted(taken(str(tmp_path))) == [4 * GIB, 6 * GIB]
    second.give_back()
    first.give_back()


@pytest.mark.parametrize(
    "arguments",
    [
        {"need": 5 * GIB, "total": 10 * GIB, "available": plenty},
        {"need": 1 * GIB, "total": 10 * GIB, "available": lambda: GIB // 2},
    ],
    ids=["over the budget", "another program has the memory"],
)
def test_one_that_does_not_fit_waits_for_the_others_end(tmp_path: Path, arguments: dict) -> None:
    first = hold(tmp_path, "1", 6 * GIB)
    thread, got = later(tmp_path, **arguments)
    assert not got
    first.give_back()
    thread.join(5)
    assert got[0].waited >= 0.2
    got[0].give_back()


def test_share_of_a_dead_process_is_free(tmp_path: Path) -> None:
    """The kernel drops the lock with the process; the file stays."""
    first = hold(tmp_path, "1", 6 * GIB)
    os.close(first.handle)
    second = take(str(tmp_path), need=6 * GIB, total=6 * GIB, available=plenty)
    assert second.waited < 0.3
    assert not (tmp_path / "1.share").exists()
    second.give_back()


def test_a_small_one_does_not_overtake_a_large_one(tmp_path: Path) -> None:
    """Else the large one would be left to the end, and often the large ones are the long ones."""
    first = hold(tmp_path, "1", 6 * GIB)
    large_thread, large = later(tmp_path, need=8 * GIB, total=10 * GIB, available=plenty)
    small_thread, small = later(tmp_path, need=4 * GIB, total=10 * GIB, available=plenty)
    assert not large
    assert not small
    first.give_back()
    large_thread.join(5)
    assert large
    assert not small
    large[0].give_back()
    small_thread.join(5)
    assert small
    small[0].give_back()


def test_share_is_inherited_by_what_is_started(tmp_path: Path) -> None:
    """So it is held as long as the compiler runs, even if the launcher was killed."""
    share = take(str(tmp_path), need=1, total=1, available=plenty)
    assert os.get_inheritable(share.handle)
    share.give_back()


def test_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        take(str(tmp_path / "file" / "x"), need=1, total=1, available=plenty)


def test_share_that_vanishes_meanwhile_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget.os, "listdir", lambda _: ["gone.share", "queue"])
    assert taken(str(tmp_path)) == []
