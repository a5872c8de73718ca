"""Hashes, atomic writes, directories that appear whole, content digests."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm121 import files
from sm121.files import (
    HashMemory,
    fresh_directory,
    remove_tree,
    sha256_file,
    sha256_text,
    tree_digest,
    tree_size,
    write_atomic,
)


def test_sha256_file_is_the_files_content(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"abc")
    assert sha256_file(file) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_sha256_text_tells_lists_apart(one: list[str], other: list[str]) -> None:
    assert (sha256_text(*one) == sha256_text(*other)) == (one == other)


# --- remembered hashes --------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files whose content was really read."""
    read: list[Path] = []

    def counting(path: Path) -> str:
        read.append(path)
        return sha256_file(path)

    monkeypatch.setattr(files, "sha256_file", counting)
    return read


def test_unchanged_file_is_read_once_over_two_runs(tmp_path: Path, counted: list[Path]) -> None:
    file, store = tmp_path / "f", tmp_path / "hashes.json"
    file.write_text("content")
    first = HashMemory(store)
    digest = first.sha256(file)
    assert first.sha256(file) == digest
    first.save()
    assert HashMemory(store).sha256(file) == digest
    assert counted == [file]


def test_same_size_and_other_time_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "f"
    memory = HashMemory(tmp_path / "hashes.json")
    file.write_text("aaaa")
    os.utime(file, ns=(1, 1))
    old = memory.sha256(file)
    file.write_text("bbbb")
    os.utime(file, ns=(2, 2))
    assert memory.sha256(file) == hashlib.sha256(b"bbbb").hexdigest() != old


def test_same_size_and_time_and_other_inode_is_read_again(tmp_path: Path) -> None:
    file, other = tmp_path / "f", tmp_path / "g"
    memory = HashMemory(tmp_path / "hashes.json")
    file.write_text("aaaa")
    os.utime(file, ns=(1, 1))
    memory.sha256(file)
    other.write_text("bbbb")
    os.utime(other, ns=(1, 1))
    other.replace(file)
    assert memory.sha256(file) == hashlib.sha256(b"bbbb").hexdigest()


def test_same_time_and_other_size_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "f"
    memory = HashMemory(tmp_path / "hashes.json")
    file.write_text("aaaa")
    os.utime(file, ns=(1, 1))
    memory.sha256(file)
    file.write_text("aaaaa")
    os.utime(file, ns=(1, 1))
    assert memory.sha256(file) == hashlib.sha256(b"aaaaa").hexdigest()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\xff", b"[]", b"3", b"null", b'{"%s": 3}', b'{"%s": []}', b'{"%s": [1]}']
)  # fmt: skip
def test_damaged_store_costs_only_a_new_reading(tmp_path: Path, damage: bytes) -> None:
    file, store = tmp_path / "f", tmp_path / "hashes.json"
    file.write_text("content")
    store.write_bytes(damage.replace(b"%s", str(file.resolve()).encode()))
    memory = HashMemory(store)
    assert memory.sha256(file) == hashlib.sha256(b"content").hexdigest()
    memory.save()
    assert str(file.resolve()) in json.loads(store.read_text())


def test_nothing_new_writes_no_store(tmp_path: Path) -> None:
    HashMemory(tmp_path / "hashes.json").save()
    assert not (tmp_path / "hashes.json").exists()


# --- whole or nothing ---------------------------------------------------------------


