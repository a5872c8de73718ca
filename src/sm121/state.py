"""What was made from what: build/state.json, and the lock on build/.

A stage's fingerprint is a digest of its inputs' content, never of times. The inputs are
kept one by one, so that a later run can say *why* it does a stage again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sm121 import proc
from sm121.errors import Busy
from sm121.files import sha256_text, write_atomic

_SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One finished stage. seconds: how long it took; result: facts that later stages use."""

    fingerprint: str
    inputs: Mapping[str, str]
    result: Mapping[str, Any]
    log: str
    seconds: float


def fingerprint(inputs: Mapping[str, str]) -> str:
    """Digest over all inputs, names and values."""
    return sha256_text(*(part for item in sorted(inputs.items()) for part in item))


@dataclass(slots=True)
class State:
    """build/state.json. Unreadable or of another schema: everything is made again."""

    path: Path
    records: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> State:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] == _SCHEMA:
                return cls(
                    path=path,
                    records={key: Record(**value) for key, value in data["stages"].items()},
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return cls(path=path)

    def put(self, key: str, record: Record) -> None:
        """Remember a finished stage, at once and atomically."""
        self.records[key] = record
        self.save()

    def save(self) -> None:
        stages = {key: asdict(record) for key, record in sorted(self.records.items())}
        write_atomic(self.path, json.dumps({"schema": _SCHEMA, "stages": stages}, indent=1))


def why_changed(record: Record, inputs: Mapping[str, str]) -> str:
    """Which inputs differ from those of the record: 'patch shape-dispatch changed'."""
    reasons = [f"{name} changed" for name in inputs if record.inputs.get(name, "") != inputs[name]
               and name in record.inputs]  # fmt: skip
    reasons += [f"{name} is new" for name in inputs if name not in record.inputs]
    reasons += [f"{name} is gone" for name in record.inputs if name not in inputs]
    shown = ", ".join(reasons[:3])
    return shown + (f" and {len(reasons) - 3} more" if len(reasons) > 3 else "")


@contextmanager
def exclusive(build: Path, command: str) -> Iterator[None]:
    """Hold build/ for one run. Raises Busy naming the run that has it.

    The lock is the kernel's (flock): it ends with the process, however that ends.
    """
    from filelock import FileLock, Timeout

    build.mkdir(parents=True, exist_ok=True)
    owner = build / ".lock-owner.json"
    lock = FileLock(build / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        who = "another run"
        try:
            facts = json.loads(owner.read_text())
            minutes = (time.time() - facts["since"]) / 60
            who = f"`{facts['command']}` (pid {facts['pid']}, since {minutes:.0f} min)"
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise Busy(
            f"{build} is in use by {who}.",
            cause="two builds in one folder would write the same files",
            remedy="Wait for it, or use another checkout (or SM121_BUILD) for a second build.",
        ) from error
    try:
        # A run that was killed may have left compilers that still write into the ninja tree.
        proc.kill_marked(str(build))
        write_atomic(
            owner, json.dumps({"pid": os.getpid(), "command": command, "since": time.time()})
        )
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()
