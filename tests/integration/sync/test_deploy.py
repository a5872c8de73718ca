"""All nodes together, on two folders of this machine, each with its own agent (`here`: no ssh)."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from sm121.errors import CheckFailed, EnvironmentFault
from sm121.sync.deploy import Wishes, deploy, rollback
from sm121.sync.hosts import HERE, Node, Way
from sm121.sync.node.listing import release_id, render_listing
from sm121.sync.node.releases import VERIFIED, Releases
from sm121.sync.node.store import Store, sha256
from sm121.sync.release import Release
from sm121.ui import Ui


def release_of(folder: Path, text: str, *, installer: str = "") -> Release:
    folder.mkdir(parents=True)
    files = {f"wheelhouse/{name}": folder / name for name in ("SHA256SUMS", "a", "install.py")}
    for path in files.values():
        path.write_text(f"{path.name} {text}")
    files["wheelhouse/install.py"].write_text(installer)
    digests = {name: sha256(path) for name, path in files.items()}
    listing = render_listing(digests)
    # Of the manifest only its size is asked for, and only where there is no environment.
    return Release(id=release_id(listing), manifest=cast(Any, None), files=files, digests=digests,
                   listing=listing)  # fmt: skip


def node_with(root: Path, *releases: Release) -> Node:
    """A node that has these releases, stored and installed, the last one current."""
    root.mkdir()
    store, made = Store(root), Releases(root)
    store.make()
    made.make()
    for one in releases:
        for digest, path in one.objects.items():
            store.path(digest).write_bytes(path.read_bytes())
        made.assemble(one.id, one.listing, signature="", role="", store=store)
        environment = made.environment(one.id)
        environment.mkdir()
        (environment / VERIFIED).write_text("")
        made.switch(one.id)
    return Node(name=HERE, way=Way(), root=str(root))


def current(node: Node) -> str:
    return Releases(Path(node.root)).pointed("current")


def test_nodes_are_switched_although_one_can_not_remove_what_is_old(tmp_path: Path) -> None:
    old, new = release_of(tmp_path / "1", "old"), release_of(tmp_path / "2", "new")
    nodes = [node_with(tmp_path / name, new, old) for name in ("a", "b")]
    # As an environment with files of root's: nothing that its user can remove as a folder.
    (tmp_path / "a/environments/foreign").write_text("")
    ui = Ui(out=io.StringIO(), err=(said := io.StringIO()))
    log = tmp_path / "log"
    assert deploy(nodes, new, Wishes(), scratch=tmp_path / "s", log=log, ui=ui)
    assert [current(node) for node in nodes] == [new.id, new.id]
    assert "not all that is older could be removed" in said.getvalue()


def test_no_node_is_rolled_back_if_one_can_not_be(tmp_path: Path) -> None:
    old, new = release_of(tmp_path / "1", "old"), release_of(tmp_path / "2", "new")
    nodes = [node_with(tmp_path / "a", old, new), node_with(tmp_path / "b", new)]
    ui = Ui(out=io.StringIO(), err=io.StringIO())
    with pytest.raises(EnvironmentFault, match="no previous release"):
        rollback(nodes, log=tmp_path / "log", ui=ui)
    assert [current(node) for node in nodes] == [new.id, new.id]


def test_a_signature_gets_to_nodes_that_have_the_release_already(tmp_path: Path) -> None:
    release = release_of(tmp_path / "1", "one")
    node = node_with(tmp_path / "a", release)
    ui = Ui(out=io.StringIO(), err=io.StringIO())

    def sync(one: Release) -> bool:
        return deploy(
            [node], one, Wishes(), scratch=tmp_path / "s", log=tmp_path / "log", ui=ui
        )  # fmt: skip

    signed = replace(release, signature="of a key")
    assert [sync(release), sync(signed), sync(signed), sync(release)] == [False, True, False, False]
    assert Releases(Path(node.root)).signature(release.id) == "of a key"
    (Path(node.root) / "allowed_signers").write_text("ada ssh-ed25519 AAAA\n")
    (Path(node.root) / "releases" / release.id / "RELEASE.sig").unlink()
    with pytest.raises(CheckFailed, match="sign"):
        sync(release)


# What is current must be whole while this runs.
_INSTALLER = """
import sys
from pathlib import Path
new = Path(sys.argv[1])
used = new.parents[1] / "current/env"
assert (used / "sm121-verified").is_file()
assert used.resolve() != new.resolve()
(new / "lib/python3.12/site-packages").mkdir(parents=True)
"""


@pytest.mark.parametrize("works", [True, False])
def test_an_environment_is_made_anew_beside_the_one_in_use(tmp_path: Path, works: bool) -> None:
    installer = _INSTALLER + ("" if works else "sys.exit(1)\n")
    release = release_of(tmp_path / "1", "one", installer=installer)
    node = node_with(tmp_path / "a", release)
    ui = Ui(out=io.StringIO(), err=io.StringIO())
    env = Path(node.root) / "current/env"
    before = env.resolve()

    def again() -> None:
        deploy(
            [node], release, Wishes(again=True), scratch=tmp_path / "s", log=tmp_path / "l", ui=ui
        )  # fmt: skip

    if works:
        again()
        again()
        assert env.resolve().name == f"{before.name}.3"
    else:
        with pytest.raises(CheckFailed, match=r"install\.py failed"):
            again()
        assert env.resolve() == before
    assert (env / VERIFIED).is_file()
    assert list(before.parent.iterdir()) == [env.resolve()]
