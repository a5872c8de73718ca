"""The start helper's own reading: memory and who holds it, GIDs of sysfs, connections of /proc."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sm121.serve.load import load_serve
from sm121.serve.nodes import Nodes
from sm121.serve.render import HELPER_SOURCE, variables
from support.nodes import two_nodes

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def helper() -> ModuleType:
    """As the node has it: one file, found by its path."""
    spec = importlib.util.spec_from_file_location("serve_node", HELPER_SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def node(helper: ModuleType, system: Path, role: int = 0, **changes: str):
    serve = load_serve(ROOT / "pins", "0.26.0")
    found = variables(serve, Nodes.model_validate(two_nodes()), role, stack="0.26.0")
    return helper.Node(found | changes, system)


def test_it_needs_nothing_but_the_standard_library() -> None:
    """Also isolated (-I), from a folder with a file named as a module of the library's."""
    run = subprocess.run(
        [sys.executable, "-I", "-S", HELPER_SOURCE, "--help"], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert "start -- COMMAND" in run.stdout or "check" in run.stdout


def test_without_serve_env_it_says_what_to_do() -> None:
    run = subprocess.run(
        [sys.executable, "-I", HELPER_SOURCE, "check"], capture_output=True, text=True, env={}
    )
    assert run.returncode == 3
    assert "not that of serve.env: 'SM121_ROLE'" in run.stdout
    assert "set -a; . <root>/current/serve/serve.env" in run.stdout


@pytest.mark.parametrize("argv", [["start"], ["check", "--", "x"], ["fly"]])
def test_wrong_usage(argv: list[str]) -> None:
    run = subprocess.run([sys.executable, HELPER_SOURCE, *argv], capture_output=True, text=True)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr


# --- memory -------------------------------------------------------------------------

_MIB = 1024


def machine(
    root: Path, *, total: int, available: int, processes: dict[int, tuple[str, int, str]]
) -> Path:
    """A /proc with these GiB, and processes: name, MiB of its own, command line."""
    proc = root / "proc"
    proc.mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {total << 20} kB\nMemFree: 1 kB\nMemAvailable: {available << 20} kB\nShmem: 0 kB\n"
    )
    for pid, (name, size, line) in processes.items():
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "status").write_text(
            f"Name:\t{name}\nUid:\t0\t0\t0\t0\nRssAnon:\t{size * _MIB} kB\nRssFile:\t99999999 kB\n"
        )
        (proc / str(pid) / "cmdline").write_bytes(line.replace(" ", "\0").encode())
    return root


def test_enough_memory(helper: ModuleType, tmp_path: Path) -> None:
    machine(
        tmp_path,
        total=121,
        available=110,
        processes={7: ("gnome-shell", 900, "/usr/bin/gnome-shell")},
    )
    said = list(helper.memory(node(helper, tmp_path)))
    assert said[0] == "memory: 110.0 GiB of 121.0 GiB available, vLLM asks for 105.3 GiB (0.87)"
    assert "gnome-shell" in said[1]


def test_too_little_memory_names_who_holds_it_and_what_would_start(
    helper: ModuleType, tmp_path: Path
) -> None:
    machine(
        tmp_path, total=121, available=101,
        processes={
            7: ("python3", 9000, "python3 train.py --token=hunter2secret"), 8: ("sshd", 10, "sshd"),
            9: ("jupyter", 3000, "jupyter lab"),
        },
    )  # fmt: skip
    said: list[str] = []
    with pytest.raises(helper.Refused) as caught:
        said += helper.memory(node(helper, tmp_path))
        pytest.fail("must be refused")
    assert "4.3 GiB too little memory" in str(caught.value)
    assert "gpu-memory-utilization = 0.83 " in caught.value.remedy
    lines = list(lines_until_refused(helper, node(helper, tmp_path)))
    assert [line.split()[-1] for line in lines[1:3]] == ["python3", "jupyter"]
    assert "hunter2secret" not in "\n".join(lines)
    assert "sshd" not in "\n".join(lines)


