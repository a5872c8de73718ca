"""Runs one compiler for ninja: with memory from the common budget, and a record of its cost.

    python -IS launcher.py [ccache] COMPILER ARGUMENTS...

CMake puts it before every compile (CMAKE_<LANG>_COMPILER_LAUNCHER, see sm121.compile.toolchain)
and before the compiler cache, whose arguments and answers it leaves alone. The variable
SM121_LAUNCH names the settings (sm121.compile.records.write_settings); without it, and for
anything that compiles no object, it becomes the command and is gone.

It ends as the compiler ended: with its exit status, or by the same signal.

A script of its own, started with -IS (neither site-packages nor the user's environment), since
it runs once for each object.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What ninja, a terminal or `timeout` send; the compiler gets them too.
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# ccache's counters of one call (ccache manual, CCACHE_STATSLOG) that mean: nothing was compiled.
_HITS = ("direct_cache_hit", "preprocessed_cache_hit")
# What g++ and nvcc say of a part of theirs (cc1plus, cicc) that was killed; they themselves end with
# an ordinary status then. The kernel's own counts of such kills (vmstat, memory.events) are the
# machine's or the container's: beside other compilers they don't tell whose part it was.
SAYS_KILLED = (
    "Killed signal terminated program|internal compiler error: Killed|died due to signal 9"
)
# Both say it last.
_TAIL = 1 << 16
# A compile may need a little more than the last time.
_HEADROOM = 1.1


def main(argv: list[str]) -> None:
    """Run the command; does not return."""
    # A launcher that is interrupted while it waits has nothing to say.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    compiled = objects_of(argv)
    settings = read_settings(os.environ.get("SM121_LAUNCH", ""))
    if compiled is None or settings is None:
        os.execvp(argv[0], argv)
    target, source = compiled
    share = take_share(settings, target)
    statslog = f"{settings['budget']}/{os.getpid()}.ccache"
    cached = os.path.basename(argv[0]) == "ccache" and "CCACHE_DISABLE" not in os.environ
    if cached:
        os.environ["CCACHE_STATSLOG"] = statslog
    started = time.time()
    status, usage, said = run(argv)
    code = os.waitstatus_to_exitcode(status)
    record = {
        "run": settings["run"],
        "object": target,
        "source": source,
        "start": round(started, 3),
        "end": round(time.time(), 3),
        "waited": round(share.waited, 3) if share else 0.0,
        "cpu": round(usage.ru_utime + usage.ru_stime, 3),
        # The largest single process of those that the compile was made of: nvcc runs them one
        # after another. getrusage(2) has kilobytes.
        "rss": usage.ru_maxrss * 1024,
        "cache": cache_answer(statslog) if cached else "off",
        "exit": code,
        "killed": was_killed(code, said),
    }
    if share:
        share.give_back()
    write_record(settings["records"], record)
    end_as(status)


def objects_of(argv: list[str]) -> tuple[str, str] | None:
    """The object that a command makes and its source; None if it compiles nothing."""
    try:
        source = argv[argv.index("-c") + 1]
        return argv[argv.index("-o") + 1], source
    except (ValueError, IndexError):
        return None


def kind_of(target: str) -> str:
    """The CMake target that an object belongs to and its source's suffix, as '_vllm_fa2_C .cu':
    objects of one kind need about as much memory."""
    component = target.partition(".dir/")[0].rpartition("/")[2]
    return f"{component} {os.path.splitext(target.removesuffix('.o'))[1]}"


def read_settings(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            settings: dict[str, Any] = json.load(file)
            return settings
    except (OSError, ValueError) as error:
        if path:
            say(f"not limited and not recorded: {error}")
        return None


def take_share(settings: dict[str, Any], target: str) -> Any:
    """Memory for this object: measured, or that of its kind, or the default; None, and said, if the
    folder is lost."""
    # Found beside this file, since -I leaves the script's folder out of the search path.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from sm121.compile.budget import take
    from sm121.compile.memory import available_memory

    known = settings["objects"].get(target)
    measured = known["rss"] if known else settings.get("kinds", {}).get(kind_of(target))
    need = int(measured * _HEADROOM) if measured else int(settings["default"])
    try:
        return take(
            settings["budget"], need=need, total=settings["memory"], available=available_memory
        )
    except OSError as error:
        say(f"{target} is compiled without a share of memory: {error}")
        return None


def was_killed(code: int, said: str = "") -> bool:
    """Was a compile that ended with this status killed (by SIGKILL, as the kernel does for memory),
    or a part of it? said: its standard error, or the end of that."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL) or (
        code != 0 and re.search(SAYS_KILLED, said) is not None
    )


def run(argv: list[str]) -> tuple[int, resource.struct_rusage, str]:
    """Run the command to its end, passing signals on; its wait status, what it used, and the end of
    its standard error."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    reading, writing = os.pipe()
    words = [(os.POSIX_SPAWN_DUP2, writing, 2)]
    try:
        child = os.posix_spawnp(argv[0], argv, os.environ, setsigmask=blocked, file_actions=words)
    except OSError as error:
        say(f"{argv[0]}: {error.strerror}")
        raise SystemExit(127 if isinstance(error, FileNotFoundError) else 126) from None
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: pass_on(child, received))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.close(writing)
    said = relay(reading)
    _, status, usage = os.wait4(child, 0)
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    return status, usage, said.decode(errors="replace")


def relay(reading: int) -> bytes:
    """Pass on what comes out of a pipe to standard error, at once and to its end (ninja waits for
    that too); the last of it."""
    tail = b""
    while chunk := os.read(reading, _TAIL):
        tail = (tail + chunk)[-_TAIL:]
        try:
            while chunk:
                chunk = chunk[os.write(2, chunk) :]
        except OSError:
            pass  # nobody listens any more; a compiler that can't get rid of its words would hang
    return tail


def pass_on(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass  # it has just ended


def cache_answer(statslog: str) -> str:
    """'hit' or 'miss', by ccache's own account of this call; 'unknown' if it left none."""
    try:
        with open(statslog, encoding="utf-8") as file:
            lines = file.read().split()
        os.unlink(statslog)
    except OSError:
        return "unknown"  # killed before it could say, or one that knows no such log
    return "hit" if any(line in _HITS for line in lines) else "miss"


def write_record(path: str, record: dict[str, Any]) -> None:
    """Append one line by one write, so that parallel ones don't mix and a kill loses one line.

    It begins with a line's end too: the one before may be torn. Readers skip what is empty then.
    """
    line = f"\n{json.dumps(record, separators=(',', ':'))}\n".encode()
    fault = ""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(handle, line)
            if written < len(line):
                fault = f"{path} took {written} of {len(line)} bytes; is the disk full?"
        finally:
            os.close(handle)
    except OSError as error:
        fault = str(error)
    if fault:
        say(f"cost of {record['object']} not recorded: {fault}")


def end_as(status: int) -> None:
    """Exit as the compiler did. A signal is repeated, so that ninja sees one, with no core file."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def say(text: str) -> None:
    os.write(2, f"sm121 launcher: {text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
