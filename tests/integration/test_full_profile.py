"""A profile with third-party sources and optional parts, through the command line."""

from __future__ import annotations

import json
import shutil
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sm121.__main__ import main
from sm121.files import tree_digest
from support.gits import Work
from support.upstream import Upstream, make_checkout, make_upstream

UNREACHABLE = "http://127.0.0.1:9/cutlass.git"


@dataclass
class Place:
    root: Path
    upstream: Upstream
    cutlass: Work
    programs: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *argv: str, code: int) -> str:
        assert main(list(argv)) == code
        err = self.capsys.readouterr().err
        assert "Traceback" not in err
        return err

    def sources(self) -> dict[str, Any]:
        state = json.loads((self.root / "build/state.json").read_text())
        result: dict[str, Any] = state["stages"]["sources/1.2.3-full"]["result"]
        return result

    def program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def place(tmp_path: Path, monkeypatch, capsys) -> Iterator[Place]:
    """A stack whose profile `full` needs a source and cargo. There is no lock, so that a build
    ends (with an error) right after the stage `sources`."""
    cutlass = Work.init(tmp_path / "cutlass.git")
    commit = cutlass.commit({"include/cutlass.h": "pinned\n"})
    digest = {"include": tree_digest(cutlass.path / "include")}
    cutlass.commit({"include/cutlass.h": "newer\n"})
    upstream = make_upstream(tmp_path / "upstream")
    pins = upstream.pins
    pins["sources"]["cutlass"].update(
        git=UNREACHABLE, commit=commit, components=["fs_io_C"], digest=digest
    )
    del pins["sources"]["cutlass"]["wheels"]
    pins["profiles"]["full"] = {
        "summary": "all of it", "components": ["spinloop", "fs_io_C", "crate"],
        "sources": ["cutlass"], "memory-per-job-gib": 1,
        "optional": {
            "files": {"components": ["fs_io_C"], "reason": "no files"},
            "rust": {"components": ["crate"], "reason": "no crate", "needs": "cargo"},
        },
    }  # fmt: skip
    pins["components"]["crate"] = "of Rust"
    commit = upstream.work.commit(
        {
            "tools/build_rust.py": 'RustExtension(target="vllm.crate")\n',
            "rust/Cargo.toml": "[workspace]\n", "rust-toolchain.toml": "[toolchain]\n",
        }
    )  # fmt: skip
    upstream.work.git("tag", "-f", "v1.2.3")
    pins["vllm"]["commit"] = commit
    root = make_checkout(tmp_path / "checkout", pins)
    monkeypatch.chdir(root)
    programs = tmp_path / "programs"
    programs.mkdir()
    git = [p for p in ("/usr/bin", "/bin") if Path(p).is_dir()]
    monkeypatch.setenv("PATH", ":".join([str(programs), *git]))
    before = signal.getsignal(signal.SIGTERM)
    yield Place(root, upstream, cutlass, programs, capsys)
    signal.signal(signal.SIGTERM, before)


def working_cargo(place: Place, machine: str = "aarch64") -> None:
    libraries = place.programs.parent / "rustlib"
    libraries.mkdir(exist_ok=True)
    (libraries / "libstd-1.rlib").write_text("")
    place.program("protoc", "exit 0")
    place.program("rustc", f"test $4 = {machine}-unknown-linux-gnu && echo {libraries}")
    place.program("cargo", 'echo "$CARGO_HOME" > ../cargo-ran')


def test_unreachable_source_is_code_3_and_names_the_other_profiles(place: Place) -> None:
    said = place.run("compile", "--profile=full", code=3)
    assert "error: Profile full can't be built: 1 of its sources could not be obtained." in said
    assert "cutlass (v4.4.2): git: " in said
    assert "--profile smoke: " in said
    assert f"next: Clone {UNREACHABLE} where they can be reached" in said
    assert "--clone PATH" in said
    assert not (place.root / "build/work").exists()
    assert not (place.root / "build/env").exists(), "it stops before anything large is fetched"


def test_plain_build_is_full_and_takes_nothing_in_its_place(place: Place) -> None:
    assert "Profile full can't be built" in place.run("build", code=3)
    assert not (place.root / "wheelhouse").exists()


