"""What is rendered for two example nodes, and the file that names them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm121.errors import PinsFault
from sm121.serve.load import load_serve
from sm121.serve.nodes import Nodes, load_nodes
from sm121.serve.render import command, quoted_word, render, variables
from support.nodes import two_nodes, write_nodes

ROOT = Path(__file__).resolve().parents[3]
EXPECTED = Path(__file__).with_name("expected")
SERVE = load_serve(ROOT / "pins", "0.26.0")


@pytest.mark.parametrize(("rank", "role"), [(0, "head"), (1, "worker")])
def test_files_of_two_example_nodes(rank: int, role: str) -> None:
    """Edited deliberately: `nox -s serve -- --stack 0.26.0` with tests/support/nodes.py's data."""
    nodes = Nodes.model_validate(two_nodes())
    files = render(SERVE, nodes, rank, stack="0.26.0").files
    folder = EXPECTED / role
    assert sorted(files) == sorted(p.name for p in folder.iterdir())
    for name, text in files.items():
        assert text == (folder / name).read_text(), name


def test_environment_file_reads_the_same_in_a_shell() -> None:
    data = two_nodes()
    data["root"] = "/opt/s+m"
    nodes = Nodes.model_validate(data)
    text = render(SERVE, nodes, 0, stack="0.26.0").files["serve.env"]
    read = dict(word.split("=", 1) for word in shlex.split(text, comments=True))
    assert read == variables(SERVE, nodes, 0, stack="0.26.0")
    assert read["PATH"].startswith("/opt/s+m/current/env/bin:/usr/local/cuda/bin:")


def test_without_rdma_nccl_is_told_so() -> None:
    data = two_nodes()
    data["head"]["hca"] = data["worker"]["hca"] = []
    found = variables(SERVE, Nodes.model_validate(data), 1, stack="0.26.0")
    assert found["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_HCA" not in found


def test_two_devices() -> None:
    data = two_nodes()
    data["head"]["hca"] = ["rocep1s0f0", "roceP2p1s0f0:1"]
    found = variables(SERVE, Nodes.model_validate(data), 0, stack="0.26.0")
    assert found["NCCL_IB_HCA"] == "=rocep1s0f0,roceP2p1s0f0:1"


def test_the_owners_own_memory_and_arguments() -> None:
    data = two_nodes()
    data |= {"gpu-memory-utilization": 0.82, "arguments": ["--max-model-len", "131072"]}
    nodes = Nodes.model_validate(data)
    for rank in (0, 1):
        words = command(SERVE, nodes, rank)
        assert words[words.index("--gpu-memory-utilization") + 1] == "0.82"
        assert words.count("--gpu-memory-utilization") == 1
        assert words[-2:] == ["--max-model-len", "131072"]
    assert variables(SERVE, nodes, 0, stack="x")["SM121_MEMORY"] == "0.82"


@pytest.mark.parametrize(
    "word", ["--block-size", "--block_size=128", "--headless", "--node-rank=1"]
)
def test_own_arguments_cant_repeat_ours(word: str) -> None:
    data = two_nodes() | {"arguments": [word]}
    with pytest.raises(PinsFault, match="is set by sm121"):
        command(SERVE, Nodes.model_validate(data), 0)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=30))
def test_a_quoted_word_is_one_word_to_systemd(text: str) -> None:
    """By its rules as systemd.service(5) and systemd.unit(5) state them: %% and $$, quotes, \\."""
    (word,) = shlex.split(quoted_word(text))
    assert word.replace("$$", "$").replace("%%", "%") == text
    rest = quoted_word(text).replace("%%", "").replace("$$", "")
    assert "%" not in rest
    assert "$" not in rest


def put(path: str, value: object):
    def edit(data: dict[str, Any]) -> None:
        *folders, last = path.split("/")
        for name in folders:
            data = data[name]
        data[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (put("head/adress", "x"), "head.adress: unknown key; did you mean 'address'?"),
        (put("rot", "/x"), "rot: unknown key; did you mean 'root'?"),
        (put("head/address", "fe80::1"), "head.address: must be IPv4"),
        (put("head/address", "spark-a"), "head.address: is not an IP address"),
        (put("head/address", "127.0.0.1"), "head.address: must be the node's own"),
        (put("worker/address", "192.168.177.11"), "worker.address: is the head's, too"),
        (put("worker/name", "spark-a"), "worker.name: is the head's, too"),
        (put("head/interface", "eth0; rm"), "head.interface: "),
        (put("head/interface", "a-name-of-16-chr"), "head.interface: "),
        (put("head/hca", ["../x"]), "head.hca.0: "),
        (put("head/hca", []), "worker.hca: one node has RDMA devices"),
        (put("head/name", "-oProxyCommand=x"), "head.name: "),
        (put("root", "opt/sm121"), "root: must be an absolute path"),
        (put("root", "/opt/../etc"), "root: must be an absolute path"),
        (put("root", "/opt/%h"), "root: must be an absolute path"),
        (put("model", "deepseek-ai/DeepSeek-V4-Flash"), "model: must be an absolute path"),
        (put("user", "root"), "user: a service that answers requests"),
        (put("user", "x y"), "user: "),
        (put("api", {"host": "everywhere"}), "api: host: 'everywhere' is not an IP address"),
        (put("api", {"port": "8000"}), "api.port: "),
        (put("arguments", ["--a\nb"]), "arguments.0: must be printable"),
        (put("gpu-memory-utilization", 1.5), "gpu-memory-utilization: "),
        (lambda d: d.pop("worker"), "worker: missing"),
    ],
)  # fmt: skip
def test_bad_nodes_are_refused_with_their_path(tmp_path: Path, edit, said: str) -> None:
    data = two_nodes()
    edit(data)
    with pytest.raises(PinsFault) as caught:
        load_nodes(write_nodes(tmp_path / "nodes.toml", data))
    assert any(said in line for line in caught.value.details), caught.value.details