def lines_until_refused(helper: ModuleType, found) -> list[str]:
    lines: list[str] = []
    iterator = helper.memory(found)
    while True:
        try:
            lines.append(next(iterator))
        except (StopIteration, helper.Refused):
            return lines


def test_processes_that_vllm_left(helper: ModuleType, tmp_path: Path) -> None:
    machine(
        tmp_path, total=121, available=20,
        processes={41: ("VLLM::EngineCor", 5000, "VLLM::EngineCore"), 42: ("VLLM::Worker_TP", 7000, "VLLM::Worker_TP0")},
    )  # fmt: skip
    lines = lines_until_refused(helper, node(helper, tmp_path))
    assert "left over: VLLM::Worker_TP0 (pid 42, root) holds 6.8 GiB" in lines[1]
    assert "left over: VLLM::EngineCore (pid 41, root)" in lines[2]
    with pytest.raises(helper.Refused) as caught:
        list(helper.memory(node(helper, tmp_path)))
    assert caught.value.remedy == "end the left-over processes: kill 42 41"
    # What the processes do not hold is the driver's.
    assert any("of the kernel and its drivers" in line for line in lines)


def test_this_machines_own_figures(helper: ModuleType) -> None:
    facts = helper.meminfo(Path("/proc"))
    assert 0 < facts["MemAvailable"] <= facts["MemTotal"]
    with subprocess.Popen(["sleep", "30"]) as child:
        found = {pid: (user, title) for pid, _, user, title in helper.processes(Path("/proc"))}
        child.kill()
    assert found[child.pid][1] == "sleep"
    assert os.getpid() not in found


# --- GIDs ---------------------------------------------------------------------------

ROWS = [
    ("fe80:0000:0000:0000:0a00:27ff:fe00:0001", "IB/RoCE v1"),
    ("fe80:0000:0000:0000:0a00:27ff:fe00:0001", "RoCE v2"),
    ("0000:0000:0000:0000:0000:ffff:c0a8:b10b", "IB/RoCE v1"),
    ("0000:0000:0000:0000:0000:ffff:c0a8:b10b", "RoCE v2"),
]


def device(
    system: Path, name: str, rows: list[tuple[str, str]], *, ndev: str = "enp1s0f0np0",
    state: str = "4: ACTIVE", port: int = 1,
) -> None:  # fmt: skip
    """A device of /sys/class/infiniband; an empty row is one that can't be read."""
    folder = system / f"sys/class/infiniband/{name}/ports/{port}"
    for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (folder / part).mkdir(parents=True)
    (folder / "state").write_text(state + "\n")
    for index, (gid, kind) in enumerate(rows):
        (folder / "gids" / str(index)).write_text((gid or ":".join(["0000"] * 8)) + "\n")
        if gid:
            (folder / "gid_attrs/types" / str(index)).write_text(kind + "\n")
            (folder / "gid_attrs/ndevs" / str(index)).write_text(ndev + "\n")


def test_the_index_is_looked_up(helper: ModuleType, tmp_path: Path) -> None:
    device(tmp_path, "rocep1s0f0", ROWS)
    assert helper.gid_index(node(helper, tmp_path)) == 3


def test_the_index_moves_with_the_addresses(helper: ModuleType, tmp_path: Path) -> None:
    """Another address came first, and one entry is unset."""
    other = ("0000:0000:0000:0000:0000:ffff:c0a8:c90b", "RoCE v2")
    device(tmp_path, "rocep1s0f0", [ROWS[0], ("", ""), other, *ROWS[1:]])
    assert helper.gid_index(node(helper, tmp_path)) == 5


def test_ten_and_more_are_numbers_not_texts(helper: ModuleType, tmp_path: Path) -> None:
    device(tmp_path, "rocep1s0f0", [("", "")] * 10 + ROWS)
    assert helper.gid_index(node(helper, tmp_path)) == 13


