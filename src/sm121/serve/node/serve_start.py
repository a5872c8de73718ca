#!/usr/bin/env python3
"""Run vLLM on a node of two until it, or the other node, ends. (ExecStart=)

    serve_start.py -- COMMAND

Looks up the GID index of this boot first. Reads what serve.env says (docs/serve.md). Standard
library only. Exit codes: 0 told to end, 2 wrong usage, 3 this node can't, 4 the other node was
lost or vLLM ended well, else vLLM's own.
"""

# A copy of this file goes into every wheelhouse, so it must not import sm121, and it prints by
# itself. It needs Python 3.9 or later.
from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm121.serve.node.serve_node import Node, Refused, gid_index, guarded, rendezvous, say
else:
    # -I leaves out the folder of this file, where its neighbour is. That is a wheelhouse, in which
    # nothing may appear.
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from serve_node import Node, Refused, gid_index, guarded, rendezvous, say

POLL_SECONDS = 1.0
DEAF_SECONDS = 20.0
GID_INDEX = "NCCL_IB_GID_INDEX"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="serve_start.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("command", nargs="*", help="what to run, after --")
    parser.add_argument("--system", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    # What comes after -- is vLLM's, options and all.
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    if options.command or not command:
        parser.error("what to run comes after --")
    return guarded(lambda node: start(node, command), options.system)


def start(node: Node, command: list[str]) -> int:
    """Run the command until it ends (its status, or 4 for 0), we are told to end (0), or the
    other node is lost (4: systemd starts us anew, and both meet again)."""
    environment = dict(node.environment)
    if node.hcas:
        environment[GID_INDEX] = str(gid_index(node))
        say("{}={}".format(GID_INDEX, environment[GID_INDEX]))
    else:
        environment.pop(GID_INDEX, None)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _frame: told.append(n))
    become_reaper()
    watch = Watch(node)
    try:
        child = subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        watch.close()
        raise Refused(
            "{} does not start: {}".format(command[0], error.strerror), "run sync again"
        ) from error
    try:
        while not told:
            try:
                status = child.wait(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                status = None
            if status is not None:
                say("vLLM ended with status {}".format(status))
                return status if 0 < status < 256 else 4
            if lost := watch.lost():
                say("the other node ({}) is lost: {}; starting anew".format(node.peer, lost))
                return 4
        return 0
    finally:
        end(child, node.stop_seconds)
        watch.close()


def become_reaper() -> None:
    """Orphans of vLLM become our children (prctl(2), PR_SET_CHILD_SUBREAPER), so end() sees them."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)


def end(child: Any, seconds: float) -> None:
    """SIGTERM, then SIGKILL for what is still there after these seconds; children's children too."""
    deadline = time.monotonic() + seconds
    number = int(signal.SIGTERM)
    while mine := descendants(os.getpid()):
        for pid in mine:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        # Asked once, then waited for.
        number = int(signal.SIGKILL) if time.monotonic() > deadline else 0
        child.poll()
        reap()
        time.sleep(0.05)
    reap()


def reap() -> None:
    """Wait for children that ended already."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def descendants(root: int) -> list[int]:
    """Pids of all processes below one that are no zombies, by /proc/PID/stat (proc(5))."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: set[int] = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {root})


class Watch:
    """Is the other node still in the group that we joined?

    vLLM itself does not ask: a worker whose head is gone waits for its next order for ever, and
    a head without requests does not notice a lost worker (v1/executor/multiproc_executor.py
    watches local processes only). Then the one that starts anew would meet an old store. So both
    start helpers tell each other that they are alive, once a second, by UDP on the port after the
    rendezvous' one; what counts only starts once vLLM's ranks have met (an established connection
    of the rendezvous), since before it each just waits.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.session = "{}-{}".format(os.getpid(), time.time_ns())
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self.socket.bind((node.address, node.port + 1))
        except OSError as error:
            self.socket.close()
            raise Refused(
                "can't listen at {} port {} (UDP): {}".format(
                    node.address, node.port + 1, error.strerror
                ),
                "ss -ulpn shows who does; is vLLM started twice?",
            ) from error
        self.socket.setblocking(False)
        self.heard = ""
        self.heard_at = 0.0
        self.met = ""
        self.missing = 0
        self.joined_at = 0.0
        self.warned = False
        # Before our vLLM can join: the other node is to know us from the run before.
        self._talk(time.monotonic())

    def close(self) -> None:
        self.socket.close()

    def lost(self) -> str:
        """Say that we are here; why the other node is lost, or ''."""
        now = time.monotonic()
        self._talk(now)
        connected = rendezvous(self.node)
        if not self.met:
            # Both: a helper of before could be heard while its vLLM is going.
            if connected and self.heard and now - self.heard_at < 3 * POLL_SECONDS:
                self.met = self.heard
                say("met the other node ({})".format(self.node.peer))
            self._warn(now, connected)
            return ""
        self.missing = 0 if connected else self.missing + 1
        if self.missing > 2:
            return "its connection is closed"
        if self.heard != self.met:
            return "it started anew"
        if now - self.heard_at > self.node.lost_seconds:
            return "silent for {:.0f} s".format(now - self.heard_at)
        return ""

    def _warn(self, now: float, connected: bool) -> None:
        """Once, if the ranks have met and its script is not heard all the same."""
        self.joined_at = (self.joined_at or now) if connected else 0.0
        if (
            self.joined_at
            and not self.met
            and not self.warned
            and now - self.joined_at > DEAF_SECONDS
        ):
            self.warned = True
            say(
                "warning: vLLM's ranks have met, but nothing is heard from {} by UDP port {} (a firewall?): "
                "if it is lost, that will not be noticed here".format(
                    self.node.peer, self.node.port + 1
                )
            )

    def _talk(self, now: float) -> None:
        try:
            self.socket.sendto(self.session.encode(), (self.node.peer, self.node.port + 1))
        except OSError:
            pass  # no route while the link is down: silence says it
        while True:
            try:
                data, (sender, _) = self.socket.recvfrom(256)
            except OSError:
                return  # nothing more is there
            if sender == self.node.peer:
                self.heard, self.heard_at = data.decode(errors="replace"), now


if __name__ == "__main__":
    sys.exit(main())
