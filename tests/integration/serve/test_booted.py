"""The rendered units under a real systemd on two nodes: any boot order, and each way to break.

There is no GPU for vLLM here. What stands in its place (RANK) has vLLM's processes, and what is
relevant of them: the ranks meet at master-addr, and then wait for ever, whatever becomes of the
other. test_ranks_of_torch has torch's own rendezvous, as vLLM calls it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sm121.serve.load import SCRIPTS, load_serve
from sm121.serve.model import Serve
from sm121.serve.nodes import Nodes
from sm121.serve.render import render, unit_name
from support.booted import ADDRESSES, HOME, LINK, Booted, Two, two_booted
from support.nodes import two_nodes
from support.tools import run

ROOT = Path(__file__).resolve().parents[3]
PYTHON = "/usr/bin/python3"
# Each wait fails by itself after 40 s.
pytestmark = pytest.mark.timeout(300)

# `vllm serve`: a child with a title of its own is the rank, as vLLM has it.
VLLM = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
print("vllm", *words, flush=True)
print("sees", os.environ.get("NCCL_IB_GID_INDEX"), os.getcwd(), os.listdir("."), flush=True)
rank = [value("--node-rank"), value("--master-addr"), value("--master-port")]
child = subprocess.Popen(["VLLM::Worker_TP" + rank[0], "-c", {code!r}, *rank], executable=sys.executable)
sys.exit(child.wait())
"""
RANK = """
import socket, sys, time
rank, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if rank == "0":
    server = socket.create_server((address, port))
    other, _ = server.accept()
else:
    while True:
        try:
            other = socket.create_connection((address, port), timeout=5)
            break
        except OSError:
            time.sleep(0.1)
other.settimeout(None)
other.sendall(b"x")
other.recv(1)
print("rank", rank, "joined", flush=True)
time.sleep(1e6)
"""


def serve_fast() -> Serve:
    """The real one with short times."""
    real = load_serve(ROOT / "pins", "0.26.0")
    data = real.model_dump(by_alias=True)
    for key, seconds in (("restart", 1), ("stop", 2), ("lost-peer", 3)):
        data["service"][f"{key}-seconds"]["value"] = seconds
    return Serve.model_validate(data)


def nodes_here(**changes: Any) -> Nodes:
    data = two_nodes() | {
        "root": f"{HOME}/sm121", "user": "nobody", "model": f"{HOME}/model", "cuda-home": f"{HOME}/cuda",
        # Of this machine's memory, whatever else runs on it.
        "gpu-memory-utilization": 0.11,
    } | changes  # fmt: skip
    for name, address in zip(("head", "worker"), ADDRESSES, strict=True):
        data[name] |= {"address": address, "interface": LINK, "hca": []}
    return Nodes.model_validate(data)


def install(
    node: Booted, nodes: Nodes, rank: int, *, code: str = RANK, python: str = "", changes: str = ""
) -> None:
    """A release on a node, laid out as sync does, and its unit. python: of the rank, if another."""
    release = node.disk / "sm121/releases/1"
    (release / "wheelhouse").mkdir(parents=True)
    (node.disk / "sm121/current").symlink_to("releases/1")
    for script in SCRIPTS:
        shutil.copy(script, release / "wheelhouse")
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", release / "env"], check=True)
    (site,) = release.glob("env/lib/python3*/site-packages")
    (site / "vllm").mkdir()
    (site / "vllm/__init__.py").write_text("raise SystemExit('vllm is not to be imported here')\n")
    program = release / "env/bin/vllm"
    program.write_text(
        VLLM.format(python=python or f"{nodes.root}/current/env/bin/python", code=code)
    )
    (node.disk / "model").mkdir()
    (node.disk / "model/config.json").write_text("{}")
    nvcc = node.disk / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    for file in (program, nvcc):
        file.chmod(0o755)
    files = render(serve_fast(), nodes, rank, stack="0.26.0").files
    (release / "serve").mkdir()
    (release / "serve/serve.env").write_text(files["serve.env"])
    node.unit(unit_name(rank), files[unit_name(rank)], changes=f"RestartSec=200ms\n{changes}")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with two_booted(tmp_path) as nodes:
        yield nodes


@pytest.fixture
def served(two: Two) -> Two:
    """Both installed, none booted."""
    for rank, node in enumerate((two.head, two.worker)):
        install(node, nodes_here(), rank)
    return two


def joined(two: Two, times: int) -> bool:
    """Did both ranks join so often?"""
    return all(node.log().count(" joined\n") >= times for node in (two.head, two.worker))


def test_the_head_retries_until_its_worker_is_there(served: Two) -> None:
    """Its rendezvous timed out, which ends vLLM: systemd starts it again, as often as it takes."""
    release = served.head.disk / "sm121/current/env/bin/vllm"
    text = release.read_text()
    release.write_text(text.replace("other, _ = server.accept()", "server.settimeout(0.5)\\n    other, _ = server.accept()"))  # fmt: skip
    served.head.boot()
    served.until("three starts", lambda: served.head.log().count("vllm serve") >= 3)
    assert "vLLM ended with status 1" in served.head.log()
    release.write_text(text)
    served.worker.boot()
    served.until("both", lambda: joined(served, 1))


def _meetings(log: str) -> int:
    """How often this node met the other one; 0 while it has not since its last start."""
    last = log.rpartition("vllm serve")[2]
    together = (
        "met the other node" in last and " is lost: " not in last and "vLLM ended" not in last
    )
    return log.count("met the other node") if together else 0


