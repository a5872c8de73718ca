"""`source`, `patch` and `build --dry-run` through the command line, on a tiny upstream.

Real git, real files, the real entry point; only the release is small.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import git
import pytest
from git.exc import GitCommandError

from sm121.__main__ import main
from support.stacks import write_stack
from support.upstream import Upstream, make_checkout, make_upstream


@dataclass
class Checkout:
    root: Path
    upstream: Upstream
    pins: dict[str, Any]
    capsys: pytest.CaptureFixture[str]

    def run(self, *argv: str, code: int = 0) -> str:
        """Run a verb here; returns what it said."""
        assert main(list(argv)) == code, self.capsys.readouterr().err
        out, err = self.capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        return err

    def repin(self) -> None:
        write_stack(self.root / "pins", self.pins)

    def patch(self, name: str, files, **how) -> Path:
        series = self.root / "patches/vllm/1.2.3"
        path = self.upstream.work.make_patch(series / f"{name}.patch", files, keep=False, **how)
        with (series / "series").open("a") as listing:
            listing.write(f"{name}.patch\n")
        return path

    def record(self, stage: str) -> dict[str, Any]:
        state = json.loads((self.root / "build/state.json").read_text())
        return state["stages"][stage]

    def snapshot(self) -> dict[str, tuple[int, int, bytes]]:
        return {
            str(p.relative_to(self.root)): (p.stat().st_mtime_ns, p.stat().st_ino, p.read_bytes())
            for p in self.root.rglob("*")
            if p.is_file()
        }


@pytest.fixture
def checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Checkout]:
    upstream = make_upstream(tmp_path / "upstream")
    root = make_checkout(tmp_path / "checkout", upstream.pins)
    monkeypatch.chdir(root)
    before = signal.getsignal(signal.SIGTERM)
    yield Checkout(root, upstream, upstream.pins, capsys)
    signal.signal(signal.SIGTERM, before)


def test_source_runs_once(checkout: Checkout) -> None:
    assert "source      first run" in checkout.run("source")
    assert checkout.record("source/1.2.3")["result"]["commit"] == checkout.upstream.commit
    assert "source      up to date" in checkout.run("source")


def test_patch_shows_the_series_and_its_commits(checkout: Checkout) -> None:
    checkout.patch("repair-other", {"vllm/other.py": "x = 2\n"})
    said = checkout.run("patch")
    commit = checkout.record("patch/1.2.3")["result"]["patches"][0]["commit"]
    (line,) = (x for x in said.splitlines() if x.strip().startswith("repair-other"))
    assert line.split() == ["repair-other", "applied", commit[:12], "Pending"]


def test_patch_check_lints(checkout: Checkout) -> None:
    checkout.patch("good", {"vllm/other.py": "x = 2\n"})
    said = checkout.run("patch", "--check", code=1)
    assert "ok  1 Python files parse" in said
    assert "ok  no style checked" in said
    # There is no lock of these pins to make a toolkit from: no configure, and that is no success.
    assert "error:" in said.split("no style checked")[1]
    checkout.patch("bad", {"csrc/spinloop.cpp": "int spin() { return 2; }\n"}, body="Because.\n")
    said = checkout.run("patch", "--check", code=1)
    assert "bad.patch: 0 Upstream-Status trailers" in said
    assert "bad.patch: no Signed-off-by" in said


def test_changed_patch_is_the_reason_to_run_again(checkout: Checkout) -> None:
    path = checkout.patch("repair-other", {"vllm/other.py": "x = 2\n"})
    checkout.run("compile", "--profile=smoke", "--dry-run")
    checkout.run("patch")
    path.write_text(path.read_text().replace("+x = 2", "+x = 3"))
    said = checkout.run("compile", "--profile=smoke", "--dry-run")
    assert "source      up to date" in said
    assert "patch       would run: patch repair-other changed" in said
    assert "compile     would run: depends on patch" in said


def test_patch_that_does_not_apply_stops_with_code_1(checkout: Checkout) -> None:
    """cases.md 15."""
    path = checkout.patch("repair-other", {"vllm/other.py": "x = 2\n"})
    path.write_text(path.read_text().replace("-x = 1", "-x = 7"))
    said = checkout.run("patch", code=1)
    assert "repair-other.patch:" in said
    assert "patch failed: vllm/other.py:1" in said
    assert "| x = 7" in said
    assert "nox -s patch" in said.split("next:")[1]


def test_upstreamed_patch_is_noted_and_the_next_applied(checkout: Checkout) -> None:
    """cases.md 16."""
    checkout.patch("upstreamed", {"vllm/other.py": "x = 2\n"})
    checkout.patch("ours", {"csrc/spinloop.cpp": "int spin() { return 2; }\n"})
    commit = checkout.upstream.work.commit({"vllm/other.py": "x = 2\n"})
    checkout.upstream.work.git("tag", "-f", "v1.2.3")
    checkout.pins["vllm"]["commit"] = commit
    checkout.repin()
    said = checkout.run("patch")
    assert "note: patch upstreamed: upstream has it, so it makes no commit" in said
    assert [p["status"] for p in checkout.record("patch/1.2.3")["result"]["patches"]] == [
        "upstreamed", "applied",
    ]  # fmt: skip


def test_pins_that_name_a_patch_which_the_series_has_not_stop_with_code_2(
    checkout: Checkout,
) -> None:
    """Also where only the pins have changed, and the stage has nothing to do."""
    checkout.patch("repair-other", {"vllm/other.py": "x = 2\n"})
    less = {"component": "spinloop", "sources": ["csrc/a.cu"], "reason": "for sm_90"}
    checkout.pins["sources-left-out"] = [less | {"patch": "repair-other"}]
    checkout.repin()
    checkout.run("patch")
    checkout.pins["sources-left-out"] = [less | {"patch": "repair-others"}]
    checkout.repin()
    said = checkout.run("patch", code=2)
    assert "sources-left-out names repair-others." in said
    assert "did you mean 'repair-other'?" in said


def test_clone_without_tags_has_the_pins_version(checkout: Checkout) -> None:
    """cases.md 13: no tag reaches our repository, and none is needed."""
    checkout.run("source")
    refs = {p.name for p in (checkout.root / "build/source/vllm.git/refs").iterdir()}
    assert list((checkout.root / "build/source/vllm.git/refs/tags").glob("*")) == []
    assert "sm121" in refs


def test_drift_stops_before_anything_is_patched(checkout: Checkout) -> None:
    checkout.pins["sources"]["cutlass"]["ref"] = "v4.3.0"
    checkout.repin()
    said = checkout.run("patch", code=1)
    assert "sources.cutlass: pinned at v4.3.0, but CMakeLists.txt asks for v4.4.2" in said
    assert not (checkout.root / "build/source/vllm.git/refs/sm121/patched").exists()


def test_wrong_pins_stop_with_code_2(checkout: Checkout) -> None:
    checkout.pins["vllm"]["comit"] = "x"
    checkout.repin()
    said = checkout.run("build", code=2)
    assert "vllm.comit: unknown key; did you mean 'commit'?" in said
    assert not (checkout.root / "build").exists()


def test_no_network_stops_with_code_3(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    checkout.pins["vllm"]["git"] = "http://127.0.0.1:9/vllm.git"
    checkout.repin()
    said = checkout.run("source", code=3)
    assert "127.0.0.1:9" in said.split("why:")[1]


def test_offline_after_one_run_needs_nothing(checkout: Checkout) -> None:
    checkout.run("patch")
    shutil.rmtree(checkout.upstream.work.path)
    assert "up to date" in checkout.run("source", "--offline")
    (checkout.root / "build/state.json").unlink()
    checkout.run("patch", "--offline")
    assert checkout.record("source/1.2.3")["result"]["provider"] == "git"


def test_dry_run_changes_nothing(checkout: Checkout) -> None:
    checkout.patch("repair-other", {"vllm/other.py": "x = 2\n"})
    checkout.run("patch")
    before = checkout.snapshot()
    said = checkout.run("patch", "--dry-run")
    assert said.count("up to date") == 2
    checkout.run("source", "--dry-run")
    checkout.run("shell", "--profile=smoke", "--dry-run")
    checkout.run("clean", "--dry-run")
    assert checkout.snapshot() == before


def test_lost_objects_are_no_traceback(checkout: Checkout) -> None:
    checkout.run("source")
    shutil.rmtree(checkout.root / "build/source/vllm.git/objects")
    (checkout.root / "build/source/vllm.git/objects").mkdir()
    checkout.patch("repair-other", {"vllm/other.py": "x = 2\n"})
    said = checkout.run("patch", code=4)
    assert "error: git read-tree failed." in said
    assert "clean -- source" in said.split("next:")[1]
    checkout.run("clean", "source")
    checkout.run("patch")


@pytest.mark.parametrize("text", ["No space left on device", "Disk quota exceeded"])
def test_full_disk_of_git_is_a_full_disk(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise GitCommandError(["git", "add"], 128, stderr=f"error: unable to write file: {text}")

    monkeypatch.setattr(git.Git, "execute", full)
    said = checkout.run("source", code=3)
    assert "error: No space left while git was writing." in said
    assert text in said.split("why:")[1]


def test_clean_lists_sizes_and_removes_only_what_is_named(checkout: Checkout) -> None:
    checkout.run("patch")
    (checkout.root / "wheelhouse").mkdir()
    (checkout.root / "wheelhouse/x.whl").write_text("x")
    listing = checkout.run("clean")
    assert "Nothing was removed." in listing
    assert "source" in listing
    assert "removed" in checkout.run("clean", "source")
    assert not (checkout.root / "build/source").exists()
    assert (checkout.root / "build/state.json").is_file()
    assert "its output is gone" in checkout.run("source")
    checkout.run("clean", "all")
    assert (checkout.root / "wheelhouse/x.whl").is_file()
    assert not (checkout.root / "build/source").exists()
    assert not (checkout.root / "build/state.json").exists()


def test_clean_unused_keeps_what_pins_and_locks_name(checkout: Checkout) -> None:
    files = checkout.root / "build/cache/files"
    sdist = checkout.pins["vllm"]["sdist-sha256"]
    locked, stray = "b" * 64, "d" * 64
    for name in (sdist, locked, stray):
        (files / name).mkdir(parents=True)
        (files / name / "f").write_text("x")
    (checkout.root / "pins/1.2.3/pylock.linux-aarch64-cp312.toml").write_text(f'x = "{locked}"\n')
    for folder in ("work/1.2.3-linux-aarch64", "work/0.9-linux-aarch64", "toolkit/1.2.3.partial"):
        (checkout.root / "build" / folder).mkdir(parents=True)
    checkout.run("clean", "unused", "--dry-run")
    assert (files / stray).is_dir()
    checkout.run("clean", "unused")
    assert {p.name for p in files.iterdir()} == {sdist, locked}
    assert {p.name for p in (checkout.root / "build/work").iterdir()} == {"1.2.3-linux-aarch64"}
    assert list((checkout.root / "build/toolkit").iterdir()) == []
