#!/usr/bin/env python3
"""Before and at the start of vLLM on a node of two: look, look up, start, and watch the other node.

    serve-node.py check                before the start (ExecStartPre=): may vLLM start here?
    serve-node.py start -- COMMAND     run it, with the GID index of this boot, until it ends or
                                       the other node does (ExecStart=)

Reads what serve.env says (SM121_* and NCCL_*, docs/serve.md). Standard library only. Exit codes:
0 done, 2 wrong usage, 3 this node cannot do it now, 4 the other node was lost or vLLM ended.
"""

# A copy of this file goes into every wheelhouse as serve-node.py, so it must not import sm121, and
# it prints by itself. It needs Python 3.8 or later.
from __future__ import annotations

import argparse
import ctypes
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

GIB = 1 << 30
POLL_SECONDS = 1.0
GID_INDEX = "NCCL_IB_GID_INDEX"


class Refused(Exception):
    """vLLM can't start here as it is: what, and what to do about it."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="serve-node.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("step", choices=("check", "start"))
    parser.add_argument("command", nargs="*", help="what `start` runs, after --")
    parser.add_argument("--system", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    words = list(sys.argv[1:] if argv is None else argv)
    # What comes after -- is vLLM's, options and all.
    cut = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:cut])
    command = words[cut + 1 :]
    if (options.step == "start") != bool(command):
        parser.error("`start` needs a command after --, `check` takes none")
    try:
        node = Node(os.environ, options.system)
        if options.step == "check":
            return check(node)
        return start(node, command)
    except Refused as refused:
        say("refused: {}".format(refused))
        if refused.remedy:
            say("   next: {}".format(refused.remedy))
        return 3


def say(text: str) -> None:
    print(text, flush=True)


class Node:
    """What serve.env says of this node and the other one. system: root of /proc and /sys."""

    def __init__(self, environment: Any, system: Path) -> None:
        try:
            self.role = environment["SM121_ROLE"]
            self.root = Path(environment["SM121_ROOT"])
            self.model = Path(environment["SM121_MODEL"])
            self.interface = environment["SM121_INTERFACE"]
            self.address = environment["SM121_ADDRESS"]
            self.peer = environment["SM121_PEER"]
            self.hcas = [name for name in environment["SM121_HCA"].split(",") if name]
            self.port = int(environment["SM121_MASTER_PORT"])
            self.memory = float(environment["SM121_MEMORY"])
            self.stop_seconds = float(environment["SM121_STOP_SECONDS"])
            self.lost_seconds = float(environment["SM121_LOST_PEER_SECONDS"])
        except (KeyError, ValueError) as error:
            raise Refused(
                "the environment is not that of serve.env: {}".format(error),
                "run it by the unit, or `set -a; . <root>/current/serve/serve.env` first",
            ) from error
        self.environment = environment
        self.proc, self.sys = system / "proc", system / "sys"


# --- check --------------------------------------------------------------------------


def check(node: Node) -> int:
    """Every question is asked, so that one start tells all. 3 if one forbids the start."""
    refused = 0
    for question in (memory, shadow, link, gids, limits, compilers, model):
        try:
            for line in question(node):
                say(line)
        except Refused as fault:
            refused += 1
            say("refused: {}".format(fault))
            if fault.remedy:
                say("   next: {}".format(fault.remedy))
    if refused:
        say("vLLM is not started: {} reason(s) above; tried again by systemd".format(refused))
    return 3 if refused else 0


def memory(node: Node) -> Iterator[str]:
    """Unified memory: does what vLLM will ask for fit, and if not, who holds it?

    vLLM asks for a fraction of the total and compares with what the kernel calls available
    (v1/worker/utils.py, request_memory; utils/mem_utils.py on integrated GPUs).
    """
    facts = meminfo(node.proc)
    total, available = facts["MemTotal"], facts["MemAvailable"]
    wanted = node.memory * total
    yield "memory: {} of {} available, vLLM asks for {} ({})".format(
        gib(available), gib(total), gib(wanted), node.memory
    )
    found = sorted(processes(node.proc), key=lambda p: -p[1])
    left = [p for p in found if p[3].startswith("VLLM::")]
    for pid, size, user, title in left:
        yield "left over: {} (pid {}, {}) holds {} and what it has on the GPU".format(
            title, pid, user, gib(size)
        )
    for pid, size, user, title in found[:5]:
        if size > GIB // 4 and not title.startswith("VLLM::"):
            yield "  {:>9}  pid {:<7} {:<10} {}".format(gib(size), pid, user, title)
    shared = facts.get("Shmem", 0)
    if shared > GIB // 4:
        yield "  {:>9}  files in memory (/dev/shm, tmpfs)".format(gib(shared))
    other = total - available - sum(p[1] for p in found) - shared
    if other > GIB:
        yield "  {:>9}  of the kernel and its drivers; GPU memory of processes is there".format(
            gib(other)
        )
        for line in gpu_processes():
            yield "             {}".format(line)
    if available < wanted:
        fits = int(available / total * 100) / 100
        raise Refused(
            "{} too little memory is available".format(gib(wanted - available)),
            (
                "end the left-over processes: kill {}".format(" ".join(str(p[0]) for p in left))
                if left
                else "end what holds it, or set gpu-memory-utilization = {} in the nodes' file "
                "(the largest that would start now)".format(fits)
            ),
        )


def meminfo(proc: Path) -> Dict[str, int]:
    """/proc/meminfo (proc(5)) in bytes."""
    facts = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        facts[name] = int(rest.split()[0]) * 1024
    return facts


def processes(proc: Path) -> Iterator[Tuple[int, int, str, str]]:
    """Pid, own memory in bytes (not shared, not of files), user and title of each process.

    The title is the first word of the command line only: the others may hold a secret.
    """
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            lines = (entry / "status").read_text(errors="replace").splitlines()
            title = (entry / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        status = dict(line.partition(":")[::2] for line in lines)
        size = int(status.get("RssAnon", "0").split()[0]) * 1024
        uid = int(status.get("Uid", "0").split()[0])
        try:
            user = pwd.getpwuid(uid).pw_name
        except KeyError:
            user = str(uid)
        name = status.get("Name", "?").strip()
        # setproctitle(3) writes the title over the command line.
        yield int(entry.name), size, user, title.strip() if title.startswith("VLLM::") else name


def gpu_processes() -> List[str]:
    """Who uses the GPU, as nvidia-smi tells any user; empty where it can't be asked."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, universal_newlines=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def shadow(node: Node) -> Iterator[str]:
    """The working directory is empty, and vllm is the release's own."""
    here = sorted(os.listdir("."))
    if here:
        raise Refused(
            "the working directory {} is not empty: {}".format(os.getcwd(), ", ".join(here[:5])),
            "start it by the unit, whose folder is made anew each time",
        )
    env = node.root / "current" / "env"
    python = env / "bin" / "python"
    # Found, not imported: that takes half a minute.
    probe = "import importlib.util as u; print(getattr(u.find_spec('vllm'), 'origin', None))"
    try:
        done = subprocess.run(
            [str(python), "-c", probe], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            universal_newlines=True, timeout=60, env=dict(node.environment),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(
            "the release's Python does not run: {}".format(error), "run sync again"
        ) from error
    origin = done.stdout.strip()
    if done.returncode or not Path(origin).is_file():
        raise Refused("the release has no vllm: {}".format(origin), "run sync again")
    if env.resolve() not in Path(origin).resolve().parents:
        raise Refused(
            "`import vllm` would take {}, not the release's".format(origin),
            "take that folder off PYTHONPATH, or away",
        )
    yield "vllm: {} ({})".format(Path(origin).parent, os.readlink(str(node.root / "current")))


def link(node: Node) -> Iterator[str]:
    """The interface is up and has the address that the other node knows."""
    folder = node.sys / "class/net" / node.interface
    if not folder.is_dir():
        have = sorted(p.name for p in folder.parent.iterdir()) if folder.parent.is_dir() else []
        raise Refused(
            "there is no interface {}; there are: {}".format(node.interface, ", ".join(have)),
            "correct the nodes' file and render it again",
        )
    state = (folder / "operstate").read_text().strip()
    mtu = int((folder / "mtu").read_text())
    yield "link: {} is {}, MTU {}".format(node.interface, state, mtu)
    if mtu < 9000:
        yield "  warning: 9000 is faster: ip link set {} mtu 9000, on both nodes".format(
            node.interface
        )
    if state in ("down", "lowerlayerdown"):
        raise Refused(
            "{} is down: the other node is off, or the cable is out".format(node.interface),
            "nothing if that node is about to boot; else look at the cable and `ip link`",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((node.address, 0))
        except OSError as error:
            raise Refused(
                "this node has no address {}: {}".format(node.address, error.strerror),
                "give it to {} (netplan), or correct the nodes' file".format(node.interface),
            ) from error


def gids(node: Node) -> Iterator[str]:
    """The GID index, as `start` will find it."""
    if not node.hcas:
        yield "RDMA: no device in the nodes' file; NCCL goes over TCP, several times slower"
        return
    index = gid_index(node)
    yield "RDMA: {} GID index {} is RoCE v2 with {}".format(
        ",".join(node.hcas), index, node.address
    )


def limits(_: Node) -> Iterator[str]:
    """RDMA pins its buffers (NCCL user guide, Troubleshooting)."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft != resource.RLIM_INFINITY:
        yield "  warning: only {} bytes of memory can be locked; the unit has LimitMEMLOCK=infinity".format(
            soft
        )


def compilers(node: Node) -> Iterator[str]:
    """What FlashInfer and DeepGEMM compile with at the first start (cases.md 20)."""
    nvcc = node.environment.get("DG_JIT_NVCC_COMPILER", "nvcc")
    if not shutil.which(nvcc):
        raise Refused(
            "there is no compiler {}: kernels that are compiled at the first start would fail".format(
                nvcc
            ),
            "install the CUDA toolkit, or correct cuda-home in the nodes' file",
        )
    if not shutil.which("ninja", path=node.environment.get("PATH", "")):
        yield "  warning: ninja is not on PATH; FlashInfer can't compile"


def model(node: Node) -> Iterator[str]:
    """The model's folder is there (it may be a mount that comes late)."""
    if not (node.model / "config.json").is_file():
        raise Refused("there is no model in {}".format(node.model), "mount it, or copy it there")
    yield "model: {}".format(node.model)


def gib(size: float) -> str:
    return "{:.1f} GiB".format(size / GIB)


# --- the GID index ------------------------------------------------------------------


def gid_table(sys_folder: Path, hca: str) -> Iterator[Tuple[int, str, str, str]]:
    """Index, type, interface and address of each GID of a port ('rocep1s0f0' or 'rocep1s0f0:1').

    Kernel: Documentation/ABI/stable/sysfs-class-infiniband. An unset entry reads as EINVAL.
    """
    device, _, number = hca.partition(":")
    port = sys_folder / "class/infiniband" / device / "ports" / (number or "1")
    if not port.is_dir():
        base = port.parents[2]
        have = sorted(p.name for p in base.iterdir()) if base.is_dir() else []
        raise Refused(
            "there is no RDMA device {}; there are: {}".format(hca, ", ".join(have) or "none"),
            "correct hca in the nodes' file and render it again",
        )
    state = (port / "state").read_text().strip()
    if not state.endswith("ACTIVE"):
        raise Refused(
            "{} is not active: {}".format(hca, state), "look at the cable and the interface"
        )
    for entry in sorted((port / "gids").iterdir(), key=lambda p: int(p.name)):
        try:
            address = IPv6Address(entry.read_text().strip())
            kind = (port / "gid_attrs/types" / entry.name).read_text().strip()
            ndev = (port / "gid_attrs/ndevs" / entry.name).read_text().strip()
        except (OSError, ValueError):
            continue
        yield int(entry.name), kind, ndev, str(address.ipv4_mapped or address)


def gid_index(node: Node) -> int:
    """NCCL_IB_GID_INDEX: of RoCE v2 with the link's IPv4, the same on every device.

    NCCL takes one index for all devices. Devices of other interfaces have other addresses.
    """
    chosen: Dict[str, int] = {}
    own = False
    for hca in node.hcas:
        table = list(gid_table(node.sys, hca))
        routable = [(i, ndev, a) for i, kind, ndev, a in table if kind == "RoCE v2" and "." in a]
        if any(ndev == node.interface for _, _, ndev, _ in table):
            fitting = [i for i, *rest in routable if rest == [node.interface, node.address]]
            own = True
        else:
            fitting = [i for i, _, _ in routable] if len(node.hcas) > 1 else []
        if not fitting:
            raise Refused(
                "{} has no RoCE v2 GID with {} of {}; it has: {}".format(
                    hca, node.address, node.interface,
                    "; ".join("{} {} {} {}".format(*row) for row in table if row[3] != "::") or "none",
                ),
                "give the address to the device's own interface (`rdma link` names it)",
            )  # fmt: skip
        chosen[hca] = fitting[0]
    if not own:
        raise Refused(
            "none of {} belongs to {}".format(", ".join(node.hcas), node.interface),
            "correct hca or interface in the nodes' file (`rdma link` shows both)",
        )
    if len(set(chosen.values())) != 1:
        raise Refused(
            "the devices have the address at different GID indices: {}".format(
                ", ".join("{} {}".format(*item) for item in chosen.items())
            ),
            "NCCL takes one index for all: name one device in the nodes' file, or give the "
            "interfaces their addresses in the same order",
        )
    return next(iter(chosen.values()))


# --- start --------------------------------------------------------------------------


def start(node: Node, command: List[str]) -> int:
    """Run the command until it ends (its status, or 4 for 0), we are told to end (0), or the
    other node is lost (4: systemd starts us anew, and both meet again)."""
    environment = dict(node.environment)
    if node.hcas:
        environment[GID_INDEX] = str(gid_index(node))
        say("{}={}".format(GID_INDEX, environment[GID_INDEX]))
    else:
        environment.pop(GID_INDEX, None)
    told: List[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _frame: told.append(n))
    become_reaper()
    watch = Watch(node)
    child = subprocess.Popen(command, env=environment, start_new_session=True)
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
    while True:
        mine = descendants(os.getpid())
        if not mine:
            break
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


def reap() -> None:
    """Wait for children that ended already."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def descendants(root: int) -> List[int]:
    """Pids of all processes below one that are no zombies, by /proc/PID/stat (proc(5))."""
    parents: Dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: Set[int] = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {root})


# --- the other node -----------------------------------------------------------------


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
        self.socket.bind((node.address, node.port + 1))
        self.socket.setblocking(False)
        self.heard = ""
        self.heard_at = 0.0
        self.met = ""
        self.missing = 0
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
            return ""
        self.missing = 0 if connected else self.missing + 1
        if self.missing > 2:
            return "its connection is closed"
        if self.heard != self.met:
            return "it started anew"
        if now - self.heard_at > self.node.lost_seconds:
            return "silent for {:.0f} s".format(now - self.heard_at)
        return ""

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


def rendezvous(node: Node) -> bool:
    """Is there an established connection between the ranks' store and the other node?

    The store (torch.distributed.TCPStore) listens on the head's master port; its clients stay
    connected as long as the group lives. /proc/net/tcp: proc(5).
    """
    for name in ("net/tcp", "net/tcp6"):
        try:
            lines = (node.proc / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] != "01":
                continue
            (_, local_port), (remote, remote_port) = end_of(fields[1]), end_of(fields[2])
            port = local_port if node.role == "head" else remote_port
            if port == node.port and str(remote) == node.peer:
                return True
    return False


def end_of(text: str) -> Tuple[Any, int]:
    """'0B01A8C0:733D' as address and port; words are in the machine's byte order."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    packed = b"".join(words if sys.byteorder == "little" else [w[::-1] for w in words])
    address = ip_address(packed)
    mapped: Optional[IPv4Address] = getattr(address, "ipv4_mapped", None)
    return mapped or address, int(port, 16)


if __name__ == "__main__":
    sys.exit(main())
