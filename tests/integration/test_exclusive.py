"""One run at a time on build/, with real second processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sm121.errors import Busy
from sm121.state import exclusive
from support.tools import ROOT, sm121_environment

HOLD = """
import sys, time
from pathlib import Path
from sm121.state import exclusive
with exclusive(Path(sys.argv[1]), "build 0.26.0-linux-aarch64 smoke"):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(build: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(build)],
        env=sm121_environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def enter(build: Path) -> None:
    with exclusive(build, "second"):
        pass


def test_second_run_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with holder(tmp_path / "build") as first:
        with pytest.raises(Busy) as raised:
            enter(tmp_path / "build")
        assert raised.value.exit_code == 3
        assert "`build 0.26.0-linux-aarch64 smoke`" in raised.value.what
        assert f"pid {first.pid}" in raised.value.what
        assert raised.value.remedy


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"since": "x"}'])
def test_unreadable_owner_file_still_refuses(tmp_path: Path, content: str) -> None:
    with holder(tmp_path / "build"):
        (tmp_path / "build/.lock-owner.json").write_text(content)
        with pytest.raises(Busy, match="another run"):
            enter(tmp_path / "build")


def test_lock_ends_with_the_process_however_it_ends(tmp_path: Path) -> None:
    with holder(tmp_path / "build") as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (tmp_path / "build/.lock-owner.json").is_file()
        enter(tmp_path / "build")


def test_two_build_folders_do_not_wait_for_each_other(tmp_path: Path) -> None:
    with holder(tmp_path / "one"):
        enter(tmp_path / "two")


def test_command_line_refuses_a_second_build_with_code_3(tmp_path: Path) -> None:
    with holder(tmp_path / "build") as first:
        second = subprocess.run(
            [sys.executable, "-m", "sm121", "source"],
            env=sm121_environment(SM121_BUILD=str(tmp_path / "build")),
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert second.returncode == 3
    assert f"pid {first.pid}" in second.stderr
    assert "next:" in second.stderr
    assert sorted(p.name for p in (tmp_path / "build").iterdir()) == [".lock", ".lock-owner.json"]
