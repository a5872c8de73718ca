"""The acceptance run: as far as a machine without a GPU goes, and each step with what it needs.

Programs that only a Spark has (nvidia-smi, its systemd) are scripts on PATH here; the release's
Python, the HTTP server and ssh's way of running a command are real.
"""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sm121.__main__ import main
from sm121.acceptance import service, steps
from sm121.acceptance.model import SCHEMA_FILE, NotRun, StepFailed
from sm121.acceptance.places import Place
from sm121.acceptance.steps import Bench
from sm121.serve.nodes import Nodes
from support.nodes import two_nodes, write_nodes

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the head of PATH, empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin")
    return folder


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def with_gpu(folder: Path) -> None:
    program(folder, "nvidia-smi", "echo 'NVIDIA GB10, 12.1, 580.95.05'")


@pytest.fixture
def bench(tmp_path: Path, bin_folder: Path) -> Bench:
    """Both nodes are this machine; the worker is reached by a `ssh` that drops its options."""
    program(
        bin_folder, "ssh", 'while [ "${1#-}" != "$1" ]; do shift 2; done; shift; exec sh -c "$*"'
    )
    root = tmp_path / "node"
    data = two_nodes() | {"root": str(root), "api": {"port": 9}}
    for name in ("head", "worker"):
        data[name]["hca"] = []
    nodes = Nodes.model_validate(data)
    log = tmp_path / "log"
    head = Place(rank=0, node=nodes.head, root=str(root), ssh=(), log=log)
    worker = Place(
        rank=1, node=nodes.worker, root=str(root), ssh=("ssh", "-o", "x", "spark-b"), log=log
    )
    return Bench(
        nodes=nodes, head=head, worker=worker, stack="0.26.0", wheelhouse=tmp_path / "none", root=ROOT,
        scratch=tmp_path, port=29503, nodes_file=tmp_path / "nodes.toml",
    )  # fmt: skip


# --- as a whole, here ----------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_claims_nothing(
    tmp_path: Path,
    bin_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A real run on this machine, which is neither node and has no nvidia-smi on PATH."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SM121_BUILD", str(tmp_path / "build"))
    data = two_nodes() | {"root": str(tmp_path / "nothing")}
    data["worker"]["name"] = "spark-b.invalid"
    nodes = write_nodes(tmp_path / "nodes.toml", data)
    report = tmp_path / "report.json"
    before = signal.getsignal(signal.SIGTERM)
    words = ["acceptance", "--nodes", str(nodes), "--wheelhouse", str(tmp_path / "none")]
    assert main([*words, f"--json={report}"]) == 3
    signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    found = json.loads(report.read_text())
    jsonschema.validate(found, json.loads(SCHEMA_FILE.read_text()))
    verdicts = [r["verdict"] for r in found["results"]]
    assert len(verdicts) == 11
    assert "pass" not in verdicts
    reasons = {r["step"]: r["figures"] for r in found["results"]}
    assert "no GPU on spark-a" in reasons["NCCL all-reduce between the nodes"]
    assert "no GPU" in reasons["service: a completion"]
    assert "no wheelhouse" in reasons["`sync`, then again"]
    assert all("this machine, which is not spark-a" in r["where"] for r in found["results"] if "spark-a" in r["where"])  # fmt: skip
    assert "could not be run here" in err
    assert "Traceback" not in err + out


# --- a release's extensions -----------------------------------------------------------


def shared_modules() -> list[Path]:
    """Extensions of this Python that are files."""
    names = ("_decimal", "_lzma", "_ctypes", "_elementtree", "_json", "_bisect", "_csv", "_heapq")
    files = (getattr(importlib.import_module(name), "__file__", None) for name in names)
    return [Path(file) for file in files if file]