@pytest.mark.parametrize("content", ["text ä\n", b"\x00\xff"])
def test_write_atomic_writes_text_and_bytes(tmp_path: Path, content: str | bytes) -> None:
    target = tmp_path / "new/folder/f"
    write_atomic(target, content)
    assert target.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert target.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in target.parent.iterdir()] == ["f"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_write_atomic_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    target = tmp_path / "f"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync", full) if failing == "fsync" else (Path, "replace", full)))
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_directory_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "result"
    with fresh_directory(final) as fresh:
        (fresh / "f").write_text("x")
        assert not final.exists()
    assert (final / "f").read_text() == "x"
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


def test_directory_replaces_the_old_one_as_a_whole(tmp_path: Path) -> None:
    final = tmp_path / "result"
    final.mkdir()
    (final / "leftover").write_text("old")
    with fresh_directory(final) as fresh:
        (fresh / "f").write_text("x")
        assert (final / "leftover").is_file()
    assert [p.name for p in final.iterdir()] == ["f"]
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


def break_while_filling(final: Path, failure: type[BaseException]) -> None:
    """The old result is in its place while a new one is made, and the making fails."""
    with fresh_directory(final) as fresh:
        (fresh / "f").write_text("new")
        assert (final / "f").read_text() == "old"
        raise failure


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_directory_whose_making_fails_leaves_the_old_one(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    final = tmp_path / "result"
    final.mkdir()
    (final / "f").write_text("old")
    with pytest.raises(failure):
        break_while_filling(final, failure)
    assert (final / "f").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


def test_leftover_of_a_killed_run_is_not_taken_for_content(tmp_path: Path) -> None:
    final = tmp_path / "result"
    (tmp_path / "result.partial").mkdir()
    (tmp_path / "result.partial/half").write_text("half")
    with fresh_directory(final) as fresh:
        (fresh / "f").write_text("x")
    assert [p.name for p in final.iterdir()] == ["f"]
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


def test_run_killed_between_the_two_renames_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: the old one is moved away, the new one not yet in place."""
    final = tmp_path / "result"
    final.mkdir()
    (final / "f").write_text("old")
    rename = Path.rename

    def killed_at_the_second(self: Path, target: Path) -> Path:
        if self.name == "result.partial":
            raise SystemExit
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed_at_the_second)
    with pytest.raises(SystemExit), fresh_directory(final) as fresh:
        (fresh / "f").write_text("new")
    monkeypatch.undo()
    assert not final.exists()
    with pytest.raises(ValueError):
        break_while_filling(final, ValueError)
    assert (final / "f").read_text() == "old"
    with fresh_directory(final) as fresh:
        (fresh / "f").write_text("new")
    assert (final / "f").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["result"]


@pytest.mark.parametrize("kind", ["file", "link", "directory", "nothing"])
def test_remove_tree_removes_what_is_there_and_follows_no_link(tmp_path: Path, kind: str) -> None:
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "f").write_text("x")
    path = tmp_path / "path"
    if kind == "file":
        path.write_text("x")
    elif kind == "link":
        path.symlink_to(keep)
    elif kind == "directory":
        (path / "deep").mkdir(parents=True)
        (path / "deep/readonly").write_text("x")
        (path / "deep/readonly").chmod(0o400)
        (path / "deep").chmod(0o500)
    remove_tree(path)
    assert not os.path.lexists(path)
    assert (keep / "f").is_file()


def test_tree_size_counts_hard_links_once(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100_000)
    once = tree_size(tmp_path)
    (tmp_path / "g").hardlink_to(tmp_path / "f")
    assert tree_size(tmp_path) == once >= 100_000
    assert tree_size(tmp_path / "f") >= 100_000


# --- content digest -----------------------------------------------------------------

TREE = {"b.h": b"two\n", "a/z.h": b"", "a.h": b"one\n", "a-b/x": b"\x00\xff", "ä.txt": b"u"}


def make_tree(root: Path) -> Path:
    for name, content in TREE.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return root


def test_tree_digest_is_the_documented_construction(tmp_path: Path) -> None:
    """Computed here by hand: lines `SHA256  PATH`, sorted by path, hashed once more."""
    digest = hashlib.sha256()
    for name in sorted(TREE):
        digest.update(f"{hashlib.sha256(TREE[name]).hexdigest()}  {name}\n".encode())
    assert tree_digest(make_tree(tmp_path)) == f"h1:{digest.hexdigest()}"


def test_tree_digest_of_one_known_tree(tmp_path: Path) -> None:
    """A constant, so that a changed construction can't pass with a changed test."""
    (tmp_path / "hello.txt").write_bytes(b"hello\n")
    # printf 'hello\n' | sha256sum | sed 's/-/hello.txt/' | sha256sum
    assert tree_digest(tmp_path) == (
        "h1:53f3136e49ddba251d0f3b5261a52731f6e9062325da801fb7edc275392d67dd"
    )


def test_tree_digest_does_not_count_modes_times_and_empty_folders(tmp_path: Path) -> None:
    before = tree_digest(make_tree(tmp_path))
    (tmp_path / "a.h").chmod(0o755)
    os.utime(tmp_path / "b.h", ns=(1, 1))
    (tmp_path / "empty").mkdir()
    assert tree_digest(tmp_path) == before


def test_tree_digest_does_not_count_what_git_keeps(tmp_path: Path) -> None:
    before = tree_digest(make_tree(tmp_path))
    for name in (".git/config", "a/.git"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert tree_digest(tmp_path) == before
    (tmp_path / ".gitignore").write_bytes(b"x")
    assert tree_digest(tmp_path) != before


@pytest.mark.parametrize("change", ["content", "name", "extra", "less"])
def test_tree_digest_sees_every_change_of_content(tmp_path: Path, change: str) -> None:
    before = tree_digest(make_tree(tmp_path))
    match change:
        case "content":
            (tmp_path / "b.h").write_bytes(b"tow\n")
        case "name":
            (tmp_path / "b.h").rename(tmp_path / "c.h")
        case "extra":
            (tmp_path / "a/extra").write_bytes(b"")
        case "less":
            (tmp_path / "a/z.h").unlink()
    assert tree_digest(tmp_path) != before
