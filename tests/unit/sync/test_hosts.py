"""Which hosts and folders are taken, and that ssh always checks keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm121.__main__ import main
from sm121.errors import UsageFault
from sm121.pins.model import OVERLAY
from sm121.sync import release
from sm121.sync.agent import bundle
from sm121.sync.hosts import Way, nodes_of


@pytest.mark.parametrize("name", ["spark2", "ada@spark-2.local", "192.0.2.2", "fe80::1%enp1s0", "ada@2001:db8::2", "here"])  # fmt: skip
def test_hosts(name: str) -> None:
    (node,) = nodes_of([name], way=Way(), root="/opt/sm121")
    options, destination = node.rsync("incoming")
    assert destination.endswith("/opt/sm121/incoming/")
    assert bool(options) == (name != "here")
    if ":" in name:
        assert f"[{name.rpartition('@')[2]}]:" in destination


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a;b", "$(x)", "host:/path", "", "@x", "-l@x", "a\nb"])  # fmt: skip
def test_what_is_no_host(name: str) -> None:
    with pytest.raises(UsageFault, match="no host"):
        nodes_of([name], way=Way(), root="/opt/sm121")


def test_a_name_twice() -> None:
    with pytest.raises(UsageFault, match="named twice"):
        nodes_of(["a", "a"], way=Way(), root="/opt/sm121")


@pytest.mark.parametrize("root", ["opt", "/", "/srv/../etc", "/opt/a b", "/opt/.x", "/opt/sm121/", "/a;b"])  # fmt: skip
def test_folders_that_no_node_has(root: str) -> None:
    with pytest.raises(UsageFault, match="--root"):
        nodes_of(["a"], way=Way(), root=root)


def test_ssh_asks_nobody_and_trusts_no_new_key() -> None:
    way = Way(interface="enp1s0f0np0", address="192.0.2.1", identity=Path("/k"), config=Path("/c"))
    words = way.ssh()
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert given["StrictHostKeyChecking"] == given["BatchMode"] == given["IdentitiesOnly"] == "yes"
    assert (given["BindInterface"], given["BindAddress"]) == ("enp1s0f0np0", "192.0.2.1")
    # The first value of an option counts (ssh_config(5)): none may stand twice.
    assert len(given) == sum("=" in word for word in words)


def test_what_a_node_gets_is_one_line() -> None:
    assert bundle("/opt/sm121", make=True).count("\n") == 1


def test_name_of_the_overlay_profile() -> None:
    assert release._OVERLAY == OVERLAY


def test_a_host_is_not_taken_for_the_file_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json here spark2` would write a file `here`, and compare one node only."""
    assert main(["sync", "--compare", "--json", "here", "spark2"]) == 2
    assert "ends in .json" in capsys.readouterr().err
