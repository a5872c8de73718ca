"""`sync --nodes`: what head and worker need to serve lies where the units look."""

from __future__ import annotations

import shutil
from pathlib import Path

import tomli_w

from sm121.serve.load import SCRIPTS
from support.environments import sums
from support.hosts import HEAD, WORKER, Hosts
from support.nodes import two_nodes
from support.tools import ROOT


def prepare(hosts: Hosts, house: Path) -> Path:
    """A wheelhouse that can be served, and the nodes' file."""
    for file in (ROOT / "pins/0.26.0/serve.toml", *SCRIPTS):
        shutil.copy(file, house)
    sums(house)
    data = two_nodes() | {"root": str(hosts.root)}
    data["head"] |= {"name": "first", "address": HEAD, "interface": "direct0", "hca": []}
    data["worker"] |= {"name": "worker", "address": WORKER, "interface": "direct0", "hca": []}
    file = house.parent / "nodes.toml"
    file.write_text(tomli_w.dumps(data))
    return file


def test_units_and_environment_lie_where_they_look(hosts: Hosts, make_house) -> None:
    house = make_house()
    nodes = prepare(hosts, house)
    hosts.seed(house, "head", "worker")
    hosts.sync("here", "worker", "--wheelhouse", str(house), "--nodes", str(nodes))
    for host, role in (("head", "head"), ("worker", "worker")):
        unit = hosts.disk(host) / f"current/serve/sm121-{role}.service"
        words = unit.read_text().split()
        ours = [w for w in words if w.startswith(f"{hosts.root}/current/wheelhouse/")]
        assert len(ours) == 2
        for path in ours:
            assert hosts.on(host, "test", "-f", path) == ""
        environment = (hosts.disk(host) / "current/serve/serve.env").read_text()
        assert f"EnvironmentFile={hosts.root}/current/serve/serve.env" in words
        assert f"VLLM_HOST_IP={HEAD if host == 'head' else WORKER}" in environment
    said = hosts.sync(
        "here", "worker", "--wheelhouse", str(house), "--nodes", str(nodes), "--root", "/x", code=2
    )
    assert "nodes.toml says" in said
