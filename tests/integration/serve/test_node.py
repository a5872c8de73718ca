"""The start helper's own reading: memory and who holds it, GIDs of sysfs, connections of /proc."""

from __future__ import annotations

import importlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm121.serve.load import SCRIPTS, load_serve
from sm121.serve.nodes import Nodes
from sm121.serve.render import variables
from support.nodes import two_nodes

ROOT = Path(__file__).resolve().parents[3]
CHECK, _, START = SCRIPTS


@pytest.fixture(scope="module")
def helper() -> Iterator[SimpleNamespace]:
    """What the scripts define, as they are beside each other on a node."""
    folder = str(CHECK.parent)
    sys.path.insert(0, folder)
    try:
        names = {
            n: importlib.import_module(n) for n in ("serve_node", "serve_check", "serve_start")
        }
        yield SimpleNamespace(
            **{k: v for module in names.values() for k, v in vars(module).items()}
        )
    finally:
        while folder in sys.path:
            sys.path.remove(folder)


def node(helper: SimpleNamespace, system: Path, role: int = 0, **changes: str):
    serve = load_serve(ROOT / "pins", "0.26.0")
    found = variables(serve, Nodes.model_validate(two_nodes()), role, stack="0.26.0")
    return helper.Node(found | changes, system)


@pytest.mark.parametrize("script", [CHECK, START])
def test_they_need_nothing_but_the_standard_library(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", script, "--help"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: {script.name}" in done.stdout


def test_without_serve_env_it_says_what_to_do() -> None:
    done = subprocess.run([sys.executable, "-I", CHECK], capture_output=True, text=True, env={})
    assert done.returncode == 3
    assert "not that of serve.env: 'SM121_ROLE'" in done.stdout
    assert "set -a; . <root>/current/serve/serve.env" in done.stdout


@pytest.mark.parametrize("argv", [[CHECK, "x"], [START], [START, "--"], [START, "vllm"]])
def test_wrong_usage(argv: list[str | Path]) -> None:
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# --- start --------------------------------------------------------------------------


def start(system: Path, *command: str, **changes: str) -> subprocess.Popen[str]:
    """serve_start.py at an address of this machine, with another machine's /sys."""
    serve, data = load_serve(ROOT / "pins", "0.26.0"), two_nodes()
    found = variables(serve, Nodes.model_validate(data), 0, stack="0.26.0")
    # The GID is looked up by SM121_ADDRESS, so that one has to be of this machine, too.
    found |= {
        "SM121_ADDRESS": "127.0.0.11",
        "SM121_PEER": "127.0.0.12",
        "SM121_STOP_SECONDS": "1",
    } | changes
    return subprocess.Popen(
        [sys.executable, "-I", START, "--system", system, "--", *command],
        env=found, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_vllm_gets_the_gid_index_of_this_boot(tmp_path: Path) -> None:
    device(
        tmp_path, "rocep1s0f0", [("", ""), ("0000:0000:0000:0000:0000:ffff:7f00:000b", "RoCE v2")]
    )
    show = "import os; print('index', os.environ['NCCL_IB_GID_INDEX'], os.environ['NCCL_IB_HCA']); raise SystemExit(7)"
    process = start(tmp_path, sys.executable, "-c", show, NCCL_IB_GID_INDEX="99")
    said, _ = process.communicate(timeout=30)
    assert "index 1 =rocep1s0f0\n" in said
    assert process.returncode == 7


def test_without_a_gid_vllm_is_not_started(tmp_path: Path) -> None:
    process = start(tmp_path, sys.executable, "-c", "print('started')")
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "no RDMA device rocep1s0f0; there are: none" in said
    assert "started" not in said


def test_what_does_not_start_is_said(tmp_path: Path) -> None:
    process = start(tmp_path, "/nonexistent/vllm", SM121_HCA="")
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "/nonexistent/vllm does not start: No such file" in said
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.11", 29502))
        process = start(tmp_path, "true", SM121_HCA="")
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "can't listen at 127.0.0.11 port 29502 (UDP): Address already in use" in said
    assert "Traceback" not in said


def test_a_firewall_between_the_scripts_is_said(
    helper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks have met, and by UDP nothing comes."""
    with socket.create_server(("127.0.0.11", 0)) as server:
        port = server.getsockname()[1]
        found = node(
            helper, Path("/"), 0, SM121_ADDRESS="127.0.0.11", SM121_PEER="127.0.0.12",
            SM121_MASTER_PORT=str(port),
        )  # fmt: skip
        monkeypatch.setattr(sys.modules["serve_start"], "DEAF_SECONDS", 0.0)
        watch = helper.Watch(found)
        with socket.create_connection(("127.0.0.11", port), source_address=("127.0.0.12", 0)):
            accepted, _ = server.accept()
            assert [watch.lost() for _ in range(3)] == ["", "", ""]
            accepted.close()
        watch.close()
    assert capsys.readouterr().out.count("nothing is heard from 127.0.0.12 by UDP") == 1


def test_told_to_end_it_ends_vllm_and_its_orphans(tmp_path: Path) -> None:
    """A grandchild whose parent is gone, in a session of its own, that ignores SIGTERM."""
    script = "setsid sh -c 'trap \"\" TERM; echo ready $$; while :; do sleep 0.1; done' & sleep 0.1; exit 0"
    process = start(
        tmp_path, "sh", "-c", f"sh -c {shlex.quote(script)}; exec sleep 100", SM121_HCA=""
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    orphan = int(line.split()[1])
    os.kill(orphan, 0)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)


# --- what import vllm would take (cases.md 24) -------------------------------------------


def release(root: Path, *, vllm: bool = True) -> None:
    """An environment with a vllm that must not be imported."""
    env = root / "releases/1/env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    (root / "current").symlink_to("releases/1")
    (site,) = env.glob("lib/python3*/site-packages")
    if vllm:
        (site / "vllm").mkdir()
        (site / "vllm/__init__.py").write_text("raise SystemExit('imported')\n")


def test_the_releases_own_vllm(
    helper: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release(tmp_path / "root")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    found = node(helper, Path("/"), SM121_ROOT=str(tmp_path / "root"))
    (said,) = helper.shadow(found)
    assert said.startswith(f"vllm: {tmp_path}/root/current/env/lib")
    assert said.endswith("(releases/1)")
    # Elsewhere on Python's path.
    other = tmp_path / "other"
    (other / "vllm").mkdir(parents=True)
    (other / "vllm/__init__.py").write_text("")
    found.environment["PYTHONPATH"] = str(other)
    with pytest.raises(
        helper.Refused, match=r"would take .*/other/vllm/__init__\.py, not the release's"
    ):
        list(helper.shadow(found))


def test_a_folder_named_vllm_where_the_service_starts(
    helper: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release(tmp_path / "root")
    (tmp_path / "home/vllm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home")
    with pytest.raises(helper.Refused, match="is not empty: vllm"):
        list(helper.shadow(node(helper, Path("/"), SM121_ROOT=str(tmp_path / "root"))))


def test_a_release_without_vllm(
    helper: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release(tmp_path / "root", vllm=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(helper.Refused, match="the release has no vllm"):
        list(helper.shadow(node(helper, Path("/"), SM121_ROOT=str(tmp_path / "root"))))


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


def test_enough_memory(helper: SimpleNamespace, tmp_path: Path) -> None:
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
    helper: SimpleNamespace, tmp_path: Path
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


def lines_until_refused(helper: SimpleNamespace, found) -> list[str]:
    lines: list[str] = []
    iterator = helper.memory(found)
    while True:
        try:
            lines.append(next(iterator))
        except (StopIteration, helper.Refused):
            return lines


def test_processes_that_vllm_left(helper: SimpleNamespace, tmp_path: Path) -> None:
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


def test_this_machines_own_figures(helper: SimpleNamespace) -> None:
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


def test_the_index_is_looked_up(helper: SimpleNamespace, tmp_path: Path) -> None:
    device(tmp_path, "rocep1s0f0", ROWS)
    assert helper.gid_index(node(helper, tmp_path)) == 3


def test_the_index_moves_with_the_addresses(helper: SimpleNamespace, tmp_path: Path) -> None:
    """Another address came first, and one entry is unset."""
    other = ("0000:0000:0000:0000:0000:ffff:c0a8:c90b", "RoCE v2")
    device(tmp_path, "rocep1s0f0", [ROWS[0], ("", ""), other, *ROWS[1:]])
    assert helper.gid_index(node(helper, tmp_path)) == 5


def test_ten_and_more_are_numbers_not_texts(helper: SimpleNamespace, tmp_path: Path) -> None:
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
def test_no_fitting_gid(helper: SimpleNamespace, tmp_path: Path, rows, ndev: str) -> None:
    device(tmp_path, "rocep1s0f0", rows, ndev=ndev)
    with pytest.raises(helper.Refused) as caught:
        helper.gid_index(node(helper, tmp_path))
    assert "no RoCE v2 GID with 192.168.177.11 of enp1s0f0np0" in str(caught.value)


def test_no_such_device_and_an_inactive_one(helper: SimpleNamespace, tmp_path: Path) -> None:
    device(tmp_path, "rocep1s0f1", ROWS, state="1: DOWN")
    with pytest.raises(helper.Refused, match="no RDMA device rocep1s0f0; there are: rocep1s0f1"):
        helper.gid_index(node(helper, tmp_path))
    with pytest.raises(helper.Refused, match="rocep1s0f1 is not active: 1: DOWN"):
        helper.gid_index(node(helper, tmp_path, SM121_HCA="rocep1s0f1"))


def test_two_devices_need_one_index(helper: SimpleNamespace, tmp_path: Path) -> None:
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


def test_a_device_of_another_interface_alone(helper: SimpleNamespace, tmp_path: Path) -> None:
    device(tmp_path, "rocep1s0f0", ROWS, ndev="enp1s0f1np1")
    device(tmp_path, "rocep1s0f1", ROWS, ndev="enp1s0f1np1")
    with pytest.raises(helper.Refused, match="belongs to enp1s0f0np0"):
        helper.gid_index(node(helper, tmp_path, SM121_HCA="rocep1s0f0,rocep1s0f1"))


# --- connections --------------------------------------------------------------------


def test_a_connection_is_seen_from_both_ends_and_when_it_closes(helper: SimpleNamespace) -> None:
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
