"""Third-party sources: a local clone, git with its submodules, a wheel; the digest decides."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sm121 import files
from sm121.errors import CheckFailed, HashMismatch, NetworkFault
from sm121.fetch import Cache
from sm121.files import HashMemory, sha256_file, tree_digest
from sm121.lock.pylock import Target
from sm121.pins.model import SourcePin
from sm121.source.thirdparty import Source, is_as_pinned, obtain
from support.gits import Work
from support.servers import serve_index
from support.tools import run, tool
from support.wheels import make_wheel

TARGET = Target.make("linux-aarch64", python="3.12", glibc="2.39")
HEADERS = {"include/cutlass/a.h": b"#pragma once\r\n", "include/cutlass/deep/b.h": b"b\n"}
UNREACHABLE = "http://127.0.0.1:9/cutlass.git"


@dataclass
class Place:
    remote: Work
    inner: Work
    commit: str
    inner_commit: str
    shelf: Path
    folder: Path
    cache: Cache
    memory: HashMemory
    screen: Any
    digest: str
    wheel: Path

    def pin(self, **changes: Any) -> SourcePin:
        return SourcePin.model_validate(
            {
                "git": self.remote.url,
                "ref": "v4.4.2",
                "env": "VLLM_CUTLASS_SRC_DIR",
                "upstream-file": "CMakeLists.txt",
                "upstream-repository": "nvidia/cutlass",
                "digest": {"include": self.digest},
                **changes,
            }
        )

    def wheel_provider(self, **changes: Any) -> dict[str, Any]:
        return {
            "filename": self.wheel.name, "sha256": sha256_file(self.wheel),
            "subtrees": {"include": "carrier/data/cutlass/include"}, **changes,
        }  # fmt: skip

    def obtain(
        self, pin: SourcePin, *, offline: bool = False, environment: dict[str, str] | None = None
    ) -> Source:
        return obtain(
            "cutlass", pin, folder=self.folder, cache=self.cache, memory=self.memory, target=TARGET,
            offline=offline, ui=self.screen.ui, environment=environment or {},
        )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, screen) -> Place:
    inner = Work.init(tmp_path / "inner.git")
    inner_commit = inner.commit({"fmt.h": "fmt\n"})
    remote = Work.init(tmp_path / "cutlass.git")
    remote.write({**HEADERS, "tools/x": "x"})
    remote.git(
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "add",
        "-q",
        "../inner.git",
        "third-party/fmt",
    )
    commit = remote.commit({}, "4.4.2")
    remote.git("tag", "v4.4.2")
    shelf = tmp_path / "shelf"
    wheel = make_wheel(
        shelf,
        {
            **{f"carrier/data/cutlass/{k}": v for k, v in HEADERS.items()},
            "carrier/data/cutlass/include-not/x": "no",
            "carrier/other.py": "no",
        },
        name="sm121_carrier",
    )
    folder = tmp_path / "build/source"
    folder.mkdir(parents=True)
    memory = HashMemory(tmp_path / "hashes.json")
    return Place(
        remote, inner, commit, inner_commit, shelf, folder,
        Cache(tmp_path / "cache", memory), memory, screen,
        tree_digest(remote.path / "include"), wheel,
    )  # fmt: skip


@pytest.fixture
def index(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with serve_index(place.shelf) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        yield


def test_git_gives_the_tree_with_its_submodules(place: Place) -> None:
    digest = {"include": place.digest, "third-party/fmt": tree_digest_of_export(place.inner)}
    pin = place.pin(submodules={"third-party/fmt": place.inner_commit}, digest=digest)
    source = place.obtain(pin)
    assert (source.provider, source.digest) == ("git", digest)
    assert (source.path / "third-party/fmt/fmt.h").read_text() == "fmt\n"
    for name, content in HEADERS.items():
        assert (source.path / name).read_bytes() == content
    assert not (source.path / ".git").exists()


def test_only_what_the_digest_covers_is_there_to_be_used(place: Place) -> None:
    """Else two providers could differ in what nobody checked."""
    source = place.obtain(place.pin())
    assert {p.name for p in source.path.iterdir()} == {"include"}


def test_commit_of_a_remote_may_be_pinned_instead_of_a_tag(place: Place) -> None:
    place.remote.commit({"later": "x"})
    assert place.obtain(place.pin(ref=place.commit)).provider == "git"


def test_other_submodule_than_pinned_is_refused(place: Place) -> None:
    with pytest.raises(HashMismatch, match="another submodule at third-party/fmt") as raised:
        place.obtain(place.pin(submodules={"third-party/fmt": "0" * 40}))
    assert place.inner_commit in raised.value.cause
    assert "0" * 40 in raised.value.cause
    assert [p.name for p in place.folder.iterdir() if not p.name.endswith(".git")] == []


def test_what_is_there_is_not_fetched_again(place: Place) -> None:
    first = place.obtain(place.pin())
    shutil.rmtree(place.remote.path)
    again = place.obtain(place.pin(), offline=True)
    assert (again.path, again.provider) == (first.path, "git")


@pytest.mark.parametrize(
    ("kind", "path"),
    [("changed", "include/cutlass/a.h"), ("new", "include/mine.h"), ("gone", "include/cutlass/deep/b.h")],
)  # fmt: skip
def test_what_is_there_and_was_changed_is_refused(place: Place, kind: str, path: str) -> None:
    """Not replaced: a person's edit would be lost."""
    source = place.obtain(place.pin())
    file = source.path / path
    file.unlink() if kind == "gone" else file.write_text("edited")
    for _ in range(2):
        with pytest.raises(HashMismatch, match="include from git is not the pinned") as raised:
            place.obtain(place.pin())
        assert raised.value.details == (f"in {source.path}:", f"  {kind}: {path}")
        assert f"`rm -r {source.path.parent}`" in raised.value.remedy
    assert kind == "gone" or file.read_text() == "edited"