def release(bench: Bench, *, gpu: bool, broken: bool) -> None:
    """An environment with a torch that says whether there is a GPU, and two real extensions."""
    base = Path(bench.nodes.root) / "releases/r1"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base / "env"], check=True)
    (base.parents[1] / "current").symlink_to("releases/r1")
    (base / "serve").mkdir()
    (base / "serve/serve.env").write_text("PYTHONSAFEPATH=1\n")
    (site,) = (base / "env").glob("lib/python3*/site-packages")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text(
        f"""
class cuda:
    is_available = staticmethod(lambda: {gpu})
    get_device_capability = staticmethod(lambda: (12, 1))
    get_device_name = staticmethod(lambda: "NVIDIA GB10")
ones = lambda n, device: type("T", (), dict(sum=lambda self: n))()
class ops:
    @staticmethod
    def load_library(path):
        raise OSError("cannot open " + path)
"""
    )
    (site / "vllm/sub").mkdir(parents=True)
    (site / "vllm/__init__.py").write_text("")
    (site / "vllm/sub/__init__.py").write_text("")
    first, second = shared_modules()[:2]
    shutil.copy(first, site / "vllm")
    shutil.copy(second, site / "vllm/sub")
    if broken:
        (site / "vllm/_C.abi3.so").write_bytes(b"\x7fELF nothing")


def test_extensions_are_imported_by_the_releases_python(bench: Bench, bin_folder: Path) -> None:
    with_gpu(bin_folder)
    release(bench, gpu=True, broken=False)
    for place in (bench.head, bench.worker):
        assert steps.extensions(place) == "2 of release r1 on NVIDIA GB10 12.1, driver 580.95.05"


def test_an_extension_that_does_not_import(bench: Bench, bin_folder: Path) -> None:
    with_gpu(bin_folder)
    release(bench, gpu=True, broken=True)
    with pytest.raises(StepFailed, match=r"1 of 3, first vllm\._C: "):
        steps.extensions(bench.worker)


def test_a_driver_that_torch_does_not_see_is_no_pass(bench: Bench, bin_folder: Path) -> None:
    with_gpu(bin_folder)
    release(bench, gpu=False, broken=False)
    with pytest.raises(StepFailed, match="torch sees no GPU"):
        steps.extensions(bench.head)


def test_what_is_missing_is_named(bench: Bench, bin_folder: Path) -> None:
    with pytest.raises(NotRun, match="no GPU on spark-b"):
        steps.extensions(bench.worker)
    with_gpu(bin_folder)
    with pytest.raises(NotRun, match=r"no release in .* on spark-a"):
        steps.all_reduce(bench)
    program(
        bin_folder,
        "ssh",
        "echo 'ssh: connect to host spark-b port 22: No route to host' >&2; exit 255",
    )
    with pytest.raises(NotRun, match=r"spark-b can't be reached by ssh: .*No route to host"):
        steps.extensions(bench.worker)