def test_clone_by_option_or_by_variable(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.run("compile", "--profile=full", f"--clone={place.cutlass.path}", code=1)
    source = place.sources()["sources"]["cutlass"]
    assert source["provider"].startswith("a local clone, commit ")
    header = Path(source["path"], "include/cutlass.h")
    assert header.read_text() == "pinned\n"
    for name in ("state.json", "source/third-party"):
        path = place.root / "build" / name
        path.rename(path.with_name("old"))
    monkeypatch.setenv("SM121_CLONES", f"{place.cutlass.path}:")
    place.run("compile", "--profile=full", "--offline", code=1)
    assert place.sources()["sources"]["cutlass"]["provider"] == source["provider"]


def test_source_that_was_edited_stops_the_next_build(place: Place) -> None:
    """Else the edit is in the next wheel, and its manifest names the pinned digest."""
    working_cargo(place)
    build = ("compile", "--profile=full", f"--clone={place.cutlass.path}")
    place.run(*build, code=1)
    tree = Path(place.sources()["sources"]["cutlass"]["path"])
    assert "sources     up to date" in place.run(*build, code=1)
    (tree / "include/cutlass.h").write_text("edited\n")
    said = place.run(*build, code=1)
    assert "error: cutlass: include from a local clone" in said
    assert f"in {tree}:" in said
    assert "changed: include/cutlass.h" in said
    assert f"`rm -r {tree.parent}`" in said
    assert (tree / "include/cutlass.h").read_text() == "edited\n"
    shutil.rmtree(tree.parent)
    place.run(*build, code=1)
    assert (tree / "include/cutlass.h").read_text() == "pinned\n"
    assert "sources     up to date" in place.run(*build, code=1)


def test_folder_that_is_no_clone_is_wrong_usage(place: Place) -> None:
    said = place.run("compile", "--profile=full", f"--clone={place.root}", code=2)
    assert "is no git repository" in said


def test_left_out_by_choice_with_the_source_that_only_it_needs(place: Place) -> None:
    working_cargo(place)
    place.run("compile", "--profile=full", "--without=files", code=1)
    assert place.sources() == {"sources": {}, "groups": {}, "left_out": {}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--without=fil"], "--without fil: profile full has no optional part of that name"),
        (["--require=fil"], "--require fil: profile full has no optional part of that name"),
        (["--without=rust", "--require=rust"], "both name rust"),
    ],
)
def test_optional_parts_that_do_not_exist(place: Place, options: list[str], says: str) -> None:
    said = place.run("compile", "--profile=full", *options, code=2)
    assert says in said


def test_profile_without_optional_parts_says_so(place: Place) -> None:
    said = place.run("compile", "--profile=smoke", "--without=files", code=2)
    assert "all of it is always built" in said


# --- Rust ---------------------------------------------------------------------------


def rust(place: Place, *options: str, code: int = 1) -> str:
    return place.run("compile", "--profile=full", "--without=files", *options, code=code)


def test_rust_is_built_where_cargo_can_fetch(place: Place) -> None:
    working_cargo(place)
    assert "left out" not in rust(place)
    assert place.sources()["left_out"] == {}
    cargo_home = (place.root / "build/source/cargo-ran").read_text().strip()
    assert cargo_home == str(place.root / "build/cache/cargo")


def test_rust_is_left_out_with_every_reason(place: Place) -> None:
    said = rust(place)
    assert "note: rust is left out (crate): cargo is not installed" in said
    assert "rustc is not installed" in said
    assert "protoc is not installed" in said
    assert "Lost with it: no crate" in said
    assert "--require rust" in said
    reason = place.sources()["groups"]["rust"]
    assert place.sources()["left_out"] == {"crate": reason}


def test_crates_that_cannot_be_fetched(place: Place) -> None:
    working_cargo(place)
    place.program(
        "cargo",
        """cat <<END
error: failed to get \\`a\\` as a dependency

Caused by:
  unable to update https://example.invalid/a?rev=1

Caused by:
  failed to clone

Caused by:
  Could not resolve host
END
exit 101""",
    )
    said = rust(place)
    assert "unable to update https://example.invalid/a?rev=1: Could not resolve host" in said
    assert "lacks crates, and --offline forbids" in rust(
        place, "--offline", "--require=rust", code=3
    )


def test_toolchain_without_the_targets_standard_library(place: Place) -> None:
    """Crossing with a toolchain for the host alone."""
    working_cargo(place)
    place.program("rustc", f"echo {place.root}")
    assert "standard library for aarch64-unknown-linux-gnu is missing" in rust(place)


def test_rust_that_must_be_built_stops(place: Place) -> None:
    said = rust(place, "--require=rust", code=3)
    assert "error: crate can't be built here, and --require rust asks for them." in said
    assert "cargo is not installed" in said.split("why:")[1]


def test_rust_left_out_by_choice_asks_no_cargo(place: Place) -> None:
    place.program("cargo", f"touch {place.root}/asked")
    rust(place, "--without=rust")
    assert not (place.root / "asked").exists()


def test_rust_is_tried_again_when_a_program_has_come(place: Place) -> None:
    assert "left out" in rust(place)
    assert "left out" not in rust(place), "and not at every run: that costs time"
    working_cargo(place)
    assert "programs for Rust changed" in rust(place)
    assert place.sources()["left_out"] == {}