def test_what_was_changed_and_removed_is_obtained_anew(place: Place) -> None:
    """As the message says; the tree alone may go, too."""
    for remove in ("..", "."):
        source = place.obtain(place.pin())
        (source.path / "include/cutlass/a.h").write_text("edited")
        shutil.rmtree((source.path / remove).resolve())
        assert tree_digest(place.obtain(place.pin()).path / "include") == place.digest


def test_of_many_changed_files_some_are_named(place: Place) -> None:
    source = place.obtain(place.pin())
    for n in range(14):
        (source.path / f"include/{n:02}.h").write_text("")
    with pytest.raises(HashMismatch) as raised:
        place.obtain(place.pin())
    assert raised.value.details[-2:] == ("  new: include/09.h", "  and 4 more")


def test_list_of_files_is_one_that_sha256sum_reads(place: Place) -> None:
    """Also for a tree of an earlier version, which kept none."""
    source = place.obtain(place.pin())
    listed = source.path.with_name("files")
    run(tool("sha256sum", "coreutils"), "--strict", "-c", listed, cwd=source.path)
    before = listed.read_text()
    listed.unlink()
    place.obtain(place.pin())
    assert listed.read_text() == before


def test_files_that_did_not_change_are_not_read_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of headers in every build that has nothing to do."""
    source = place.obtain(place.pin())
    read: list[str] = []
    monkeypatch.setattr(files, "sha256_file", lambda p: read.append(p.name) or sha256_file(p))
    assert is_as_pinned("cutlass", place.pin(), place.folder, place.memory)
    assert read == []
    (source.path / "include/cutlass/a.h").write_text("edited")
    assert not is_as_pinned("cutlass", place.pin(), place.folder, place.memory)
    assert read == ["a.h"]


def test_half_made_tree_of_a_killed_run_is_made_again(place: Place) -> None:
    source = place.obtain(place.pin())
    (source.path.parent / "provider").unlink()
    (source.path / "include/cutlass/a.h").unlink()
    assert tree_digest(place.obtain(place.pin()).path / "include") == place.digest


def test_whole_tree_may_be_pinned(place: Place) -> None:
    """digest '.': our own marker file beside upstream's must not spoil it."""
    plain = Work.init(place.remote.path.with_name("plain.git"))
    plain.commit(HEADERS)
    whole = {".": tree_digest_of_export(plain)}
    pin = place.pin(git=plain.url, ref="main", digest=whole)
    assert place.obtain(pin).provider == "git"
    assert place.obtain(pin).provider == "git"


def tree_digest_of_export(work: Work) -> str:
    """Of the working tree without .git."""
    copy = work.path.with_name(f"copy-of-{work.path.name}")
    work.git("worktree", "add", "-q", "--detach", copy)
    (copy / ".git").unlink()
    return tree_digest(copy)


def test_content_that_is_not_the_pinned_one_is_refused(place: Place) -> None:
    wrong = "h1:" + "0" * 64
    with pytest.raises(HashMismatch, match="include from git is not the pinned content") as raised:
        place.obtain(place.pin(digest={"include": wrong}))
    assert wrong in raised.value.cause
    assert place.digest in raised.value.cause
    assert not any(place.folder.glob("cutlass-v4.4.2*"))


def test_without_a_digest_it_is_said_that_nothing_was_checked(place: Place) -> None:
    place.obtain(place.pin(digest={}))
    assert "no content digest is pinned" in place.screen.text


def test_changed_content_without_a_pinned_digest_is_another_content(place: Place) -> None:
    """Taken at its word, but not for that of the last look."""
    plain = Work.init(place.remote.path.with_name("plain.git"))
    plain.commit(HEADERS)
    pin = place.pin(git=plain.url, ref="main", digest={})
    source = place.obtain(pin)
    assert is_as_pinned("cutlass", pin, place.folder, place.memory)
    (source.path / "include/cutlass/a.h").write_text("edited")
    assert not is_as_pinned("cutlass", pin, place.folder, place.memory)
    assert place.obtain(pin).digest != source.digest
    assert is_as_pinned("cutlass", pin, place.folder, place.memory)


