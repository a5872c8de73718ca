"""The node's side of a sync: one request after the other, as long as the other end is heard.

A line in is a request (JSON) or empty (a beat); a line out is PREFIX and JSON: an event, an answer
or a refusal. If nothing is heard for SILENCE_S, or the link closes, everything here ends, and with
it the lock; the other end's rerun goes on from what there is.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm121.sync.node import installing
from sm121.sync.node.lock import SILENCE_S
from sm121.sync.node.refusal import CHECK, DISK, ENVIRONMENT, Refused
from sm121.sync.node.work import Work

PREFIX = "sm121> "


def say(text: str) -> None:
    """A line of a tool that runs here."""
    answer({"event": "log", "text": text})


def answer(message: dict[str, Any]) -> None:
    sys.stdout.write(f"{PREFIX}{json.dumps(message)}\n")
    sys.stdout.flush()


def listen(requests: queue.Queue[str], heard: Callable[[], None]) -> None:
    """Read lines from standard input until it ends or nothing comes for SILENCE_S; then end this
    process, whatever it does."""
    handle = sys.stdin.fileno()
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        while selector.select(SILENCE_S):
            block = os.read(handle, 1 << 16)
            if not block:
                break
            heard()
            *lines, pending = (pending + block).split(b"\n")
            for line in filter(None, lines):
                requests.put(line.decode())
    installing.stop()
    os._exit(4)


def main(root: str, make: bool) -> None:
    """Answer requests: {"do": method of Work, …its arguments}."""
    os.umask(0o022)
    try:
        work = Work(Path(root), make=make, say=say)
    except Refused as refused:
        refuse(refused)
        return
    requests: queue.Queue[str] = queue.Queue()

    def heard() -> None:
        if work.lock:
            work.lock.beat()

    threading.Thread(target=listen, args=(requests, heard), daemon=True).start()
    answer({"event": "ready", "host": os.uname().nodename})
    while True:
        request = json.loads(requests.get())
        try:
            answer({"event": "done", "result": getattr(work, request.pop("do"))(**request)})
        except Refused as refused:
            refuse(refused)
        except OSError as error:
            full = error.errno in (28, 122)
            refuse(
                Refused(
                    DISK if full else ENVIRONMENT,
                    "No space left on this node." if full else f"The node's system refused: {error.strerror}.",
                    cause=str(error), remedy="Free some space there, then run the same command again." if full
                    else "Mend that there, then run the same command again.",
                )
            )  # fmt: skip
        except Exception as error:
            refuse(Refused(CHECK, f"The node's side failed: {type(error).__name__}: {error}"))


def refuse(refused: Refused) -> None:
    answer(
        {
            "event": "refused", "kind": refused.kind, "what": refused.what, "cause": refused.cause,
            "remedy": refused.remedy, "details": refused.details,
        }
    )  # fmt: skip
