"""Third-party sources out of git clones that a user names: the pinned commit, or nothing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sm121.errors import HashMismatch, NetworkFault, UsageFault
from sm121.fetch import Cache
from sm121.files import HashMemory
from sm121.lock.pylock import Target
from sm121.pins.model import SourcePin
from sm121.source.clones import open_clones
from sm121.source.thirdparty import Source, obtain
from support.gits import Work
from support.tools import run, tool

TARGET = Target.make("linux-aarch64", python="3.12", glibc="2.39")
UNREACHABLE = "http://127.0.0.1:9/project.git"
FILES = ("-c", "protocol.file.allow=always")


@dataclass
class Place:
    """A project with a submodule, whose remote can't be reached; `clone` makes clones of it."""

    tmp: Path
    project: Work
    library: Work
    commit: str
    library_commit: str
    screen: Any

    def pin(self, **changes: Any) -> SourcePin:
        return SourcePin.model_validate(
            {
                "git": UNREACHABLE, "ref": self.commit, "env": "PROJECT_SRC_DIR",
                "upstream-file": "CMakeLists.txt", "upstream-repository": "owner/project",
                "submodules": {"third-party/lib": self.library_commit}, **changes,
            }
        )  # fmt: skip

    def clone(self, work: Work, name: str, *options: str) -> Path:
        run(tool("git"), *FILES, "clone", "-q", *options, work.path, self.tmp / name)
        return self.tmp / name

    def obtain(self, *clones: Path, offline: bool = False, **changes: Any) -> Source:
        folder = self.tmp / "build/source"
        folder.mkdir(parents=True, exist_ok=True)
        memory = HashMemory(self.tmp / "hashes.json")
        return obtain(
            "project", self.pin(**changes), folder=folder, cache=Cache(self.tmp / "cache", memory), memory=memory, target=TARGET,
            offline=offline, ui=self.screen.ui, clones=open_clones(clones), environment={},
        )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, screen) -> Place:
    library = Work.init(tmp_path / "library.git")
    library_commit = library.commit({"include/lib.h": "lib\n", "docs/big.pdf": "big"})
    project = Work.init(tmp_path / "project.git")
    project.write({"csrc/a.cu": "a\n", "docs/paper.pdf": "paper"})
    project.git(*FILES, "submodule", "add", "-q", "../library.git", "third-party/lib")
    commit = project.commit({}, "pinned")
    project.commit({"csrc/a.cu": "newer\n"}, "newer")
    return Place(tmp_path, project, library, commit, library_commit, screen)


def contents(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()
    }


PINNED = {
    "csrc/a.cu": "a\n", "docs/paper.pdf": "paper", "third-party/lib/include/lib.h": "lib\n",
    "third-party/lib/docs/big.pdf": "big",
}  # fmt: skip


@pytest.mark.parametrize("options", [["--bare"], []], ids=["bare", "with a working tree"])
def test_pinned_commit_counts_and_not_what_is_checked_out(place: Place, options) -> None:
    clone = place.clone(place.project, "mine", *options)
    if not options:
        (clone / "csrc/a.cu").write_text("edited")
    source = place.obtain(clone, place.clone(place.library, "library", *options))
    assert source.provider == f"a local clone, commit {place.commit}"
    assert {k: v for k, v in contents(source.path).items() if k != ".gitmodules"} == PINNED
    assert f"project: out of a local clone, commit {place.commit}" in place.screen.text


def test_clone_brings_its_own_submodules(place: Place) -> None:
    clone = place.clone(place.project, "mine")
    run(tool("git"), "-C", clone, *FILES, "submodule", "update", "-q", "--init")
    assert "third-party/lib/include/lib.h" in contents(place.obtain(clone).path)


def test_submodules_own_folder_is_a_clone_too(place: Place) -> None:
    """Its .git is a file that names the folder."""
    clone = place.clone(place.project, "mine")
    run(tool("git"), "-C", clone, *FILES, "submodule", "update", "-q", "--init")
    bare = place.clone(place.project, "bare", "--bare")
    assert place.obtain(bare, clone / "third-party/lib", offline=True).provider.startswith(
        "a local"
    )


def test_worktree_is_a_clone_too(place: Place) -> None:
    clone = place.clone(place.project, "mine")
    run(tool("git"), "-C", clone, "worktree", "add", "-q", "--detach", place.tmp / "tree")
    assert place.obtain(place.tmp / "tree", place.clone(place.library, "library"))


def test_clone_without_the_pinned_commit_is_no_provider(place: Place) -> None:
    shallow = place.tmp / "shallow"
    run(tool("git"), "clone", "-q", "--depth=1", place.project.url, shallow)
    with pytest.raises(NetworkFault) as raised:
        place.obtain(shallow, place.clone(place.library, "library"))
    assert f"2 local clone(s): none has commit {place.commit}; git: " in raised.value.cause
    assert "--clone PATH" in raised.value.remedy
    assert "with" in raised.value.remedy
    assert "its submodules" in raised.value.remedy