def test_all_reduce_reads_both_ranks(
    bench: Bench, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payload needs two GPUs; what its ranks print decides."""
    with_gpu(bin_folder)
    release(bench, gpu=True, broken=False)
    python = Path(bench.nodes.root) / "current/env/bin/python"
    said = '{"right": true, "replayed": %s, "gbytes_per_s": 21.5, "nccl": "%s"}'

    def ranks(replayed: str, *nccl: str) -> None:
        python.unlink()
        program(python.parent, "python", "cat >/dev/null; echo NCCL INFO x; case $2 in " + " ".join(
            f"{rank}) echo '{said % (replayed, one)}';;" for rank, one in enumerate(nccl)) + " esac")  # fmt: skip

    ranks("true", "2.30.4", "2.30.4")
    assert steps.all_reduce(bench) == "21.5 GB/s with 256 MiB, 500 graph replays, NCCL 2.30.4"
    ranks("true", "2.30.4", "2.28.9")
    with pytest.raises(StepFailed, match=r"NCCL 2\.30\.4 and 2\.28\.9"):
        steps.all_reduce(bench)
    ranks("false", "2.30.4", "2.30.4")
    with pytest.raises(StepFailed, match="a sum is wrong"):
        steps.all_reduce(bench)


def test_all_reduce_goes_by_the_gid_index_of_a_start(bench: Bench, bin_folder: Path) -> None:
    """The node's own word: its index, and without one nothing is measured."""
    with_gpu(bin_folder)
    release(bench, gpu=True, broken=False)
    node = bench.nodes.head.model_copy(update={"hca": ("rocep1s0f0",)})
    bench = replace(bench, nodes=bench.nodes.model_copy(update={"head": node, "worker": node}))
    current = Path(bench.nodes.root) / "current"
    check = current / "wheelhouse/serve_check.py"
    check.parent.mkdir()
    (current / "env/bin/python").unlink()
    program(
        current / "env/bin", "python",
        'cat >/dev/null; echo "{\\"right\\": true, \\"replayed\\": true, \\"gbytes_per_s\\": 1.0, '
        '\\"nccl\\": \\"GID $NCCL_IB_GID_INDEX\\"}"',
    )  # fmt: skip
    check.write_text("import sys\nprint(5 if sys.argv[1:] == ['--gid-index'] else 0)\n")
    assert steps.all_reduce(bench).endswith("NCCL GID 5")
    check.write_text("print('refused: it has no RoCE v2 GID\\n   next: x')\nraise SystemExit(3)\n")
    with pytest.raises(StepFailed, match="refused: it has no RoCE v2 GID"):
        steps.all_reduce(bench)


# --- the service ----------------------------------------------------------------------


@dataclass
class Api:
    """An OpenAI-like server on this machine."""

    port: int = 0
    tokens: int = 20
    sick: int = 0
    asked: list[Any] = field(default_factory=list)


@pytest.fixture
def api(bench: Bench) -> Iterator[Api]:
    state = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.sick -= 1
            self.send_response(503 if state.sick >= 0 else 200)
            self.end_headers()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.asked.append((json.loads(body), self.headers.get("Authorization")))
            self.send_response(200 if self.path == "/v1/completions" else 404)
            self.end_headers()
            for _ in range(state.tokens):
                self.wfile.write(b'data: {"choices": [{"text": " 2"}]}\n\n')
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield state
        server.shutdown()


def at(bench: Bench, api: Api) -> Bench:
    data = bench.nodes.model_dump(by_alias=True)
    data["api"]["port"] = api.port
    return replace(bench, nodes=Nodes.model_validate(data))


def test_a_completion(
    bench: Bench, bin_folder: Path, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(bin_folder)
    with pytest.raises(NotRun, match="nothing answers at http://127"):
        service.completion(bench)
    monkeypatch.setenv("VLLM_API_KEY", "hunter2secret")
    figures = service.completion(at(bench, api))
    assert figures.startswith("first token after ")
    assert "'2 2 2 " in figures
    assert "hunter2" not in figures
    ((body, key),) = api.asked
    assert (body["model"], body["stream"], key) == (
        "deepseek-v4-flash",
        True,
        "Bearer hunter2secret",
    )
    api.tokens = 3
    with pytest.raises(StepFailed, match="only 3 token"):
        service.completion(at(bench, api))


def test_health_is_waited_for_and_given_up(bench: Bench, api: Api) -> None:
    api.sick = 3
    assert 0 < service.wait_healthy(at(bench, api), 5) < 5
    api.sick = 10**6
    with pytest.raises(StepFailed, match=r"not healthy after 0\.5 s: journalctl -u sm121-head"):
        service.wait_healthy(at(bench, api), 0.5)


def test_restarts_in_any_order(
    bench: Bench, bin_folder: Path, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(bin_folder)
    release(bench, gpu=True, broken=False)
    monkeypatch.setattr(service, "NOTICE_SECONDS", 0.0)
    with_service = at(bench, api)
    program(bin_folder, "sudo", "exit 1")
    with pytest.raises(NotRun, match="sudo asks for a password on spark-a"):
        service.start(with_service, limit=5)
    program(bin_folder, "sudo", 'shift; exec "$@"')
    program(bin_folder, "systemctl", f'[ "$1" = cat ] && exit 1; echo "$@" >> {tmp_path}/calls')
    with pytest.raises(
        NotRun, match=r"sm121-head\.service is not installed on spark-a: sudo install"
    ):
        service.start(with_service, limit=5)
    program(
        bin_folder,
        "systemctl",
        f'[ "$1" = --version ] || [ "$1" = cat ] || echo "$@" >> {tmp_path}/calls',
    )
    (tmp_path / "calls").unlink()
    assert service.start(with_service, limit=5).startswith("healthy after")
    assert service.restarts(with_service, limit=5).startswith("worker, head, both: answers after")
    h, w = "sm121-head.service", "sm121-worker.service"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"restart {w}", f"restart {h}", f"restart {w}", f"restart {h}",
        f"stop {h}", f"stop {w}", f"start {h}", f"start {w}",
    ]  # fmt: skip
    assert len(api.asked) == 3
    program(bin_folder, "ps", "echo '4711 VLLM::EngineCore'")
    with pytest.raises(StepFailed, match="left on spark-a: 4711 VLLM::EngineCore"):
        service.restarts(with_service, limit=5)
