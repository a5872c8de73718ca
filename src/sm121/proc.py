"""The one subprocess door (git's is sm121.gitrepo).

Every command is written to its log in a form that can be pasted into a shell, its output
goes to the same log while it runs, and a failure carries the last lines and the log's path.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sm121.errors import CompilerMissing, ToolFailed

_TAIL_LINES = 25
# A killed program that is not gone by then is stuck in the kernel, as in a driver that hangs.
_DYING_S = 5.0
MARKER = "SM121_STARTED_BY"
_scope = ""
_calls = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A command that ended: exit status and standard output (with error output, if logged).

    late: it was killed, since it had not ended within its limit.
    """

    returncode: int
    output: str
    late: bool = False


def pasteable(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """The command as one shell line; of the environment only what differs from ours."""
    words = [
        f"{key}={shlex.quote(value)}"
        for key, value in sorted((env or {}).items())
        if os.environ.get(key) != value
    ]
    words += [shlex.quote(str(arg)) for arg in argv]
    line = " ".join(words)
    return f"(cd {shlex.quote(str(cwd))} && {line})" if cwd else line


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    check: bool = True,
    stdin: str | None = None,
    limit: float | None = None,
) -> Finished:
    """Run a program to its end.

    env: the *whole* environment of the child (None: ours). log: file that the command and
    its output are appended to; without one, output is only returned. on_line: called with
    each output line (no newline). limit: seconds after which it and all that it started is killed,
    and not waited for if it can't be (a program that hangs in a driver).

    Raises CompilerMissing if the program does not exist, ToolFailed on a non-zero exit
    (when `check`), and passes KeyboardInterrupt on after killing everything that was started:
    ninja's compilers must not outlive us.
    """
    own = f"{_mark()}:{next(_calls)}"
    marked = {**(env if env is not None else os.environ), MARKER: own}
    log_file: IO[str] | None = None
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log_file = log.open("a", encoding="utf-8", errors="replace")
        log_file.write(f"$ {pasteable(argv, cwd=cwd, env=env)}\n")
        log_file.flush()
    lines: list[str] = []
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        try:
            child = subprocess.Popen(
                [str(arg) for arg in argv],
                cwd=cwd,
                env=marked,
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except FileNotFoundError as error:
            if cwd is not None and not cwd.is_dir():
                raise ToolFailed(
                    f"{cwd}, where {argv[0]} was to run, does not exist.",
                    returncode=127,
                    remedy="Run the same command again: what is missing is made anew.",
                ) from error
            raise CompilerMissing(
                f"{argv[0]} was not found.",
                cause=str(error),
                remedy="Install it, or put it on PATH, and run the same command again.",
            ) from error
        talk = _Talk(child, own, stdin=stdin, limit=limit)
        try:
            for line in talk.lines():
                tail.append(line)
                if log_file is None or not on_line:
                    lines.append(line)
                if log_file is not None:
                    log_file.write(line + "\n")
                    log_file.flush()
                if on_line is not None:
                    on_line(line)
            returncode = talk.wait()
        except BaseException:
            kill_marked(_mark())
            talk.abandon()
            raise
        if log_file is not None:
            log_file.write(f"# exit {returncode}\n")
    finally:
        if log_file is not None:
            log_file.close()
    if check and returncode != 0:
        raise ToolFailed(
            f"{Path(str(argv[0])).name} failed with exit status {returncode}.",
            returncode=returncode,
            tail=list(tail),
            log=log,
            cause=f"whole output: {log}" if log else "",
            remedy=f"Run it by hand: {pasteable(argv, cwd=cwd)}",
        )
    return Finished(returncode=returncode, output="\n".join(lines), late=talk.late)


class _Talk:
    """A child's output line by line, for as long as it may take.

    What can block for ever is done by threads that nobody has to wait for: a process that is stuck
    in the kernel can neither be killed nor reaped, and may hold both pipes.
    """

    def __init__(
        self, child: subprocess.Popen[str], own: str, *, stdin: str | None, limit: float | None
    ) -> None:
        self.late = False
        self._child, self._own = child, own
        self._deadline = time.monotonic() + limit if limit else None
        self._said: queue.Queue[str | None] = queue.Queue(maxsize=1000)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if stdin is not None:
            threading.Thread(target=self._write, args=(stdin,), daemon=True).start()

    def lines(self) -> Iterator[str]:
        """To the end of the output, or until the child is given up."""
        while True:
            try:
                line = self._said.get(timeout=self._left())
            except queue.Empty:
                if self._give_up():
                    return
                continue
            if line is None:
                return
            yield line

    def wait(self) -> int:
        """The exit status; SIGKILL's if the child was given up."""
        while True:
            try:
                return self._child.wait(timeout=self._left())
            except subprocess.TimeoutExpired:
                if self._give_up():
                    return self._forget()

    def abandon(self) -> None:
        """Wait a little for a child that was killed."""
        try:
            self._child.wait(timeout=_DYING_S)
        except subprocess.TimeoutExpired:
            self._forget()

    def _forget(self) -> int:
        """Popen would warn of a child that runs on."""
        self._child.returncode = -signal.SIGKILL
        return -signal.SIGKILL

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _give_up(self) -> bool:
        """Kill what is late, once; whether it has had its time to die, too."""
        if self.late:
            return True
        self.late = True
        with contextlib.suppress(OSError):
            os.killpg(self._child.pid, signal.SIGKILL)
        kill_marked(self._own)  # what it has put into other sessions
        self._deadline = time.monotonic() + _DYING_S
        return False

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout as output:
            for raw in output:
                self._said.put(raw.rstrip("\n"))
        self._said.put(None)

    def _write(self, text: str) -> None:
        assert self._child.stdin is not None
        # A program that ends before it has read all tells why by its own output.
        with contextlib.suppress(BrokenPipeError), self._child.stdin as stdin:
            stdin.write(text)


def start(argv: Sequence[str | Path], *, log: Path | None = None) -> subprocess.Popen[str]:
    """Start a program to talk with, or to run beside others; its error output joins its output.

    The caller reads `stdout`, writes `stdin`, waits, and ends it. Raises CompilerMissing if the
    program does not exist. It has a session of its own, so a Ctrl-C at the keyboard reaches only us.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"$ {pasteable(argv)}\n")
    try:
        return subprocess.Popen(
            [str(arg) for arg in argv], env={**os.environ, **mark()}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise CompilerMissing(
            f"{argv[0]} was not found.", cause=str(error),
            remedy="Install it, or put it on PATH, and run the same command again.",
        ) from error  # fmt: skip


def _mark() -> str:
    return f"{_scope}:{os.getpid()}"


def mark() -> dict[str, str]:
    """The environment variable by which kill_marked finds what this process started."""
    return {MARKER: _mark()}


def set_scope(build: Path) -> None:
    """Name the build folder that this process works for; its children carry the name."""
    global _scope
    _scope = str(build)


def kill_marked(prefix: str) -> int:
    """Kill every process whose environment carries our marker; returns how many.

    By the environment, since ninja gives each compiler a process group of its own, and a
    compiler whose ninja was killed has no parent to find it by (proc(5), /proc/PID/environ).
    """
    wanted = f"{MARKER}={prefix}".encode()
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            if any(v == wanted or v.startswith(wanted + b":") for v in variables):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
        except OSError:
            continue
    return killed


def replace_process(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
    """Become another program (used by `shell`): does not return."""
    os.chdir(cwd)
    os.execvpe(argv[0], list(argv), dict(env))
