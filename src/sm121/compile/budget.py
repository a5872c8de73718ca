"""Memory that the compilers of a build share: each takes its part before it starts.

A folder, since ninja starts the compilers and they know nothing of each other:

`queue`      whoever wants memory locks it until it has some. So they are served in the order
             in which they came, and a large object is not starved by small ones.
`PID.share`  the bytes that one compile holds, locked by its process and by all that it
             started. The kernel drops the lock when the last of them ends, however it ends, so
             a share outlives a killed launcher as long as its compiler runs, and no longer.

Standard library only, and of that what starts fast (no pathlib, no dataclasses: 20 ms
together), since it runs once for each object.
"""

from __future__ import annotations

import fcntl
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_SUFFIX = ".share"
_POLL_S = 0.05


class Share:
    """Memory that was taken. waited: seconds until there was enough."""

    __slots__ = ("handle", "path", "waited")

    def __init__(self, path: str, handle: int, waited: float) -> None:
        self.path = path
        self.handle = handle
        self.waited = waited

    def give_back(self) -> None:
        remove(self.path)
        os.close(self.handle)


def take(folder: str, *, need: int, total: int, available: Callable[[], int]) -> Share:
    """Wait until `need` bytes fit, and take them.

    total: bytes that all may hold together. available: what the machine has now, since other
    programs take memory too. Whatever is asked for and whatever there is, one that is alone is
    never made to wait. The share's handle is inherited by programs started afterwards.
    Raises OSError if the folder can't be written.
    """
    started = time.monotonic()
    os.makedirs(folder, exist_ok=True)
    queue = os.open(f"{folder}/queue", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(queue, fcntl.LOCK_EX)
        while held := taken(folder):
            if sum(held) + need <= total and need <= available():
                break
            time.sleep(_POLL_S)
        path = f"{folder}/{os.getpid()}{_SUFFIX}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, b"%d" % need)
        os.set_inheritable(handle, True)
    finally:
        os.close(queue)
    return Share(path, handle, time.monotonic() - started)


def taken(folder: str) -> list[int]:
    """Bytes of each share that somebody holds; shares that nobody holds any more are removed."""
    held = []
    for name in os.listdir(folder):
        if not name.endswith(_SUFFIX):
            continue
        path = f"{folder}/{name}"
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue  # given back meanwhile
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
        except BlockingIOError:
            held.append(int(os.read(handle, 32) or b"0"))
        finally:
            os.close(handle)
    return held


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # a waiting one found it unlocked, and was faster
