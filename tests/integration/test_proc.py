"""The one subprocess door, with real processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm121 import proc
from sm121.errors import CompilerMissing, ToolFailed
from support.tools import sm121_environment


@pytest.fixture(autouse=True)
def _scope(tmp_path: Path) -> Iterator[None]:
    proc.set_scope(tmp_path / "build")
    yield
    proc.set_scope(Path())


def alive(pid: int) -> bool:
    """Is it running (a zombie is not)?"""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


# --- what is run --------------------------------------------------------------------


def test_output_and_status_come_back() -> None:
    finished = proc.run(["sh", "-c", "echo out; echo err >&2"])
    assert (finished.returncode, finished.output) == (0, "out\nerr")


def test_pasted_command_does_the_same(tmp_path: Path) -> None:
    """A shell must read the logged line exactly as it was run: spaces, quotes, $, newlines."""
    folder = tmp_path / "a folder's"
    folder.mkdir()
    awkward = ["a b", "it's", "$HOME", "*", "", "new\nline", '"q"', "ä", "a;b", "~"]
    program = "import os,sys;print(ascii([os.getcwd(), os.environ['SM121_X'], *sys.argv[1:]]))"
    argv = [sys.executable, "-c", program, *awkward]
    env = {**os.environ, "SM121_X": "v 'w'"}
    ours = proc.run(argv, cwd=folder, env=env).output
    line = proc.pasteable(argv, cwd=folder, env=env)
    pasted = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert pasted.stdout.strip() == ours
    assert ascii(awkward)[1:-1] in ours


def test_pasted_command_shows_only_what_differs_of_the_environment() -> None:
    line = proc.pasteable(["make"], env={**os.environ, "MAX_JOBS": "3"})
    assert line == "MAX_JOBS=3 make"


def test_environment_is_passed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "x")
    output = proc.run(["env"], env={"PATH": os.environ["PATH"], "ONLY": "this"}).output
    names = {line.split("=")[0] for line in output.splitlines()}
    assert names == {"PATH", "ONLY", proc.MARKER}


def test_standard_input_is_given_or_empty() -> None:
    assert proc.run(["cat"], stdin="some\ntext\n").output == "some\ntext"
    assert proc.run(["cat"]).output == ""


def test_program_that_reads_no_input_is_not_a_broken_pipe() -> None:
    assert proc.run(["true"], stdin="x" * 1_000_000).returncode == 0


def test_output_that_is_not_utf8_is_no_failure() -> None:
    assert proc.run(["printf", "a\\377b"]).output == "a\ufffdb"


def test_lines_are_told_while_it_runs(tmp_path: Path) -> None:
    """The child waits for a file that the callback makes: only a live line lets it end."""
    go = tmp_path / "go"
    script = f"echo first; while [ ! -e {shlex.quote(str(go))} ]; do sleep 0.02; done; echo second"
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        go.touch()

    proc.run(["sh", "-c", script], on_line=on_line)
    assert lines == ["first", "second"]


# --- logs and failures --------------------------------------------------------------


def test_log_has_command_output_and_status(tmp_path: Path) -> None:
    log = tmp_path / "log/x.log"
    proc.run(["echo", "a b"], log=log)
    with pytest.raises(ToolFailed):
        proc.run(["sh", "-c", "echo two; exit 3"], log=log)
    assert log.read_text().splitlines() == [
        "$ echo 'a b'", "a b", "# exit 0", "$ sh -c 'echo two; exit 3'", "two", "# exit 3",
    ]  # fmt: skip


def test_failure_has_status_tail_and_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with pytest.raises(ToolFailed, match="sh failed with exit status 7") as raised:
        proc.run(["sh", "-c", "seq 1 100; exit 7"], log=log, cwd=tmp_path)
    error = raised.value
    assert error.returncode == 7
    assert error.details == tuple(str(n) for n in range(76, 101))
    assert error.log == log
    assert str(log) in error.cause
    assert f"(cd {tmp_path} && sh -c 'seq 1 100; exit 7')" in error.remedy


def test_failure_can_be_left_to_the_caller() -> None:
    assert proc.run(["sh", "-c", "exit 7"], check=False).returncode == 7


def test_killed_program_has_a_negative_status() -> None:
    assert proc.run(["sh", "-c", "kill -9 $$"], check=False).returncode == -9


def test_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompilerMissing, match="no-such-program was not found") as raised:
        proc.run(["no-such-program", "x"], log=tmp_path / "x.log")
    assert raised.value.exit_code == 3
    assert raised.value.remedy


def test_missing_folder_is_not_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="gone") as raised:
        proc.run(["true"], cwd=tmp_path / "gone")
    assert not isinstance(raised.value, CompilerMissing)


# --- limits -------------------------------------------------------------------------


def test_program_that_is_late_is_killed_with_what_it_started() -> None:
    finished = proc.run(["sh", "-c", "echo first; sleep 60 & wait"], check=False, limit=0.3)
    assert (finished.late, finished.returncode, finished.output) == (True, -9, "first")
    assert not proc.run(["echo"], limit=60).late


def test_what_is_late_is_killed_in_a_session_of_its_own_too() -> None:
    """It holds the output; and one that goes on writing must not keep us from killing it."""
    for command in ("echo $$; exec sleep 60", "echo $$; exec yes"):
        holder = ["setsid", "--fork", "sh", "-c", command]
        finished = proc.run(holder, check=False, limit=1)
        assert finished.late
        assert not alive(int(finished.output.partition("\n")[0]))


@pytest.mark.parametrize(
    ("script", "stdin"),
    [
        ("sleep 60", None),
        ("exec >&- 2>&-; sleep 60", None),  # the output has ended, and it can't be reaped
        ("sleep 60", "x" * 300_000),  # nobody reads the other pipe
    ],
    ids=["silent", "output has ended", "does not read"],
)
def test_late_program_that_cannot_be_killed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, script: str, stdin: str | None
) -> None:
    """As one that hangs in a driver."""
    monkeypatch.setattr(proc, "_DYING_S", 0.3)
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    kill, marks = proc.kill_marked, []
    monkeypatch.setattr(proc, "kill_marked", marks.append)
    started = time.monotonic()
    try:
        finished = proc.run(["sh", "-c", script], check=False, limit=0.5, stdin=stdin)
        assert (finished.late, finished.returncode) == (True, -signal.SIGKILL)
        assert time.monotonic() - started < 30
    finally:
        assert kill(marks[0]) >= 1


# --- nothing outlives us ------------------------------------------------------------

# Like ninja: the child starts another one in its own session, which starts another one in
# its own process group, and each writes its pid.
TREE = """
import os, subprocess, sys, time
folder, depth = sys.argv[1], int(sys.argv[2])
open(f"{folder}/{depth}.tmp", "w").write(str(os.getpid()))
os.rename(f"{folder}/{depth}.tmp", f"{folder}/{depth}.pid")
if depth:
    how = {"start_new_session": True} if depth % 2 else {"process_group": 0}
    subprocess.Popen([sys.executable, __file__, folder, str(depth - 1)], **how)
