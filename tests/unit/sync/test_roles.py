"""Which host has which role, and what goes with the release for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sm121.errors import PinsFault, UsageFault
from sm121.serve.nodes import Nodes, load_nodes
from sm121.sync.hosts import Way, nodes_of
from sm121.sync.roles import roles_of, write_serving
from support.checkouts import ROOT
from support.nodes import two_nodes, write_nodes


@pytest.fixture
def file(tmp_path: Path) -> Nodes:
    data = two_nodes()
    data["head"]["name"], data["worker"]["name"] = "spark-a", "spark-b"
    return load_nodes(write_nodes(tmp_path / "nodes.toml", data))


def roles(file: Nodes, *names: str) -> dict[str, str]:
    return roles_of(nodes_of(list(names), way=Way(), root="/opt/sm121"), file)


def test_by_name_with_or_without_a_user(file: Nodes) -> None:
    assert roles(file, "ada@spark-b", "spark-a") == {"ada@spark-b": "worker", "spark-a": "head"}
    assert roles(file, "spark-b") == {"spark-b": "worker"}


@pytest.mark.parametrize("role", ["head", "worker"])
def test_here_is_the_one_whose_address_this_machine_has(
    file: Nodes, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    own = getattr(file, role).address
    monkeypatch.setattr("sm121.sync.roles.has_address", lambda address: address == own)
    assert roles(file, "here") == {"here": role}
    monkeypatch.setattr("sm121.sync.roles.has_address", lambda address: False)
    with pytest.raises(UsageFault, match="here: the nodes' file does not say"):
        roles(file, "here")


def test_a_host_that_the_file_does_not_name(file: Nodes) -> None:
    with pytest.raises(UsageFault, match="spark-c: the nodes' file does not say"):
        roles(file, "spark-a", "spark-c")
    with pytest.raises(UsageFault, match="the same node"):
        roles(file, "spark-a", "ada@spark-a")


def test_files_of_both_roles_are_rendered_from_the_wheelhouse(file: Nodes, tmp_path: Path) -> None:
    house, folder = tmp_path / "house", tmp_path / "serving"
    house.mkdir()
    with pytest.raises(PinsFault):
        write_serving(house, file, stack="0.26.0", folder=folder)
    shutil.copy(ROOT / "pins" / "0.26.0" / "serve.toml", house)
    (folder / "head").mkdir(parents=True)
    (folder / "head" / "old.service").touch()
    files = write_serving(house, file, stack="0.26.0", folder=folder)
    assert set(files) == {
        "head/serve.env", "head/sm121-head.service", "worker/serve.env", "worker/sm121-worker.service",
    }  # fmt: skip
    assert f"{file.worker.address}" in files["worker/serve.env"].read_text()
    assert sorted(p for p in folder.rglob("*") if p.is_file()) == sorted(files.values())