def test_any_boot_order_and_each_way_to_lose_the_other_node(served: Two) -> None:
    head, worker = served.head, served.worker

    def together(times: int) -> None:
        """They met so often at least, and stay so for longer than the helpers take to look."""
        since = [time.monotonic()]

        def stay() -> bool:
            if not all(_meetings(node.log()) >= times for node in (head, worker)):
                since[0] = time.monotonic()
            return time.monotonic() - since[0] > 1.3

        served.until(f"meeting {times}", stay)

    worker.boot()
    served.until("the worker's start", lambda: "vllm serve" in worker.log())
    head.boot()
    together(1)
    log = worker.log()
    assert log.count("vllm serve") == 1  # it waited, and was not started twice
    assert "--headless" in log
    assert "sees None /run/sm121-serve []" in log  # cases.md 24
    assert f"vllm: {HOME}/sm121/" in log
    rank = next(pid for pid, line in worker.pids().items() if line.startswith("VLLM::"))
    assert Path(f"/proc/{rank}").owner() == "nobody"
    # The worker's rank alone is killed: its head would wait for it for ever.
    assert worker.kill("VLLM::Worker_TP1") == 1
    together(2)
    assert "the other node (192.0.2.2) is lost: " in head.log()
    # All of the head's service is killed.
    assert head.kill("VLLM::") + head.kill("serve_start.py") >= 2
    together(3)
    assert "the other node (192.0.2.1) is lost: " in worker.log()
    # The worker's plug is pulled, of which the head hears nothing.
    worker.power_off()
    served.until("the head's notice", lambda: "lost: silent for" in head.log())
    worker.boot()
    together(4)
    # One rank on each: nothing of the starts before is left.
    for node in (head, worker):
        assert sum(line.startswith("VLLM::") for line in node.pids().values()) == 1


def test_no_process_outlives_its_service(served: Two) -> None:
    """A grandchild in a session of its own that ignores SIGTERM, and a helper that is killed."""
    stubborn = "trap '' TERM; while :; do sleep 0.2; done"
    program = served.head.disk / "sm121/current/env/bin/vllm"
    program.write_text(
        f"#!/bin/sh\nsetsid sh -c '{stubborn.replace(chr(39), chr(34))}' VLLM::Stubborn &\n"
        "echo vllm started; sleep 1000\n"
    )
    drop_in = served.head.disk / f"units/{unit_name(0)}.d/test.conf"
    drop_in.write_text(drop_in.read_text() + "TimeoutStopSec=1\n")

    def stubborn_ones() -> set[int]:
        return {p for p, line in served.head.pids().items() if line.startswith("sh -c trap")}

    served.head.boot()
    served.until("the start", lambda: len(stubborn_ones()) == 1)
    before = stubborn_ones()
    served.head.kill("serve_start.py")
    served.until("the second start", lambda: served.head.log().count("vllm started") >= 2)
    served.until("its child", lambda: len(stubborn_ones()) == 1)
    assert not before & stubborn_ones()


# torch's own, as init_distributed_environment calls it, with gloo: NCCL needs a GPU.
TORCH = """
import sys, time
from datetime import timedelta
sys.path[:0] = {sites!r}
import torch.distributed as dist
rank, address, port = sys.argv[1:4]
dist.init_process_group(
    "gloo", init_method=f"tcp://{{address}}:{{port}}", world_size=2, rank=int(rank), timeout=timedelta(seconds=60)
)
dist.barrier()
print("rank", rank, "joined", flush=True)
time.sleep(1e6)
"""


def test_ranks_of_torch(two: Two, torch_python: Path) -> None:
    """The helper sees the connection of torch's store, and when it closes."""
    own = "import json, sys; print(json.dumps(sys.path[1:]))"
    sites = json.loads(run(torch_python, "-c", own).stdout)
    for rank, node in enumerate((two.head, two.worker)):
        # Root: torch may lie in a home folder.
        install(node, nodes_here(), rank, code=TORCH.format(sites=sites), python=str(torch_python), changes="User=root\n")  # fmt: skip
    two.worker.boot()
    two.head.boot()
    two.until("both", lambda: joined(two, 1), 100)
    two.until("the helpers", lambda: all("met the other node" in n.log() for n in (two.head, two.worker)))  # fmt: skip
    assert two.worker.kill("VLLM::Worker_TP1") == 1
    two.until("the head's notice", lambda: "lost: its connection is closed" in two.head.log() or "it started anew" in two.head.log())  # fmt: skip
    two.head.kill("VLLM::")


def test_a_refused_start_says_all_reasons_and_is_tried_again(served: Two) -> None:
    head = served.head
    (site,) = head.disk.glob("sm121/releases/1/env/lib/python3*/site-packages")
    gone = {head.disk / "model/config.json", head.disk / "cuda/bin/nvcc", site / "vllm"}
    for path in gone:
        path.rename(head.disk / path.name)
    head.boot()
    said = (
        "refused: there is no model in /mnt/model", "refused: there is no compiler /mnt/cuda/bin/nvcc",
        "refused: the release has no vllm", "3 reason(s) above; tried again by systemd",
    )  # fmt: skip
    served.until("two refusals", lambda: all(head.log().count(line) >= 2 for line in said))
    assert "vllm serve" not in head.log()
    for path in gone:
        (head.disk / path.name).rename(path)
    served.until("the start", lambda: "vllm serve" in head.log())


def test_too_little_memory_refuses_the_start(two: Two) -> None:
    install(two.head, nodes_here(**{"gpu-memory-utilization": 0.999}), 0)
    two.head.boot()
    two.until("the refusal", lambda: "too little memory is available" in two.head.log())
    assert "(the largest that would start now)" in two.head.log()
    assert "vllm serve" not in two.head.log()