time.sleep(600)
"""


class Tree:
    """A tree of real processes that would run for ten minutes."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir()
        script = folder / "tree.py"
        script.write_text(TREE)
        self.folder = folder
        self.argv = [sys.executable, str(script), str(folder), "3"]
        self.environment = environment

    def pids(self) -> list[int]:
        return [int(p.read_text()) for p in self.folder.glob("*.pid")]

    def started(self) -> bool:
        return len(self.pids()) == 4

    def end(self) -> None:
        for pid in self.pids():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_marked_processes_are_killed_and_no_other(tmp_path: Path) -> None:
    marks = {
        "ours": f"{tmp_path}/build:12345",
        "longer": f"{tmp_path}/build2:12345",
        "other": f"{tmp_path}/elsewhere:1",
        "none": "",
    }
    trees: dict[str, Tree] = {}
    children = []
    try:
        for name, mark in marks.items():
            environment = {**os.environ, **({proc.MARKER: mark} if mark else {})}
            trees[name] = Tree(tmp_path / name, environment)
            children.append(subprocess.Popen(trees[name].argv, env=environment))
        assert wait_until(lambda: all(t.started() for t in trees.values()))
        assert proc.kill_marked(f"{tmp_path}/build") == 4
        assert wait_until(lambda: not any(alive(p) for p in trees["ours"].pids()))
        for name in ("longer", "other", "none"):
            assert all(alive(p) for p in trees[name].pids()), name
        assert proc.kill_marked(f"{tmp_path}/build") == 0
    finally:
        for tree in trees.values():
            tree.end()
        for child in children:
            child.wait()


def test_interruption_kills_the_whole_tree(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree", {})

    def interrupt_when_started() -> None:
        wait_until(tree.started)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_started)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            proc.run(tree.argv)
        thread.join()
        assert len(tree.pids()) == 4
        assert wait_until(lambda: not any(alive(p) for p in tree.pids()))
    finally:
        tree.end()


def test_failing_callback_kills_what_was_started(tmp_path: Path) -> None:
    def on_line(line: str) -> None:
        raise ValueError(line)

    script = "echo $$; exec sleep 600"
    with pytest.raises(ValueError) as raised:
        proc.run(["sh", "-c", script], on_line=on_line)
    assert wait_until(lambda: not alive(int(str(raised.value))))


def test_sigterm_of_a_run_ends_its_compilers_and_gives_code_4(tmp_path: Path) -> None:
    """A whole `python -m sm121`-like process, ended as a job scheduler would."""
    tree = Tree(tmp_path / "tree", {})
    program = (
        "import sys; from sm121 import cli, proc; from sm121.__main__ import main\n"
        "from pathlib import Path\n"
        f"proc.set_scope(Path({str(tmp_path / 'b')!r}))\n"
        f"cli.run = lambda *_: proc.run({tree.argv!r})\n"
        "sys.exit(main(['build']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], env=sm121_environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        assert wait_until(tree.started)
        child.terminate()
        _, err = child.communicate(timeout=20)
        assert child.returncode == 4
        assert err.startswith("error: Interrupted.")
        assert wait_until(lambda: not any(alive(p) for p in tree.pids()))
    finally:
        tree.end()
        child.kill()
        child.wait()
