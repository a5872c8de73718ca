"""Two hosts on this machine: network namespaces joined by veth, a real sshd on the second.

Each has its own network, home folder, host key, and file system at the nodes' folder (a mount
namespace with a bind mount), so the *same* path is another place on each, as on two machines.
Needs root, and openssh-server, rsync and iproute2 (.ci/run).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.tools import ROOT, run, tool

# Of documentation (RFC 5737): no such host exists anywhere.
HEAD, WORKER = "192.0.2.1", "192.0.2.2"
NAME = "worker"


def make_key(file: Path) -> None:
    """A new ssh key without a passphrase."""
    run(tool("ssh-keygen", "openssh-client"), "-q", "-t", "ed25519", "-N", "", "-f", file)


@dataclass
class Hosts:
    """folder: of this pair. root: the nodes' folder, the same path on both."""

    folder: Path
    tag: str
    root: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sshd: subprocess.Popen[bytes] | None = None
    path: str = ""
    peculiar: bool = False

    @property
    def head(self) -> str:
        return f"{self.tag}h"

    @property
    def worker(self) -> str:
        return f"{self.tag}w"

    def disk(self, host: str) -> Path:
        """What lies at `root` on a host (`head` or `worker`), seen from here."""
        return self.folder / host / "disk"

    def home(self, host: str) -> Path:
        return self.folder / host / "home"

    def shell(self, host: str, script: str, *more: str) -> list[str]:
        """Run a script on a host: in its network, with its home and its disk at `root`."""
        namespace = self.head if host == "head" else self.worker
        mounts = (
            f"mount --bind {self.disk(host)} {self.root} && mount --bind {self.folder}/{host}/passwd "
            f"/etc/passwd && mount -t tmpfs tmpfs /run && mkdir -p /run/sshd && cd {self.home(host)} && "
        )
        return [
            "ip", "netns", "exec", namespace, "env", f"HOME={self.home(host)}", "sh", "-c",
            mounts + script, "sh", *more,
        ]  # fmt: skip

    # -- making ---------------------------------------------------------------------------------
    def make(self) -> None:
        self.root.mkdir(parents=True)
        for host in ("head", "worker"):
            self.disk(host).mkdir(parents=True)
            self.home(host).mkdir()
            account = f"root:x:0:0:root:{self.home(host)}:/bin/sh\n"
            others = [line for line in Path("/etc/passwd").read_text().splitlines(keepends=True) if not line.startswith("root:")]  # fmt: skip
            (self.folder / host / "passwd").write_text(account + "".join(others))
        programs = self.folder / "worker/bin"
        programs.mkdir()
        base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        (programs / "python3").symlink_to(base)
        self.path = f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin"
        for key in ("client", "host_key"):
            make_key(self.folder / key)
        run("ip", "netns", "add", self.head)
        run("ip", "netns", "add", self.worker)
        run("ip", "-n", self.head, "link", "add", "direct0", "type", "veth", "peer", "name", "direct0",
            "netns", self.worker)  # fmt: skip
        for name, address in ((self.head, HEAD), (self.worker, WORKER)):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "direct0")
            run("ip", "-n", name, "link", "set", "direct0", "mtu", "9000", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        self.know(self.folder / "host_key.pub")
        (self.folder / "ssh_config").write_text(
            f"Host {NAME}\n HostName {WORKER}\n User root\n IdentityFile {self.folder}/client\n"
            f" UserKnownHostsFile {self.folder}/known_hosts\n GlobalKnownHostsFile /dev/null\n"
        )
        shutil.copy(self.folder / "client.pub", self.folder / "authorized_keys")
        self.serve()

    def know(self, public: Path) -> None:
        """Make a public key the worker's known one."""
        kind, key, *_ = public.read_text().split()
        (self.folder / "known_hosts").write_text(f"{NAME},{WORKER} {kind} {key}\n")

    def serve(self, *, disk: str = "", **variables: str) -> None:
        """(Re)start the worker's sshd. disk: a script that mounts something at `root` before.
        variables: of every session there (sshd_config takes one SetEnv)."""
        self.stop_sshd()
        self.peculiar = bool(disk or variables)
        config = self.folder / "sshd_config"
        config.write_text(
            "\n".join(
                [
                    f"ListenAddress {WORKER}", f"HostKey {self.folder}/host_key",
                    f"AuthorizedKeysFile {self.folder}/authorized_keys", "PidFile none", "UsePAM no",
                    "StrictModes no", "PasswordAuthentication no", "PermitRootLogin prohibit-password",
                    "SetEnv " + " ".join(f"{n}={v}" for n, v in {"PATH": self.path, **variables}.items()), "MaxStartups 50:30:100", "",
                ]
            )
        )  # fmt: skip
        sshd = tool("sshd", "openssh-server") if shutil.which("sshd") else "/usr/sbin/sshd"
        log = (self.folder / "sshd.log").open("ab")
        self.sshd = subprocess.Popen(
            self.shell("worker", f"{disk or 'true'} && exec {sshd} -D -e -f {config}"),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            probe = subprocess.run(
                ["ip", "netns", "exec", self.head, "ssh", "-F", str(self.folder / "ssh_config"), "-o",
                 "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", NAME, "true"],
                capture_output=True, check=False,
            )  # fmt: skip
            if probe.returncode == 0:
                return
            time.sleep(0.05)
        pytest.fail(
            f"sshd does not answer:\n{(self.folder / 'sshd.log').read_text()}\n{probe.stderr.decode()}"
        )

    def stop_sshd(self) -> None:
        if self.sshd is not None:
            self.end_processes(self.worker)
            self.sshd.wait()
            self.sshd = None

    def end_processes(self, namespace: str) -> None:
        """Kill what runs in a namespace of ours."""
        listing = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
        )
        for pid in listing.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def wipe(self) -> None:
        """As new: empty disks, the known host key, an sshd without any peculiarity."""
        self.end_processes(self.head)
        for process in self.started:
            process.wait()
        self.started.clear()
        self.cable(True)
        for host in ("head", "worker"):
            for place in (self.disk(host), self.home(host)):
                for entry in place.iterdir():
                    shutil.rmtree(
                        entry
                    ) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        self.know(self.folder / "host_key.pub")
        if self.peculiar:
            self.serve()

    def cable(self, plugged: bool) -> None:
        """Plug the cable between the hosts, or pull it."""
        run("ip", "-n", self.head, "link", "set", "direct0", "up" if plugged else "down")

    def set_mtu(self, mtu: int) -> None:
        """Set the worker's end of the cable to an MTU."""
        run("ip", "-n", self.worker, "link", "set", "direct0", "mtu", str(mtu))

    def seed(self, house: Path, *hosts: str) -> None:
        """Put the largest wheel, uv, into the hosts' stores: what is there is not sent."""
        (wheel,) = house.glob("uv-*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        for host in hosts or ("worker",):
            (self.disk(host) / "store").mkdir(exist_ok=True)
            shutil.copyfile(wheel, self.disk(host) / "store" / digest)

    def remove(self) -> None:
        for namespace in (self.head, self.worker):
            self.end_processes(namespace)
        for process in [*self.started, *([self.sshd] if self.sshd else [])]:
            process.wait()
        for namespace in (self.head, self.worker):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)

    # -- using ----------------------------------------------------------------------------------
    def command(self, *arguments: str) -> list[str]:
        """`python -m sm121 sync` on the head, with the pair's ssh configuration."""
        words = ["sync", "--root", str(self.root), "--ssh-config", str(self.folder / "ssh_config"), *arguments]  # fmt: skip
        return self.shell("head", 'cd "$0" && exec "$@"'.replace('"$0"', str(self.folder / "checkout")), sys.executable, "-m", "sm121", *words)  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}

    def sync(self, *arguments: str, code: int | None = 0, timeout: float = 100) -> str:
        """Run it to its end; returns all that it printed."""
        done = subprocess.run(
            self.command(*arguments), env=self.environment(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False, timeout=timeout,
        )  # fmt: skip
        assert code in (None, done.returncode), done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start it; output goes to `begun.log`."""
        with (self.folder / "begun.log").open("wb") as log:
            process = subprocess.Popen(
                self.command(*arguments), env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.started.append(process)
        return process

    def ended(self, process: subprocess.Popen[bytes], *, code: int) -> str:
        """Wait for what begin() started; returns what it said."""
        got = process.wait(timeout=90)
        said = (self.folder / "begun.log").read_text()
        assert got == code, said
        assert "Traceback" not in said
        return said

    def wait_for(self, what: str, done: object, seconds: float = 20) -> None:
        """Poll until done() is true."""
        end = time.monotonic() + seconds
        while not done():  # type: ignore[operator]
            assert time.monotonic() < end, (
                f"waited in vain for {what}\n{(self.folder / 'begun.log').read_text()}"
            )
            time.sleep(0.05)

    def current(self, host: str = "worker") -> str:
        """Id of the current release of a host, '' if none."""
        link = self.disk(host) / "current"
        return link.readlink().name if link.is_symlink() else ""

    def on(self, host: str, *argv: str | Path, code: int = 0) -> str:
        """Run a program on a host."""
        done = subprocess.run(self.shell(host, 'exec "$@"', *map(str, argv)), capture_output=True, text=True, check=False, env=self.environment())  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def remote(self, command: str) -> str:
        """Run a command on the worker as `sync` does: by a non-interactive ssh."""
        ssh = ["ssh", "-F", str(self.folder / "ssh_config"), NAME, command]
        return self.on("head", *ssh)

    def site(self, host: str = "worker") -> Path:
        """site-packages of a host's current environment, seen from here."""
        (site,) = (self.disk(host) / "current/env").resolve().glob("lib/python3*/site-packages")
        return site


def pair(folder: Path, tag: str) -> Iterator[Hosts]:
    """Make two hosts, and remove them."""
    for program, package in (("ip", "iproute2"), ("rsync", "rsync"), ("ssh", "openssh-client")):
        tool(program, package)
    if os.geteuid() != 0:
        pytest.fail("two hosts are made of network namespaces, which needs root")
    hosts = Hosts(folder=folder, tag=tag, root=folder / "node")
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()
