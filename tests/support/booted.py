"""Two nodes on this machine, each with systemd as its first process.

A node has namespaces of its own for processes, network, mounts and cgroups; a veth pair is the
link. systemd (Debian's own) sees only the units that a test gives it. Needs root, systemd and
iproute2 (.ci/run).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.tools import tool

# Where a node sees its own disk.
HOME = Path("/mnt")
LINK = "direct0"
# Of documentation (RFC 5737): no such host exists anywhere.
ADDRESSES = ("192.0.2.1", "192.0.2.2")
_TARGETS = ("basic", "sysinit", "shutdown", "umount", "final", "exit", "network-online")

# The cgroup of the node becomes the root of what it sees, so that nothing of it stays elsewhere.
_OUTER = """
set -e
mkdir -p {work}/cgroup
mount -t cgroup -o none,name=systemd systemd {work}/cgroup 2>/dev/null || mount -t cgroup2 none {work}/cgroup
mkdir -p {work}/cgroup/{tag}
echo $$ > {work}/cgroup/{tag}/cgroup.procs
exec unshare --mount --pid --fork --uts --ipc --cgroup --kill-child=KILL sh {work}/inner
"""
_INNER = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount --bind {disk} {home}
mount -t tmpfs tmpfs /var/cache
mount -t tmpfs tmpfs /sys/fs/cgroup
mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd,xattr systemd /sys/fs/cgroup/systemd 2>/dev/null || {{
  umount /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; }}
exec env -i container=sm121 PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_UNIT_PATH={home}/units \\
  SYSTEMD_LOG_TARGET=console SYSTEMD_LOG_LEVEL=info \\
  /lib/systemd/systemd --system --unit=multi-user.target --show-status=no
"""


@dataclass
class Booted:
    """One node. disk: what it sees at HOME."""

    folder: Path
    tag: str
    process: subprocess.Popen[bytes] | None = None
    boots: int = 0

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    def unit(self, name: str, text: str, *, changes: str = "") -> None:
        """Give it a unit that it starts at boot; its output goes to disk/log. changes: a drop-in."""
        units = self.disk / "units"
        own = units / f"{name}.d"
        own.mkdir(parents=True, exist_ok=True)
        (units / name).write_text(text)
        out = f"StandardOutput=append:{HOME}/log\nStandardError=append:{HOME}/log\n"
        (own / "test.conf").write_text(f"[Unit]\nDefaultDependencies=no\n[Service]\n{out}{changes}")
        (units / "multi-user.target").write_text(f"[Unit]\nDescription=all\nWants={name}\nAllowIsolate=yes\n")  # fmt: skip
        for target in _TARGETS:
            (units / f"{target}.target").write_text(f"[Unit]\nDescription={target}\nDefaultDependencies=no\n")  # fmt: skip

    def boot(self) -> None:
        ip("-n", self.tag, "link", "set", LINK, "up")
        texts = {"outer": _OUTER, "inner": _INNER}
        for name, text in texts.items():
            (self.folder / name).write_text(text.format(work=self.folder, tag=self.tag, disk=self.disk, home=HOME))  # fmt: skip
        with (self.folder / "console").open("ab") as console:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.tag, "unshare", "--mount", "sh", self.folder / "outer"],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        self.boots += 1

    def power_off(self) -> None:
        """At once, as if its plug were pulled: nobody is told, no connection is closed."""
        if self.process is None:
            return
        # The link goes first, so that no last packet of a dying socket gets out.
        ip("-n", self.tag, "link", "set", LINK, "down")
        self._end()

    def _end(self) -> None:
        """Kill its first process, and with it all others (pid_namespaces(7))."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        end = time.monotonic() + 10
        while listed := self._listed():
            assert time.monotonic() < end, listed
            for pid in listed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def remove(self) -> None:
        self._end()
        ip("netns", "del", self.tag)
        remove_cgroup(self.tag)

    def _listed(self) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.tag], capture_output=True, text=True)
        return [int(word) for word in done.stdout.split()]

    def log(self) -> str:
        return _text(self.disk / "log")

    def console(self) -> str:
        return _text(self.folder / "console")

    def pids(self) -> dict[int, str]:
        """Its processes as this machine numbers them, with their command lines; zombies not."""
        found = {}
        for pid in self._listed():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if line:
                found[pid] = line.strip()
        return found

    def kill(self, part: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill its processes whose command line has this; returns how many."""
        found = [pid for pid, line in self.pids().items() if part in line]
        for pid in found:
            os.kill(pid, number)
        return len(found)


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.is_file() else ""


@dataclass
class Two:
    head: Booted
    worker: Booted

    def until(self, what: str, done: Callable[[], bool], seconds: float = 40) -> None:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                parts = [n.console()[-2000:] + n.log()[-6000:] for n in (self.head, self.worker)]  # fmt: skip
                pytest.fail(f"waited in vain for {what}\n" + "\n----\n".join(parts))
            time.sleep(0.05)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_booted(folder: Path) -> Iterator[Two]:
    """Two nodes with a link and nothing on their disks, not booted yet; removed at the end."""
    for program, package in (
        ("ip", "iproute2"),
        ("unshare", "util-linux"),
        ("systemd-analyze", "systemd"),
    ):
        tool(program, package)
    if os.geteuid() != 0:
        pytest.fail("two nodes are made of namespaces, which needs root")
    nodes = [Booted(folder / name, f"sb{os.getpid()}{name[0]}") for name in ("head", "worker")]
    try:
        for node in nodes:
            node.disk.mkdir(parents=True)
            node.disk.chmod(0o755)
            ip("netns", "add", node.tag)
        first, second = (node.tag for node in nodes)
        ip("-n", first, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", second)
        for node, address in zip(nodes, ADDRESSES, strict=True):
            ip("-n", node.tag, "addr", "add", f"{address}/24", "dev", LINK)
            ip("-n", node.tag, "link", "set", LINK, "mtu", "9000", "up")
            ip("-n", node.tag, "link", "set", "lo", "up")
        yield Two(*nodes)
    finally:
        with contextlib.ExitStack() as each:
            for node in nodes:
                each.callback(node.remove)


def remove_cgroup(tag: str) -> None:
    """What systemd left of the node's cgroup, by a mount of its own. A process that has just ended
    keeps its cgroup busy for a moment."""
    script = (
        "d=$(mktemp -d); mount -t cgroup -o none,name=systemd systemd $d 2>/dev/null || "
        "mount -t cgroup2 none $d; for n in $(seq 50); do [ -d $d/$0 ] || break; "
        "find $d/$0 -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1; done; "
        "[ ! -d $d/$0 ]; s=$?; umount $d; rmdir $d; exit $s"
    )
    subprocess.run(["unshare", "--mount", "sh", "-c", script, tag], check=True, capture_output=True)