# --- a local clone ------------------------------------------------------------------


def test_content_without_a_pinned_digest_has_one_all_the_same(place: Place) -> None:
    """The wheel's version needs it. A clone's .git, other on each machine, is no content."""
    plain = Work.init(place.remote.path.with_name("plain.git"))
    plain.commit(HEADERS)
    pin = place.pin(git=plain.url, ref="main", digest={})
    local = {"VLLM_CUTLASS_SRC_DIR": str(plain.path)}
    digest = {".": tree_digest_of_export(plain)}
    assert place.obtain(pin).digest == digest
    assert place.obtain(pin, environment=local).digest == digest
    plain.write({"include/cutlass/a.h": b"edited"})
    assert place.obtain(pin, environment=local).digest not in (digest, {})


def test_local_clone_comes_first(place: Place) -> None:
    source = place.obtain(
        place.pin(git=UNREACHABLE), environment={"VLLM_CUTLASS_SRC_DIR": str(place.remote.path)}
    )
    assert source.path == place.remote.path
    assert source.provider == "local VLLM_CUTLASS_SRC_DIR"


def test_local_clone_at_another_state_is_refused(place: Place) -> None:
    (place.remote.path / "include/cutlass/a.h").write_text("other")
    with pytest.raises(HashMismatch, match="local VLLM_CUTLASS_SRC_DIR") as raised:
        place.obtain(place.pin(), environment={"VLLM_CUTLASS_SRC_DIR": str(place.remote.path)})
    assert "v4.4.2" in raised.value.remedy


def test_local_folder_that_does_not_exist_is_named(place: Place, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="is not a folder") as raised:
        place.obtain(place.pin(), environment={"VLLM_CUTLASS_SRC_DIR": str(tmp_path / "none")})
    assert "Unset VLLM_CUTLASS_SRC_DIR" in raised.value.remedy


# --- out of a wheel -----------------------------------------------------------------


@pytest.mark.usefixtures("index")
def test_wheel_stands_in_for_git_and_the_reason_is_given(place: Place) -> None:
    source = place.obtain(place.pin(git=UNREACHABLE, wheels=[place.wheel_provider()]))
    assert source.provider == "wheel sm121_carrier-1.0-py3-none-any.whl"
    assert source.digest == {"include": place.digest}
    files = {p.relative_to(source.path).as_posix() for p in source.path.rglob("*") if p.is_file()}
    assert files == set(HEADERS)
    assert (
        "cutlass: out of wheel sm121_carrier-1.0-py3-none-any.whl, since git: " in place.screen.text
    )
    again = place.obtain(place.pin(git=UNREACHABLE, wheels=[place.wheel_provider()]), offline=True)
    assert again.provider == "wheel sm121_carrier-1.0-py3-none-any.whl"


@pytest.mark.usefixtures("index")
def test_wheel_with_other_content_is_refused(place: Place) -> None:
    wrong = place.pin(
        git=UNREACHABLE, wheels=[place.wheel_provider()], digest={"include": "h1:" + "0" * 64}
    )
    with pytest.raises(HashMismatch, match="from wheel sm121_carrier"):
        place.obtain(wrong)
    assert not any(place.folder.glob("cutlass-v4.4.2*"))


def test_no_provider_names_them_all(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    with pytest.raises(NetworkFault, match=r"cutlass \(v4\.4\.2\)") as raised:
        place.obtain(place.pin(git=UNREACHABLE, wheels=[place.wheel_provider()]))
    assert "git: " in raised.value.cause
    assert "wheel sm121_carrier-1.0-py3-none-any.whl: " in raised.value.cause
    # Its pin is a tag and names no commit, so no clone can be asked for it.
    assert raised.value.remedy.endswith("its folder in VLLM_CUTLASS_SRC_DIR.")


def test_offline_says_so_for_each_provider(place: Place) -> None:
    with pytest.raises(NetworkFault) as raised:
        place.obtain(place.pin(wheels=[place.wheel_provider()]), offline=True)
    git, _, wheel = raised.value.cause.partition("; ")
    assert git == "git: --offline"
    assert wheel.startswith("wheel sm121_carrier-1.0-py3-none-any.whl: 1 file(s) are not in")


@pytest.mark.usefixtures("index")
def test_wheel_that_the_index_lacks_is_one_failed_provider_of_several(place: Place) -> None:
    gone = place.wheel_provider(filename="sm121_carrier-9.9-py3-none-any.whl", sha256="0" * 64)
    source = place.obtain(place.pin(git=UNREACHABLE, wheels=[gone, place.wheel_provider()]))
    assert source.provider == "wheel sm121_carrier-1.0-py3-none-any.whl"
