"""One sync at a time on a node, and who it is.

A kernel lock on `lock`, so that it ends with its holder. The holder counts into the file as long
as it hears from the other end: a second one can tell a sync that lives from one whose link broke,
without a clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path

from sm121.sync.node.refusal import BUSY, Refused

# The other end says something every BEAT_S; after SILENCE_S without, the node's side ends itself.
BEAT_S = 2.0
SILENCE_S = 12.0


class Lock:
    def __init__(self, root: Path) -> None:
        self._path = root / "lock"
        # Not truncated by opening, and not in append mode, in which pwrite would append.
        self._file = os.open(
            self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
        )
        self._who: dict[str, object] = {}

    def take(self, who: str) -> None:
        """Raises Refused if another sync is at work here; waits for one that broke off to end."""
        end = time.monotonic() + SILENCE_S + 2 * BEAT_S
        first = self._beats()
        while not self._try():
            time.sleep(0.5)
            now = self._beats()
            alive = (
                now is not None and first is not None and now[1] > first[1] and now[0] == first[0]
            )
            if alive or time.monotonic() > end:
                holder = (now or first or ("somebody", 0))[0]
                raise Refused(
                    BUSY, f"Another sync is at work on this node: {holder}.",
                    cause=f"it holds {self._path}",
                    remedy="Wait for it to end, then run the same command again.",
                )  # fmt: skip
            if first is None or (now and now[0] != first[0]):
                first = now  # what is left of an earlier holder says nothing of this one
        self._who = {"who": who, "pid": os.getpid(), "beats": 0}
        self._write()

    def beat(self) -> None:
        """Called whenever the other end was heard."""
        if self._who:
            self._who["beats"] = int(str(self._who["beats"])) + 1
            self._write()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _write(self) -> None:
        # A full disk is told by whoever needs the space; the lock holds all the same.
        with contextlib.suppress(OSError):
            os.pwrite(self._file, json.dumps(self._who).encode().ljust(512), 0)

    def _beats(self) -> tuple[str, int] | None:
        try:
            data = json.loads(self._path.read_bytes())
            return f"{data['who']} (process {data['pid']} here)", int(data["beats"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
