"""The talk with a node: its side is sent as text, and answers requests until we close.

One ssh connection; on the node nothing is installed, and nothing needed but a Python 3.11 or later.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sm121 import proc
from sm121.errors import (
    Busy,
    DiskFull,
    EnvironmentFault,
    HashMismatch,
    NodeFault,
    Sm121Error,
    ToolFailed,
)  # fmt: skip
from sm121.sync.failure import explain
from sm121.sync.hosts import Node
from sm121.sync.node.lock import BEAT_S
from sm121.sync.node.main import PREFIX

# In the order in which they import one another.
_MODULES = (
    "sm121.abi.source", "sm121.abi.elf_tables", "sm121.abi.elf", "sm121.repair.record",
    "sm121.doctor.facts", "sm121.sync.node.refusal", "sm121.sync.node.listing",
    "sm121.sync.node.store", "sm121.sync.node.lock", "sm121.sync.node.releases",
    "sm121.sync.node.installing", "sm121.sync.node.installed", "sm121.sync.node.work",
    "sm121.sync.node.main",
)  # fmt: skip
# -I: neither the current directory nor the environment can put another module in the place of one.
_BOOT = """import os,sys,json,types
if sys.version_info<(3,11): sys.exit("sm121: the node's python3 is %d.%d, and 3.11 or later is needed"%sys.version_info[:2])
data=b""
while not data.endswith(b"\\n"):
    block=os.read(0,65536)
    if not block: sys.exit("sm121: cut off")
    data+=block
sent=json.loads(data)
for name,text in sent["modules"].items():
    parts=name.split(".")
    for n in range(1,len(parts)):
        parent=".".join(parts[:n])
        if parent not in sys.modules:
            sys.modules[parent]=types.ModuleType(parent); sys.modules[parent].__path__=[]
    module=types.ModuleType(name); sys.modules[name]=module
    setattr(sys.modules[".".join(parts[:-1])],parts[-1],module)
    exec(compile(text,name,"exec"),module.__dict__)
module.main(sent["root"],sent["make"])
"""
_ERRORS: dict[str, type[Sm121Error]] = {
    "check": NodeFault, "hash": HashMismatch, "environment": EnvironmentFault, "disk": DiskFull,
    "busy": Busy,
}  # fmt: skip


def source_of(module: str) -> str:
    """Text of one of our modules."""
    file = Path(__file__).parents[2] / f"{module.replace('.', '/')}.py"
    return file.read_text(encoding="utf-8")


def bundle(root: str, *, make: bool) -> str:
    """The first line that the node gets: its modules, as JSON."""
    modules = {name: source_of(name) for name in _MODULES}
    return json.dumps({"root": root, "make": make, "modules": modules}) + "\n"


class Agent:
    """One node's side. Requests are its methods (sm121.sync.node.work.Work)."""

    def __init__(self, node: Node, *, make: bool, log: Path) -> None:
        self.node = node
        self._log = log
        python = sys.executable if node.here else "python3"
        self._process = proc.start(node.command(python, "-I", "-c", _BOOT), log=log)
        self._guard = threading.Lock()
        self._noise: list[str] = []
        self._closed = threading.Event()
        self._send(bundle(node.root, make=make))
        try:
            # Beats only then: the node reads its modules up to the first end of line.
            self._answer(lambda _: None, until="ready")
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._beat, daemon=True).start()

    def ask(self, do: str, on_log: Callable[[str], None] = lambda _: None, **arguments: Any) -> Any:
        """Ask for something; on_log gets what programs say there. Raises an Sm121Error."""
        self._send(json.dumps({"do": do, **arguments}) + "\n")
        return self._answer(on_log, until="done").get("result")

    def close(self) -> None:
        """End the node's side, and with it its lock."""
        self._closed.set()
        with self._guard, contextlib.suppress(OSError, ValueError):
            if self._process.stdin:
                self._process.stdin.close()
        with contextlib.suppress(Exception):
            self._process.wait(timeout=3)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def _send(self, text: str) -> None:
        with self._guard, contextlib.suppress(OSError, ValueError):  # reading tells why
            if self._process.stdin:
                self._process.stdin.write(text)
                self._process.stdin.flush()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._send("\n")

    def _answer(self, on_log: Callable[[str], None], *, until: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        with self._log.open("a", encoding="utf-8", errors="replace") as log:
            for line in self._process.stdout:
                if not line.startswith(PREFIX):
                    # A banner, or ssh's own words.
                    self._noise.append(line.rstrip())
                    log.write(line)
                    continue
                message = json.loads(line.removeprefix(PREFIX))
                if message["event"] == until:
                    return dict(message)
                if message["event"] == "log":
                    log.write(message["text"] + "\n")
                    on_log(message["text"])
                elif message["event"] == "refused":
                    raise self._refusal(message)
        raise explain(self.node, self._process.wait(), self._noise, doing="talking with it")

    def _refusal(self, message: dict[str, Any]) -> Sm121Error:
        what = f"{self.node.name}: {message['what']}"
        rest = {k: message[k] for k in ("cause", "remedy", "details")}
        if message["kind"] == "tool":
            return ToolFailed(what, returncode=1, tail=rest["details"], log=self._log,
                              cause=rest["cause"], remedy=rest["remedy"])  # fmt: skip
        return _ERRORS[message["kind"]](what, **rest)


@contextmanager
def agent_on(node: Node, *, make: bool, log: Path) -> Iterator[Agent]:
    """An Agent that is closed in the end. make: a sync, which makes the node's folders."""
    agent = Agent(node, make=make, log=log)
    try:
        yield agent
    finally:
        agent.close()