@pytest.mark.parametrize(
    ("rows", "ndev"),
    [
        (ROWS[:2], "enp1s0f0np0"),  # no IPv4
        (ROWS[:3], "enp1s0f0np0"),  # RoCE v1 alone
        (ROWS, "enp1s0f1np1"),  # another port's address
        ([(ROWS[3][0].replace("b10b", "b10c"), "RoCE v2")], "enp1s0f0np0"),  # the other node's
    ],
)
def test_no_fitting_gid(helper: ModuleType, tmp_path: Path, rows, ndev: str) -> None:
    device(tmp_path, "rocep1s0f0", rows, ndev=ndev)
    with pytest.raises(helper.Refused) as caught:
        helper.gid_index(node(helper, tmp_path))
    assert "no RoCE v2 GID with 192.168.177.11 of enp1s0f0np0" in str(caught.value)


def test_no_such_device_and_an_inactive_one(helper: ModuleType, tmp_path: Path) -> None:
    device(tmp_path, "rocep1s0f1", ROWS, state="1: DOWN")
    with pytest.raises(helper.Refused, match="no RDMA device rocep1s0f0; there are: rocep1s0f1"):
        helper.gid_index(node(helper, tmp_path))
    with pytest.raises(helper.Refused, match="rocep1s0f1 is not active: 1: DOWN"):
        helper.gid_index(node(helper, tmp_path, SM121_HCA="rocep1s0f1"))


def test_two_devices_need_one_index(helper: ModuleType, tmp_path: Path) -> None:
    second = [(gid.replace("b10b", "b20b"), kind) for gid, kind in ROWS]
    both = {"SM121_HCA": "rocep1s0f0,roceP2p1s0f0:2"}
    device(tmp_path, "rocep1s0f0", ROWS)
    device(tmp_path, "roceP2p1s0f0", second, ndev="enP2p1s0f0np0", port=2)
    assert helper.gid_index(node(helper, tmp_path, **both)) == 3
    (tmp_path / "sys/class/infiniband/roceP2p1s0f0/ports/2/gid_attrs/types/3").write_text(
        "IB/RoCE v1\n"
    )
    (tmp_path / "sys/class/infiniband/roceP2p1s0f0/ports/2/gid_attrs/types/2").write_text(
        "RoCE v2\n"
    )
    with pytest.raises(helper.Refused, match="rocep1s0f0 3, roceP2p1s0f0:2 2"):
        helper.gid_index(node(helper, tmp_path, **both))


def test_a_device_of_another_interface_alone(helper: ModuleType, tmp_path: Path) -> None:
    device(tmp_path, "rocep1s0f0", ROWS, ndev="enp1s0f1np1")
    device(tmp_path, "rocep1s0f1", ROWS, ndev="enp1s0f1np1")
    with pytest.raises(helper.Refused, match="belongs to enp1s0f0np0"):
        helper.gid_index(node(helper, tmp_path, SM121_HCA="rocep1s0f0,rocep1s0f1"))


# --- connections --------------------------------------------------------------------


def test_a_connection_is_seen_from_both_ends_and_when_it_closes(helper: ModuleType) -> None:
    """Real sockets, IPv4 and IPv4 in IPv6 (as TCPStore listens), and this kernel's tables."""
    for family, address in ((socket.AF_INET, "127.0.0.11"), (socket.AF_INET6, "::")):
        with socket.socket(family) as server:
            server.bind((address, 0))
            server.listen()
            port = str(server.getsockname()[1])
            at = {"SM121_MASTER_PORT": port}
            head = node(helper, Path("/"), 0, SM121_PEER="127.0.0.12", **at)
            worker = node(helper, Path("/"), 1, SM121_PEER="127.0.0.11", **at)
            assert not helper.rendezvous(head)
            client = socket.create_connection(
                ("127.0.0.11", int(port)), source_address=("127.0.0.12", 0)
            )
            accepted, _ = server.accept()
            assert helper.rendezvous(head)
            assert helper.rendezvous(worker)
            assert not helper.rendezvous(node(helper, Path("/"), 0, SM121_PEER="127.0.0.13", **at))
            client.close()
            assert not helper.rendezvous(head)
            accepted.close()
            assert not helper.rendezvous(worker)
