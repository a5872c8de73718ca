"""The pipeline's git: import, export and checkout are byte for byte, on real repositories."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sm121 import proc
from sm121.errors import NetworkFault
from sm121.gitcommand import head_of
from sm121.gitrepo import Repository
from support.gits import Work
from support.tools import sm121_environment, tool

DATE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

# Everything that a careless import would change.
AWKWARD: dict[str, bytes] = {
    "crlf.txt": b"one\r\ntwo\r\n",
    "mixed.txt": b"one\r\ntwo\n",
    "binary.bin": bytes(range(256)),
    "no-newline": b"no newline at the end",
    "latin1.py": b"# -*- coding: latin-1 -*-\ns = '\xe4'\n",
    "ident.c": b"/* $Id$ */\n",
    ".gitattributes": b"*.txt text eol=lf\n*.c ident\n*.bin filter=lfs\n*.py text working-tree-encoding=UTF-16\n",
    ".gitignore": b"*.log\n/ignored/\n",
    "kept.log": b"ignored upstream, and yet in the sdist\n",
    "ignored/file": b"x",
    "with space and \xc3\xa4.txt".encode("latin-1").decode("utf-8"): b"name",
    "empty": b"",
}


def fill(folder: Path, files: dict[str, bytes] = AWKWARD) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (folder / "script.sh").write_bytes(b"#!/bin/sh\n")
    (folder / "script.sh").chmod(0o755)
    (folder / "link").symlink_to("crlf.txt")
    return folder


def bring(repository: Repository, folder: Path) -> str:
    return repository.import_tree(folder, message="Release\n", date=DATE)


def content(folder: Path) -> dict[str, bytes | str]:
    return {
        p.relative_to(folder).as_posix(): str(p.readlink()) if p.is_symlink() else p.read_bytes()
        for p in folder.rglob("*")
        if p.is_symlink() or p.is_file()
    }


# --- making one ---------------------------------------------------------------------


def test_a_killed_init_is_no_repository(tmp_path: Path) -> None:
    """HEAD written, its content not yet: GitPython takes that for a repository, git does not."""
    half = tmp_path / "own.git.partial"
    for folder in ("objects", "refs"):
        (half / folder).mkdir(parents=True)
    (half / "HEAD").touch()
    repository = Repository(tmp_path / "own.git")
    assert bring(repository, fill(tmp_path / "tree"))
    assert not half.exists()


def test_git_makes_it_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill at any point of `git init` leaves is not where a repository is looked for."""
    seen: list[bool] = []
    rename = Path.rename

    def look(self: Path, target: Path) -> Path:
        seen.append((self / "HEAD").is_file() and not target.exists())
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look)
    Repository(tmp_path / "own.git")
    assert seen == [True]


def test_an_existing_repository_is_opened_without_writing_its_config(tmp_path: Path) -> None:
    """A run killed while it wrote would leave half a file, and half of `core.bare`."""
    config = Repository(tmp_path / "own.git").path / "config"
    config.chmod(0o444)
    before = config.stat()
    repository = Repository(tmp_path / "own.git")
    assert bring(repository, fill(tmp_path / "tree"))
    assert (config.stat().st_ino, config.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# --- import and export --------------------------------------------------------------


def test_import_and_export_keep_every_byte_mode_and_link(
    repository: Repository, tmp_path: Path
) -> None:
    tree = fill(tmp_path / "tree")
    repository.export(bring(repository, tree), tmp_path / "out")
    assert content(tmp_path / "out") == content(tree)
    assert os.access(tmp_path / "out/script.sh", os.X_OK)
    assert not os.access(tmp_path / "out/crlf.txt", os.X_OK)


def test_same_folder_has_the_same_commit_whatever_times_and_umask(tmp_path: Path) -> None:
    ids = []
    for name, umask in (("one", 0o022), ("two", 0o077)):
        before = os.umask(umask)
        try:
            tree = fill(tmp_path / name / "tree")
            os.utime(tree / "crlf.txt", (int(umask), int(umask)))
            repository = Repository(tmp_path / name / "own.git")
            ids.append(bring(repository, tree))
            repository.close()
        finally:
            os.umask(before)
    assert ids[0] == ids[1]


def test_users_git_configuration_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Repository(tmp_path / "plain.git")
    expected = bring(plain, fill(tmp_path / "tree"))
    plain.close()
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[core]\n autocrlf = true\n fileMode = false\n attributesFile = ~/attributes\n"
        f" excludesFile = ~/ignore\n hooksPath = {home}\n[user]\n name = Me\n email = me@here\n"
        "[commit]\n gpgSign = true\n[i18n]\n commitEncoding = latin-1\n"
    )
    (home / "attributes").write_text("* text=auto eol=crlf\n")
    (home / "ignore").write_text("*\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Me")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z")
    again = Repository(tmp_path / "again.git")
    assert bring(again, tmp_path / "tree") == expected
    again.close()


