#!/usr/bin/env python3
"""May vLLM start on this node now? (ExecStartPre=)

Reports free memory and who holds it, and looks at the link, the RDMA device, the release's vllm,
compilers and the model. Reads what serve.env says (docs/serve.md). Standard library only. Exit
codes: 0 yes, 2 wrong usage, 3 no: each reason is said, and systemd asks again later.
"""

# A copy of this file goes into every wheelhouse, so it must not import sm121, and it prints by
# itself. It needs Python 3.9 or later.
from __future__ import annotations

import argparse
import os
import pwd
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sm121.serve.node.serve_node import Node, Refused, gid_index, guarded, say, tell
else:
    # -I leaves out the folder of this file, where its neighbour is. That is a wheelhouse, in which
    # nothing may appear.
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from serve_node import Node, Refused, gid_index, guarded, say, tell

GIB = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="serve_check.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--gid-index", action="store_true", help="only print NCCL_IB_GID_INDEX")
    return guarded(show_gid_index if parser.parse_args().gid_index else check)


def show_gid_index(node: Node) -> int:
    say(str(gid_index(node)))
    return 0


def check(node: Node) -> int:
    """Every question is asked, so that one start tells all. 3 if one forbids the start."""
    refused = 0
    for question in (memory, shadow, link, gids, limits, compilers, model):
        try:
            for line in question(node):
                say(line)
        except Refused as fault:
            refused += 1
            tell(fault)
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


def meminfo(proc: Path) -> dict[str, int]:
    """/proc/meminfo (proc(5)) in bytes."""
    facts = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        facts[name] = int(rest.split()[0]) * 1024
    return facts


def processes(proc: Path) -> Iterator[tuple[int, int, str, str]]:
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


def gpu_processes() -> list[str]:
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


if __name__ == "__main__":
    sys.exit(main())