def test_submodule_that_no_clone_has_is_named(place: Place) -> None:
    with pytest.raises(NetworkFault) as raised:
        place.obtain(place.clone(place.project, "mine"))
    assert f"none has {place.library_commit}, its submodule third-party/lib" in raised.value.cause


def test_other_submodule_than_pinned_is_refused(place: Place) -> None:
    other = place.library.commit({"include/lib.h": "other\n"})
    with pytest.raises(HashMismatch, match="another submodule at third-party/lib"):
        place.obtain(
            place.clone(place.project, "mine"), place.clone(place.library, "library"),
            submodules={"third-party/lib": other},
        )  # fmt: skip


def test_content_decides_even_at_the_pinned_commit(place: Place) -> None:
    with pytest.raises(HashMismatch, match="csrc from a local clone"):
        place.obtain(place.clone(place.project, "mine"), digest={"csrc": "h1:" + "0" * 64})


def test_tag_of_another_project_is_not_taken(place: Place) -> None:
    """v3.5.1 is a release of Triton, and one of CUTLASS."""
    other = Work.init(place.tmp / "other.git")
    other.commit({"csrc/a.cu": "of another project"})
    other.git("tag", "v3.5.1")
    with pytest.raises(NetworkFault) as raised:
        place.obtain(other.path, ref="v3.5.1")
    assert "v3.5.1 has no commit in stack.toml" in raised.value.cause
    assert "PROJECT_SRC_DIR" in raised.value.remedy


def test_tag_whose_commit_is_pinned(place: Place) -> None:
    clones = [place.clone(place.project, "mine"), place.clone(place.library, "library")]
    assert place.obtain(*clones, ref="v1", commit=place.commit).provider.endswith(place.commit)


def test_remote_whose_tag_was_moved_is_refused(place: Place) -> None:
    place.project.git("tag", "v1")
    with pytest.raises(HashMismatch, match="another commit as v1") as raised:
        place.obtain(git=place.project.url, ref="v1", commit=place.commit, submodules={})
    assert place.commit in raised.value.cause


def test_only_what_the_digest_covers_has_to_be_there(place: Place, tmp_path: Path) -> None:
    """A clone may be partial: of a blob that nobody uses, nothing is read."""
    from sm121.files import tree_digest

    digest = {
        "csrc": tree_digest(place.obtain(
            place.clone(place.project, "whole"), place.clone(place.library, "library")
        ).path / "csrc"),
    }  # fmt: skip
    work = Work.init(tmp_path / "partial")
    work.git("fetch", "-q", place.project.url, place.commit)
    blob = work.git("rev-parse", f"{place.commit}:docs/paper.pdf")
    loose = work.path / ".git/objects" / blob[:2] / blob[2:]
    assert loose.is_file(), "git keeps a small fetch unpacked"
    loose.unlink()
    source = place.obtain(work.path, digest=digest, offline=True)
    assert set(contents(source.path)) == {"csrc/a.cu"}


def test_clone_is_only_read(place: Place) -> None:
    clone = place.clone(place.project, "mine", "--bare")
    library = place.clone(place.library, "library", "--bare")
    before = {p: p.stat().st_mtime_ns for p in [*clone.rglob("*"), *library.rglob("*")]}
    place.obtain(clone, library)
    assert before == {p: p.stat().st_mtime_ns for p in [*clone.rglob("*"), *library.rglob("*")]}


def test_what_was_made_of_a_clone_stays_when_the_clone_is_gone(place: Place) -> None:
    clone, library = place.clone(place.project, "mine"), place.clone(place.library, "library")
    first = place.obtain(clone, library)
    shutil.rmtree(clone)
    shutil.rmtree(library)
    again = place.obtain(offline=True)
    assert (again.path, again.provider) == (first.path, first.provider)


def test_submodule_of_a_remote_may_come_out_of_a_clone(place: Place) -> None:
    """GitHub is mirrored, the submodule's own remote is not."""
    library = place.clone(place.library, "library")
    shutil.rmtree(place.library.path)
    source = place.obtain(library, git=place.project.url)
    assert source.provider == "git"
    assert "third-party/lib/include/lib.h" in contents(source.path)


@pytest.mark.parametrize("make", [None, "empty"])
def test_folder_that_is_no_repository(tmp_path: Path, make: str | None) -> None:
    if make:
        (tmp_path / "x").mkdir()
    with pytest.raises(UsageFault, match="is no git repository") as raised:
        open_clones([tmp_path / "x"])
    assert "--clone" in raised.value.remedy
