"""Every way in which sm121 can fail: what happened, why, and what to do next.

`main()` alone prints these and exits (style: cibuildwheel's errors.py). The exit codes:

====  =====================================================================
0     done
1     a check found faults (hash, patch, lock or ABI)
2     wrong usage or wrong pins
3     the environment cannot do it (network, disk, compiler, memory)
4     interrupted, or a tool failed
====  =====================================================================
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar


class Sm121Error(Exception):
    """Base of all failures that a user can meet.

    what: one sentence, what happened. cause: why, as far as known.
    remedy: the next command or action. details: further lines (hunks, file names).
    """

    exit_code: ClassVar[int] = 4

    def __init__(
        self, what: str, *, cause: str = "", remedy: str = "", details: Sequence[str] = ()
    ) -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause
        self.remedy = remedy
        self.details = tuple(details)


class CheckFailed(Sm121Error):
    """A check found a fault in something that exists."""

    exit_code = 1


class HashMismatch(CheckFailed):
    """A file's content is not the pinned one."""


class PatchFailed(CheckFailed):
    """A patch of the series does not apply, or the series is malformed."""


class RebaseStopped(CheckFailed):
    """A rebase needs a person: a patch does not apply, or a resolution is not finished."""


class SourceDrift(CheckFailed):
    """Our pin of a third-party source and what upstream's CMake asks for disagree."""


class LockStale(CheckFailed):
    """The lock was not made from these pins."""


class FamilyFault(CheckFailed):
    """A set of distributions breaks a rule of pins/rules.toml."""


class WheelFault(CheckFailed):
    """A built wheel is not what the profile and target promise."""


class AbiFault(CheckFailed):
    """verify-abi found a binary that does not fit."""


class JitFault(CheckFailed):
    """verify-jit found a kernel that the target's GPU could not be given."""


class NodeFault(CheckFailed):
    """What lies on a node is not what was sent there, or nodes differ."""


class UsageFault(Sm121Error):
    """Wrong command-line usage."""

    exit_code = 2


class PinsFault(Sm121Error):
    """stack.toml (or another pins file) is wrong."""

    exit_code = 2


class EnvironmentFault(Sm121Error):
    """This machine cannot do it as it is."""

    exit_code = 3


class NetworkFault(EnvironmentFault):
    """Something had to be fetched and could not be."""


class DiskFull(EnvironmentFault):
    """No space left where we write."""


class CompilerMissing(EnvironmentFault):
    """A compiler or tool that the build needs is not installed."""


class OutOfMemory(EnvironmentFault):
    """The kernel killed a compiler (exit 137), almost always for memory."""


class HostKeyFault(EnvironmentFault):
    """A host's key is not the known one, or not known at all."""


class Busy(EnvironmentFault):
    """Another run holds the build folder, or another sync a node."""


class ToolFailed(Sm121Error):
    """A program that we run failed for a reason of its own."""

    def __init__(
        self,
        what: str,
        *,
        returncode: int,
        tail: Sequence[str] = (),
        log: Path | None = None,
        cause: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(what, cause=cause, remedy=remedy, details=tail)
        self.returncode = returncode
        self.log = log


class Interrupted(Sm121Error):
    """Ctrl-C or SIGTERM."""


def disk_full(doing: str, cause: str, *, kept: str = "") -> DiskFull:
    """No space left on the disk with build/ or the cache. kept: what a rerun finds done."""
    return DiskFull(
        f"No space left while {doing}.",
        cause=cause,
        remedy="Free some space (`nox -s clean` lists what sm121 holds), then run the same "
        f"command again{f': {kept}' if kept else ''}.",
    )


def from_oserror(error: OSError) -> Sm121Error:
    """Translate an operating-system error that no stage expected.

    ENOSPC and EDQUOT become DiskFull with the path that was being written, since a full
    disk is the commonest one (a kernels build takes tens of GB); others keep their text.
    """
    where = error.filename or "the build folder"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(f"writing {where}", str(error.strerror), kept="finished stages are kept")
    return EnvironmentFault(
        f"The operating system refused: {error.strerror or error}.",
        cause=f"while accessing {where}",
        remedy="Check permissions and free space there, then run the same command again.",
    )
