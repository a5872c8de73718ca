"""Releases on a node: switching, rolling back, keeping, in a folder of this machine."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest

from sm121.sync.node.listing import release_id, render_listing
from sm121.sync.node.refusal import Refused
from sm121.sync.node.releases import VERIFIED, Releases
from sm121.sync.node.store import Store, sha256


class Node:
    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root, self.store, self.releases = root, Store(root), Releases(root)
        self.store.make()
        self.releases.make()

    def put(self, **files: str) -> dict[str, str]:
        """Files into the store; name (with / for __) → digest."""
        listed = {}
        for name, text in files.items():
            temporary = self.root / "incoming/x"
            temporary.write_text(text)
            digest = sha256(temporary)
            temporary.rename(self.root / "incoming" / digest)
            assert self.store.admit({digest: len(text)}) == []
            listed[name.replace("__", "/")] = digest
        return listed

    def release(self, text: str, *, installed: bool = True, **more: str) -> str:
        """Assemble a release; returns its id."""
        listing = render_listing(
            self.put(wheelhouse__SHA256SUMS=text, wheelhouse__a=text * 2, **more)
        )
        release = release_id(listing)
        self.releases.assemble(release, listing, signature="", role="", store=self.store)
        if installed:
            environment = self.releases.environment(release)
            environment.mkdir(exist_ok=True)
            (environment / VERIFIED).write_text("")
        return release


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "root")


def test_switch_and_back_under_a_second(node: Node) -> None:
    one, two = node.release("1"), node.release("2")
    node.releases.switch(one)
    node.releases.switch(two)
    began = time.monotonic()
    assert node.releases.rollback() == (two, one)
    assert time.monotonic() - began < 1
    assert node.releases.pointed("current") == one
    assert (node.root / "current/wheelhouse/a").read_text() == "11"
    assert node.releases.rollback() == (one, two)


def test_no_rollback_where_there_is_none(node: Node) -> None:
    with pytest.raises(Refused, match="no previous release"):
        node.releases.rollback()
    one = node.release("1")
    node.releases.switch(one)
    node.releases.switch(one)
    with pytest.raises(Refused, match="no previous release"):
        node.releases.rollback()
    # Killed between the two renames of a switch: previous is current, which is no way back.
    (node.root / "previous").symlink_to(f"releases/{one}")
    with pytest.raises(Refused, match="no previous release"):
        node.releases.rollback()


def test_what_is_not_whole_does_not_become_current(node: Node) -> None:
    one, two = node.release("1"), node.release("2", installed=False)
    node.releases.switch(one)
    with pytest.raises(Refused, match="not whole"):
        node.releases.switch(two)
    assert node.releases.pointed("current") == one
    with pytest.raises(Refused, match="holds no folder"):
        node.releases.assemble(one, (node.releases.path(one) / "RELEASE").read_text(), signature="",
                               role="head", store=node.store)  # fmt: skip


def test_keep(node: Node) -> None:
    """The last ones, and never current, previous, or what they use."""
    names = [node.release(text) for text in "12345"]
    for name in names:
        node.releases.switch(name)
    node.releases.switch(names[0])  # as after a rollback far back
    assert set(node.releases.prune(1, node.store)) == set(names[1:4])
    assert {p.name for p in node.releases.folder.iterdir()} == {names[0], names[4]}
    assert len(list(node.releases.environments.iterdir())) == 2
    assert len(list(node.store.folder.iterdir())) == 4
    assert node.releases.altered(names[0]) == []
    assert node.releases.rollback() == (names[0], names[4])


def test_a_foreign_link_is_no_release(node: Node) -> None:
    (node.root / "current").symlink_to("/etc")
    assert node.releases.pointed("current") == ""


def test_a_folder_that_became_a_link_is_not_followed(node: Node, tmp_path: Path) -> None:
    one = node.release("1")
    text = (node.releases.path(one) / "RELEASE").read_text()
    folder = node.releases.path(one) / "wheelhouse"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="is a link"):
        node.releases.assemble(one, text, signature="", role="", store=node.store)


def test_what_arrived_wrong_is_not_admitted(node: Node) -> None:
    """Cut short: kept, to be resumed. As long as it should be, and other: removed."""
    short, wrong = "a" * 64, "b" * 64
    (node.root / "incoming" / short).write_text("12")
    (node.root / "incoming" / wrong).write_text("12345")
    assert set(node.store.admit({short: 5, wrong: 5})) == {short, wrong}
    assert node.store.arriving([short, wrong]) == {short: 2}
    assert not list(node.store.folder.iterdir())


def test_what_runs_is_kept_where_the_root_is_a_link(tmp_path: Path) -> None:
    """/proc/PID/maps has the real path of what is mapped."""
    node = Node(tmp_path / "disk")
    (tmp_path / "root").symlink_to("disk")
    linked = Releases(tmp_path / "root")
    names = [node.release(text) for text in "123"]
    for name in names:
        node.releases.switch(name)
    library = node.releases.environment(names[0]) / "library"
    library.write_bytes(b"x" * mmap.PAGESIZE)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert linked.prune(1, node.store) == []
    assert linked.prune(1, node.store) == names[:1]


def test_releases_of_one_wheelhouse_get_its_newest_environment(node: Node) -> None:
    one = node.release("1")
    first = node.releases.environment(one)
    new = node.releases.next_environment(first)
    assert new.name == f"{first.name}.2"
    new.mkdir()
    assert node.releases.environment_of(node.releases.listing(one)) == first  # not finished
    (new / VERIFIED).write_text("")
    node.releases.use(new, instead_of=first)
    assert node.releases.environment(one) == new
    assert node.releases.next_environment(new).name == f"{first.name}.3"
    node.releases.switch(one)
    node.releases.prune(1, node.store)
    assert not first.exists()
    other = node.release("1", installed=False, head__serve="x")
    assert other != one
    assert node.releases.environment(other) == new
    assert node.releases.installed(other)
