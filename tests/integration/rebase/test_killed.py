"""SIGKILL in the middle: what is there can be continued or aborted, and patches/ is as before.

A forked child runs the real command and kills itself right before its n-th effect on the disk:
a rename, a removal, a new folder or a git command, told by Python's audit events.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm121.__main__ import main
from support.rebasing import lines
from support.servers import serve_index

EFFECTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "subprocess.Popen")
# More for a thorough run; every place there is was tried once, see docs/rebasing.md.
POINTS = int(os.environ.get("SM121_TEST_KILLS", "3"))
RESOLVED = lines(l10="upstream's way, and ours")


def killed(*argv: str, at: int) -> bool:
    """Run a verb in a child that dies right before its at-th effect; False if it ended before."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, _arguments: object) -> None:
            nonlocal seen
            if event in EFFECTS:
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            main(["rebase", *argv])
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def points(*argv: str, of: int) -> list[int]:
    """So many places to die at, spread over the whole run, its first and last among them."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, _arguments: object) -> None:
            nonlocal seen
            seen += event in EFFECTS

        sys.addaudithook(count)
        Path("points").touch()
        try:
            main(["rebase", *argv])
        finally:
            Path("points").write_text(str(seen))
            os._exit(0)
    os.waitpid(child, 0)
    total = int(Path("points").read_text())
    assert total > of
    return sorted({1 + (total - 1) * n // (of - 1) for n in range(of)})


@pytest.fixture
def begun(desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    desk.project.patch("first", {"b.txt": lines(l10="ours")})
    desk.project.patch("second", {"a.txt": lines(l10="ours")})
    (desk.project.root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- A thing.\n")
    desk.project.release("1.3.0", {"a.txt": lines(l10="upstream's way")})
    (tmp_path / "index").mkdir()
    desk.project.pack(tmp_path / "index", tag="v1.3.0")
    with serve_index(tmp_path / "index") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        yield desk


def resolve(desk) -> None:
    desk.project.tree.write({"a.txt": RESOLVED})
    desk.project.tree.git("add", "a.txt")


def accepted(desk) -> dict[str, bytes]:
    """Go on to the end from a stop; the files that came of it."""
    desk.rebase("--continue")
    desk.rebase("--accept")
    return desk.project.data()


def undo(desk, before: dict[str, bytes]) -> None:
    """Take an acceptance back, as git would."""
    for name in desk.project.data():
        path = desk.project.root / name
        if name not in before:
            path.unlink()
        else:
            path.write_bytes(before[name])
    for folder in ("patches/vllm/1.3.0", "pins/1.3.0", "patches/vllm/rerere"):
        if (desk.project.root / folder).exists():
            (desk.project.root / folder).rmdir()


def test_killed_while_starting(begun) -> None:
    before = begun.project.data()
    kills = 0
    for at in points("--onto", "v1.3.0", of=POINTS):
        if (begun.project.root / "build/rebase/session.json").exists():
            begun.rebase("--abort")
        # The first run of all has some effects more: it makes the repository.
        kills += killed("--onto", "v1.3.0", at=at)
        assert begun.project.data() == before
        under_way = (begun.project.root / "build/rebase/session.json").exists()
        again = [] if under_way else ["--onto", "v1.3.0"]
        assert "Stopped at second" in begun.rebase(*again, code=1)
        assert begun.project.tree.git("status", "--porcelain") == "UU a.txt"
    assert kills >= POINTS - 2
    resolve(begun)
    assert b"and ours" in accepted(begun)["patches/vllm/1.3.0/second.patch"]


def test_killed_while_continuing(begun) -> None:
    before = begun.project.data()
    begun.rebase("--onto", "v1.3.0", code=1)
    resolve(begun)
    for at in points("--continue", of=POINTS):
        if (begun.project.root / "build/rebase/session.json").exists():
            begun.rebase("--abort")
        # What was learnt would resolve it this time.
        for known in (begun.project.root / "build/rebase/rerere").glob("*"):
            known.unlink()
        begun.rebase("--onto", "v1.3.0", code=1)
        resolve(begun)
        assert killed("--continue", at=at)
        assert begun.project.data() == before
        begun.rebase("--continue" if at % 2 else "--abort")
        assert begun.project.data() == before


def test_killed_while_accepting(begun) -> None:
    before = begun.project.data()
    begun.rebase("--onto", "v1.3.0", code=1)
    resolve(begun)
    accepted(begun)
    undo(begun, before)
    begun.rebase("--onto", "v1.3.0", "--accept")  # by what it remembers
    wanted = begun.project.data()
    undo(begun, before)
    begun.rebase("--onto", "v1.3.0")
    for at in points("--accept", of=POINTS + 2):
        undo(begun, before)
        if not (begun.project.root / "build/rebase/session.json").exists():
            begun.rebase("--onto", "v1.3.0")
        assert killed("--accept", at=at)
        if not (begun.project.root / "build/rebase/session.json").exists():
            assert begun.project.data() == wanted  # killed after the last of it
        elif at % 2:
            begun.rebase("--accept")
            assert begun.project.data() == wanted
        else:
            begun.rebase("--abort")
            assert begun.project.data() == before
            assert not (begun.project.root / "patches/vllm/1.3.0").exists()