def test_import_does_not_depend_on_the_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = fill(tmp_path / "tree")
    ids = set()
    for zone in ("UTC", "Pacific/Kiritimati"):
        monkeypatch.setenv("TZ", zone)
        repository = Repository(tmp_path / f"{zone[:3]}.git")
        ids.add(bring(repository, tree))
        repository.close()
    assert len(ids) == 1


def test_repository_of_a_surrounding_git_command_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A git hook, or `git rebase --exec`, sets GIT_DIR for everything it starts."""
    other = Work.init(tmp_path / "other")
    head = other.commit({"f": "x"})
    before = sorted(p.name for p in (other.path / ".git").rglob("*"))
    for name, value in {"DIR": ".git", "INDEX_FILE": ".git/index", "WORK_TREE": "."}.items():
        monkeypatch.setenv(f"GIT_{name}", str(other.path / value))
    repository = Repository(tmp_path / "own.git")
    commit = bring(repository, fill(tmp_path / "tree"))
    repository.point("refs/test/x", commit)
    repository.checkout(commit, tmp_path / "out")
    repository.close()
    assert content(tmp_path / "out") == content(tmp_path / "tree")
    for name in ("DIR", "INDEX_FILE", "WORK_TREE"):
        monkeypatch.delenv(f"GIT_{name}", raising=False)
    assert sorted(p.name for p in (other.path / ".git").rglob("*")) == before
    assert other.git("rev-parse", "HEAD") == head


# --- reading ------------------------------------------------------------------------


def test_reading_keeps_line_ends_and_knows_what_is_not_there(
    repository: Repository, tmp_path: Path
) -> None:
    commit = bring(repository, fill(tmp_path / "tree"))
    assert repository.read(commit, "crlf.txt") == "one\r\ntwo\r\n"
    assert repository.read(commit, "no-newline") == "no newline at the end"
    assert repository.read(commit, "gone") is None
    assert repository.commit_of("refs/none") is None
    assert repository.commit_of(commit) == commit


def test_changed_paths_are_whole_names(repository: Repository, tmp_path: Path) -> None:
    one = bring(repository, fill(tmp_path / "tree"))
    (tmp_path / "tree/with space and ä.txt").write_bytes(b"changed")
    (tmp_path / "tree/empty").unlink()
    two = bring(repository, tmp_path / "tree")
    assert repository.changed_paths(one, two) == ["empty", "with space and ä.txt"]


# --- checkout -----------------------------------------------------------------------


def mtimes(folder: Path) -> dict[str, int]:
    return {
        p.relative_to(folder).as_posix(): p.lstat().st_mtime_ns
        for p in folder.rglob("*")
        if p.is_file() and not p.is_symlink()
    }


def age(folder: Path) -> None:
    """Give all files an old time, so that a rewritten one shows."""
    for name in mtimes(folder):
        os.utime(folder / name, ns=(10**18, 10**18))


def test_checkout_rewrites_only_what_differs(repository: Repository, tmp_path: Path) -> None:
    """What ninja builds again is decided by this."""
    tree, out = fill(tmp_path / "tree"), tmp_path / "work/src"
    one = bring(repository, tree)
    assert "crlf.txt" in repository.checkout(one, out)
    assert content(out) == content(tree)
    age(out)
    assert repository.checkout(one, out) == []
    before = mtimes(out)
    (tree / "mixed.txt").write_bytes(b"changed\n")
    two = bring(repository, tree)
    assert repository.checkout(two, out) == ["mixed.txt"]
    after = mtimes(out)
    assert [n for n in before if before[n] != after[n]] == ["mixed.txt"]
    assert content(out) == content(tree)


def test_checkout_puts_edited_files_back_and_removes_leftovers(
    repository: Repository, tmp_path: Path
) -> None:
    tree, out = fill(tmp_path / "tree"), tmp_path / "work/src"
    commit = bring(repository, tree)
    repository.checkout(commit, out)
    age(out)
    (out / "crlf.txt").write_bytes(b"edited by hand\n")
    (out / "empty").unlink()
    for leftover in (
        "vllm/third_party/x/__init__.py",
        "build.log",
        "ignored/more",
        "__pycache__/x.pyc",
    ):
        (out / leftover).parent.mkdir(parents=True, exist_ok=True)
        (out / leftover).write_text("left over")
    nested = Work.init(out / "third_party/clone")
    nested.commit({"f": "x"})
    assert repository.checkout(commit, out) == ["crlf.txt", "empty"]
    assert content(out) == content(tree)
    assert not (out / "vllm").exists()
    assert not (out / "third_party").exists()


def test_checkout_keeps_what_was_generated_where_it_is_told_to(
    repository: Repository, tmp_path: Path
) -> None:
    """vLLM's CMake writes kernels below csrc/; ninja compiles them again if they are new."""
    out = tmp_path / "work/src"
    commit = bring(repository, fill(tmp_path / "tree"))
    repository.checkout(commit, out)
    for name in ("csrc/moe/kernel_1.cu", "vllm/_version.py", "csrc2/x"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("made by a script")
    age(out)
    kept = (out / "csrc/moe/kernel_1.cu").stat()
    assert repository.untracked(out) == ["csrc/moe/kernel_1.cu", "csrc2/x", "vllm/_version.py"]
    repository.checkout(commit, out, keep="csrc/")
    assert repository.untracked(out) == ["csrc/moe/kernel_1.cu"]
    assert (out / "csrc/moe/kernel_1.cu").stat().st_mtime_ns == kept.st_mtime_ns
    repository.checkout(commit, out)
    assert repository.untracked(out) == []


def test_checkout_follows_files_that_become_folders_and_back(
    repository: Repository, tmp_path: Path
) -> None:
    out = tmp_path / "work/src"
    commits = []
    for name, files in {"one": {"x": b"file"}, "two": {"x/y": b"below"}}.items():
        fill(tmp_path / name, files)
        commits.append(bring(repository, tmp_path / name))
    for index in (0, 1, 0):
        repository.checkout(commits[index], out)
        assert content(out) == content(tmp_path / ("one", "two")[index])


def test_checkout_keeps_a_file_that_was_left_over_and_is_now_wanted(
    repository: Repository, tmp_path: Path
) -> None:
    tree, out = fill(tmp_path / "tree"), tmp_path / "work/src"
    one = bring(repository, tree)
    for name in ("added.py", "folder/added.py", "was-a-folder"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_bytes(b"upstream's\n")
    two = bring(repository, tree)
    repository.checkout(one, out)
    (out / "added.py").write_bytes(b"left over\n")
    (out / "was-a-folder").mkdir()
    (out / "was-a-folder/x").write_bytes(b"left over\n")
    repository.checkout(two, out)
    assert content(out) == content(tree)


def test_checkout_after_the_index_is_lost(repository: Repository, tmp_path: Path) -> None:
    tree, out = fill(tmp_path / "tree"), tmp_path / "work/src"
    commit = bring(repository, tree)
    repository.checkout(commit, out)
    (tmp_path / "work/src.index").unlink()
    (out / "leftover").write_text("x")
    repository.checkout(commit, out)
    assert content(out) == content(tree)


# --- runs that were killed ----------------------------------------------------------


def test_checkout_goes_on_after_a_killed_one(repository: Repository, tmp_path: Path) -> None:
    """git leaves INDEX.lock when it is killed, and refuses to work while it is there."""
    tree, out = fill(tmp_path / "tree"), tmp_path / "work/src"
    commit = bring(repository, tree)
    repository.checkout(commit, out)
    (tmp_path / "work/src.index.lock").write_bytes(b"")
    (out / "mixed.txt").write_bytes(b"half")
    repository.checkout(commit, out)
    assert content(out) == content(tree)


@pytest.mark.parametrize("lock", ["config.lock", "refs/test/x.lock", "shallow.lock"])
def test_repository_works_after_a_killed_run(tmp_path: Path, lock: str) -> None:
    repository = Repository(tmp_path / "own.git")
    first = bring(repository, fill(tmp_path / "tree"))
    repository.point("refs/test/x", first)
    repository.close()
    (tmp_path / "own.git" / lock).write_bytes(b"")
    upstream = Work.init(tmp_path / "upstream")
    second = upstream.commit({"f": "x"})
    again = Repository(tmp_path / "own.git")
    again.fetch_commit(upstream.url, ref="main", timeout_s=60)
    again.point("refs/test/x", second)
    assert again.commit_of("refs/test/x") == second
    again.close()


def test_repository_made_by_half_still_keeps_bytes(tmp_path: Path) -> None:
    """Killed after `git init` and before the attributes were written."""
    subprocess.run([tool("git"), "init", "-q", "--bare", tmp_path / "own.git"], check=True)
    repository = Repository(tmp_path / "own.git")
    tree = fill(tmp_path / "tree")
    repository.export(bring(repository, tree), tmp_path / "out")
    repository.close()
    assert content(tmp_path / "out") == content(tree)


def test_git_of_a_killed_run_carries_the_mark_to_be_found_by(
    repository: Repository, tmp_path: Path
) -> None:
    """A git that outlives a killed run would write beside the next one."""
    proc.set_scope(tmp_path / "build")
    try:
        marked = Repository(tmp_path / "own.git")
        environment = str(marked._git.execute(["env"]))
        marked.close()
    finally:
        proc.set_scope(Path())
    assert f"{proc.MARKER}={tmp_path}/build:{os.getpid()}" in environment.splitlines()


# --- remotes ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lightweight tag", "annotated tag", "branch", "commit"])
def test_fetch_gives_the_commit_behind_any_ref(
    repository: Repository, work: Path, kind: str
) -> None:
    upstream = Work.init(work)
    commit = upstream.commit({"f": "x"})
    upstream.git("tag", "v1")
    upstream.git("tag", "-a", "v2", "-m", "annotated")
    ref = {"lightweight tag": "v1", "annotated tag": "v2", "branch": "main", "commit": commit}[kind]
    upstream.commit({"f": "later"})
    upstream.git("branch", "later")
    upstream.git("reset", "-q", "--hard", commit)
    assert repository.fetch_commit(upstream.url, ref=ref, timeout_s=60) == commit


def test_fetch_brings_no_history_and_no_tags(repository: Repository, work: Path) -> None:
    upstream = Work.init(work)
    first = upstream.commit({"f": "1"})
    upstream.commit({"f": "2"})
    upstream.git("tag", "v1")
    repository.fetch_commit(upstream.url, ref="main", timeout_s=60)
    assert repository.commit_of(first) is None
    assert repository.commit_of("refs/tags/v1") is None


@pytest.mark.parametrize("ref", ["v9", "0" * 40])
def test_ref_that_is_not_there_is_a_network_fault(
    repository: Repository, work: Path, ref: str
) -> None:
    upstream = Work.init(work)
    upstream.commit({"f": "x"})
    with pytest.raises(NetworkFault, match="could not be fetched") as raised:
        repository.fetch_commit(upstream.url, ref=ref, timeout_s=60)
    assert ref in raised.value.cause


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x.git", "file:///nowhere/x.git"])
def test_unreachable_remote_is_a_network_fault(repository: Repository, url: str) -> None:
    with pytest.raises(NetworkFault) as raised:
        repository.fetch_commit(url, ref="v1", timeout_s=60)
    assert raised.value.cause
    assert "stderr" not in raised.value.cause


def test_submodules_are_read_and_relative_urls_joined(
    repository: Repository, tmp_path: Path
) -> None:
    inner = Work.init(tmp_path / "inner.git")
    inner_commit = inner.commit({"f": "x"})
    outer = Work.init(tmp_path / "outer.git")
    outer.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", inner.url, "deps/a")
    outer.git("config", "-f", ".gitmodules", "submodule.deps/a.url", "../inner.git")
    outer.commit()
    commit = repository.fetch_commit(outer.url, ref="main", timeout_s=60)
    assert repository.submodule_commit(commit, "deps/a") == inner_commit
    assert repository.submodule_commit(commit, "deps/none") == ""
    assert repository.submodule_url(commit, "deps/a", base=outer.url) == inner.url
    with pytest.raises(NetworkFault, match="no submodule at deps/none"):
        repository.submodule_url(commit, "deps/none", base=outer.url)


def test_without_git_there_is_a_message_and_code_3(tmp_path: Path, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sm121", "source"], cwd=root, capture_output=True, text=True,
        env=sm121_environment(SM121_BUILD=str(tmp_path / "build"), PATH=str(tmp_path)), check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode == 3
    assert "error: git was not found" in done.stderr
    assert "Install git" in done.stderr


def test_where_a_checkout_is(tmp_path: Path) -> None:
    assert head_of(tmp_path / "none") == ""
    empty = tmp_path / "empty"
    subprocess.run(["git", "init", "-q", empty], check=True)
    assert head_of(empty) == ""
    work = Work.init(tmp_path / "work")
    commit = work.commit({"a": "1"})
    assert head_of(work.path) == commit
