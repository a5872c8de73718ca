"""Where the new upstream comes from: refs, releases, the list of newer ones; and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sm121.fetch import Cache
from sm121.files import HashMemory
from support.rebasing import lines, sha256
from support.servers import serve_index
from support.tools import tool

UNREACHABLE = "http://127.0.0.1:9/vllm.git"


@pytest.fixture
def released(desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Two patches, three newer releases on an index, and no git remote."""
    project = desk.project
    project.patch("first", {"a.txt": lines(l10="ours")})
    project.patch("second", {"b.txt": lines(l10="ours")})
    project.release("1.3.0", {"c.txt": lines(l1="x")})
    project.release("1.3.1", {"a.txt": lines(l10="ours")})
    project.release("1.10.0", {"b.txt": lines(l10="upstream's")})
    (tmp_path / "index").mkdir()
    for tag in ("v1.2.3", "v1.3.0", "v1.3.1", "v1.10.0"):
        made = project.pack(tmp_path / "index", tag=tag)
        if tag == "v1.2.3":
            project.pins["vllm"]["sdist-sha256"] = sha256(made)
    project.pins["vllm"]["git"] = UNREACHABLE
    project.repin()
    with serve_index(tmp_path / "index") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
        yield desk


def test_check_tries_every_newer_release_and_changes_nothing(released) -> None:
    before = released.project.data()
    report = released.report("--check", code=1)
    assert [row["label"] for row in report["onto"]] == ["1.3.0", "1.3.1", "1.10.0"]
    assert [[p["verdict"] for p in row["patches"]] for row in report["onto"]] == [
        ["clean", "clean"], ["upstreamed", "clean"], ["upstreamed", "superseded"],
    ]  # fmt: skip
    assert {row["provider"] for row in report["onto"]} == {"sdist"}
    assert not any(h["recent"] for p in report["onto"][2]["patches"] for h in p["hunks"])
    said = released.rebase("--check", code=1)
    rows = {
        line.split()[0]: line.split()[1:] for line in said.splitlines() if line.startswith("  ")
    }
    assert rows["patch"] == ["1.3.0", "1.3.1", "1.10.0"]
    assert rows["second"] == ["clean", "clean", "superseded"]
    assert "does not go onto 1.10.0 by itself" in said
    assert released.project.data() == before
    assert not (released.project.root / "build/rebase/session.json").exists()


def test_check_of_what_applies_is_0(released) -> None:
    released.rebase("--check", "--onto", "1.3.0", "--onto", "1.3.1")


def test_what_was_seen_once_needs_no_network(released, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--offline forbids" in released.rebase("--check", "--offline", code=3)
    assert "--offline forbids" in released.rebase("--check", "--offline", "--onto", "1.3.0", code=3)
    released.rebase("--check", code=1)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    cache = Cache(released.project.root / "build/cache", HashMemory(Path("none")))
    for file in cache.root.glob("files/*/*"):
        file.unlink()  # the import is remembered, not the file
    report = released.report("--check", "--offline", code=1)
    assert [row["label"] for row in report["onto"]] == ["1.3.0", "1.3.1", "1.10.0"]


def test_tag_whose_remote_is_unreachable_is_the_release_and_that_is_said(released) -> None:
    (row,) = released.report("--check", "--onto", "v1.3.0")["onto"]
    assert (row["provider"], row["version"]) == ("sdist", "1.3.0")
    assert "the git remote can't be used" in row["reason"]
    assert "could not be fetched" in released.rebase("--check", "--onto", "main", code=3)


def test_release_that_the_index_lacks(released) -> None:
    assert "no sdist of vLLM 9.9.9" in released.rebase("--check", "--onto", "9.9.9", code=2)


def test_commit_of_a_sdist_has_to_be_said_and_must_fit(released) -> None:
    released.rebase("--onto", "1.3.0")
    said = released.rebase("--accept", code=2)
    assert "git ls-remote" in said
    assert "wanted 40 hex digits" in released.rebase("--accept", "--commit", "abc", code=2)
    released.rebase("--accept", "--commit", "ab" * 20)
    pins = (released.project.root / "pins/1.3.0/stack.toml").read_text()
    assert f'commit = "{"ab" * 20}"' in pins
    # The new stack's base is the commit that the series was carried onto: nothing is off.
    released.lint("--stack", "1.3.0")


def test_shallow_clone_has_the_version_of_the_pin(desk, tmp_path: Path) -> None:
    """cases.md 13: a fetch without tags and depth; the version is the pin's, not git's guess."""
    desk.project.patch("first", {"a.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"c.txt": lines(l1="x")})
    (row,) = desk.report("--check", "--onto", "v1.3.0")["onto"]
    assert (row["version"], row["provider"], row["history"]) == ("1.3.0", "git", True)
    refs = desk.project.root / "build/source/vllm.git"
    assert not list((refs / "refs/tags").glob("*"))
    (branch,) = desk.report("--check", "--onto", "main")["onto"]
    assert branch["version"] == ""


def test_git_without_merge_tree_is_told(desk, tmp_path: Path, monkeypatch) -> None:
    desk.project.patch("first", {"a.txt": lines(l10="ours")})
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "git").write_text(
        '#!/bin/sh\n[ "$1" = version ] && echo git version 2.34.1 && exit\nexec GIT "$@"\n'.replace(
            "GIT", tool("git")
        )
    )
    (fake / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:/usr/bin:/bin")
    said = desk.rebase("--check", "--onto", "main", code=3)
    assert "git 2.34.1 is too old" in said
    assert "2.38" in said


# --- clean spares a person's work ---------------------------------------------------


def test_clean_spares_an_unfinished_rebase_and_an_edited_series(desk) -> None:
    desk.project.patch("first", {"a.txt": lines(l10="ours")})
    desk.project.release("1.3.0", {"a.txt": lines(l10="theirs")})
    desk.rebase("--onto", "v1.3.0", code=1)
    for what in ("source", "rebase", "all"):
        assert "an unfinished rebase" in desk.run("clean", what, code=2)
    desk.rebase("--abort")
    desk.run("clean", "rebase")
    desk.run("patch", "--edit")
    tree = desk.project.root / "build/series/1.2.3"
    (tree / "a.txt").write_text("edited\n")
    for what in ("source", "series"):
        assert "edited and not exported" in desk.run("clean", what, code=2)
    (tree / "a.txt").write_text(lines(l10="ours"))
    desk.run("clean", "series", "source")
    assert not tree.exists()
    assert "no branch" in desk.run("export", code=2)
    desk.run("patch", "--edit")
