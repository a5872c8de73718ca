"""Pristine upstream: git first, else the sdist; the pinned content or nothing."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sm121.errors import HashMismatch, NetworkFault
from sm121.fetch import Cache
from sm121.files import HashMemory
from sm121.gitrepo import Repository
from sm121.lock.pylock import Target
from sm121.pins.model import VllmPin
from sm121.source.vllm import Base, obtain, read_sdist
from support.gits import Work
from support.servers import serve_index
from support.upstream import FILES, make_sdist, sha256

TARGET = Target.make("linux-aarch64", python="3.12", glibc="2.39")
UNREACHABLE = "http://127.0.0.1:9/vllm.git"


@dataclass
class Place:
    """A remote with a tag, and a cache with the sdist."""

    remote: Work
    commit: str
    sdist: Path
    repository: Repository
    cache: Cache
    screen: object

    def pin(self, **changes: object) -> VllmPin:
        return VllmPin.model_validate(
            {
                "version": "1.2.3",
                "git": self.remote.url,
                "tag": "v1.2.3",
                "commit": self.commit,
                "date": datetime(2026, 1, 2, tzinfo=UTC),
                "sdist-sha256": sha256(self.sdist),
                **{name.replace("_", "-"): value for name, value in changes.items()},
            }
        )

    def store(self) -> None:
        """Put the sdist into the cache."""
        path = self.cache.path(sha256(self.sdist), "vllm-1.2.3.tar.gz")
        path.parent.mkdir(parents=True)
        path.write_bytes(self.sdist.read_bytes())

    def obtain(self, *, offline: bool = False, **changes: object) -> Base:
        return obtain(
            self.pin(**changes), self.repository, cache=self.cache, target=TARGET,
            offline=offline, ui=self.screen.ui,
        )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, repository: Repository, screen) -> Place:
    remote = Work.init(tmp_path / "remote")
    commit = remote.commit({"vllm/__init__.py": "from_git = True\n"})
    remote.git("tag", "v1.2.3")
    sdist = make_sdist(tmp_path / "sdist", {"vllm/__init__.py": "from_sdist = True\n"})
    cache = Cache(tmp_path / "cache", HashMemory(tmp_path / "hashes.json"))
    return Place(remote, commit, sdist, repository, cache, screen)


# --- which provider -----------------------------------------------------------------


def test_git_comes_first_and_gives_the_pinned_commit(place: Place) -> None:
    place.store()
    base = place.obtain()
    assert (base.commit, base.provider, base.reason) == (place.commit, "git", "commit of v1.2.3")
    assert place.repository.read(base.commit, "vllm/__init__.py") == "from_git = True\n"


def test_remote_is_not_asked_again(place: Place) -> None:
    place.obtain()
    base = place.obtain(git=UNREACHABLE)
    assert (base.commit, base.provider) == (place.commit, "git")


def test_moved_tag_is_refused_and_not_replaced_by_the_sdist(place: Place) -> None:
    place.store()
    moved = place.remote.commit({"vllm/__init__.py": "evil = True\n"})
    place.remote.git("tag", "-f", "v1.2.3")
    with pytest.raises(HashMismatch, match="another commit as v1") as raised:
        place.obtain()
    assert place.commit in raised.value.cause
    assert moved in raised.value.cause


@pytest.mark.parametrize("broken", ["unreachable", "no such tag", "not a repository"])
def test_sdist_stands_in_and_the_reason_is_given(place: Place, tmp_path: Path, broken: str) -> None:
    place.store()
    changes = {
        "unreachable": {"git": UNREACHABLE},
        "no such tag": {"tag": "v9"},
        "not a repository": {"git": tmp_path.as_uri()},
    }[broken]
    base = place.obtain(**changes)
    assert base.provider == "sdist"
    assert base.reason.startswith("the git remote can't be used: ")
    assert len(base.reason) > len("the git remote can't be used: ")
    assert place.repository.read(base.commit, "vllm/__init__.py") == "from_sdist = True\n"


def test_offline_uses_the_sdist_of_the_cache(place: Place) -> None:
    place.store()
    base = place.obtain(offline=True)
    assert (base.provider, base.reason) == ("sdist", "--offline")


def test_offline_with_nothing_is_a_network_fault_that_names_the_sdist(place: Place) -> None:
    with pytest.raises(NetworkFault, match="--offline") as raised:
        place.obtain(offline=True)
    assert "vllm-1.2.3.tar.gz" in raised.value.cause


def test_neither_git_nor_index_is_a_network_fault(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(NetworkFault, match="index could not be reached") as raised:
        place.obtain(git=UNREACHABLE)
    assert raised.value.exit_code == 3


def test_other_sdist_on_the_index_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_index(place.sdist.parent) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        with pytest.raises(HashMismatch, match="pinned content") as raised:
            place.obtain(git=UNREACHABLE, **{"sdist-sha256": "0" * 64})
    assert "0" * 64 in raised.value.cause
    assert place.repository.commit_of("refs/sm121/upstream/1.2.3/sdist-" + "0" * 16) is None


def test_git_that_is_reachable_again_is_used_again(place: Place) -> None:
    place.store()
    first = place.obtain(git=UNREACHABLE)
    second = place.obtain()
    assert (first.provider, second.provider) == ("sdist", "git")
    assert first.commit != second.commit


def test_sdist_always_gives_the_same_commit(place: Place, tmp_path: Path) -> None:
    place.store()
    first = place.obtain(offline=True).commit
    other = Repository(tmp_path / "other.git")
    again = obtain(
        place.pin(), other, cache=place.cache, target=TARGET, offline=True, ui=place.screen.ui
    )
    other.close()
    assert again.commit == first


def test_another_pin_of_the_same_release_is_another_base(place: Place, tmp_path: Path) -> None:
    place.store()
    first = place.obtain(offline=True)
    place.sdist = make_sdist(tmp_path / "sdist2", {"vllm/__init__.py": "second = True\n"})
    place.store()
    second = place.obtain(offline=True)
    assert first.commit != second.commit


# --- sdists that are not right ------------------------------------------------------


def unpack(archive: Path) -> dict[str, bytes]:
    return {file.path: file.data for file in read_sdist(archive, name="vllm-1.2.3")}


def test_sdist_is_read_below_its_top_folder(tmp_path: Path) -> None:
    files = unpack(make_sdist(tmp_path / "s", dict(FILES)))
    assert files.pop("PKG-INFO").startswith(b"Metadata-Version")
    assert files == {name: text.encode() for name, text in FILES.items()}


def test_links_and_modes_of_a_sdist_are_kept(tmp_path: Path) -> None:
    script = tarfile.TarInfo("vllm-1.2.3/run")
    script.mode = 0o755
    extra = (
        script,
        link("vllm-1.2.3/soft", "a"),
        link("vllm-1.2.3/hard", "vllm-1.2.3/a", tarfile.LNKTYPE),
    )
    archive = make_sdist(tmp_path / "s", {"a": "x"}, extra=extra)
    found = {f.path: (f.mode, f.data) for f in read_sdist(archive, name="vllm-1.2.3")}
    assert found["run"] == ("100755", b"")
    assert found["soft"] == ("120000", b"a")
    assert found["hard"] == found["a"] == ("100644", b"x")


def test_stream_and_folder_give_the_same_commit(place: Place, tmp_path: Path) -> None:
    """The commit ids of earlier versions, which unpacked to a folder, stay."""
    place.store()
    streamed = place.obtain(offline=True).commit
    with tarfile.open(place.sdist) as archive:
        # PEP 706 came with CPython 3.11.4; Debian 12 has 3.11.2.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "out")
    message = str(place.repository._git.log("-1", "--format=%B", streamed))
    folder = place.repository.import_tree(
        tmp_path / "out/vllm-1.2.3", message=message, date=place.pin().date
    )
    assert folder == streamed


BIG = {"random": bytes((n * n * 7919 >> 7) & 255 for n in range(200_000))}


@pytest.mark.parametrize("keep", [0, 5, 60, 0.5, 0.99])
def test_cut_off_sdist_is_refused(tmp_path: Path, keep: float) -> None:
    archive = make_sdist(tmp_path / "s", BIG)
    data = archive.read_bytes()
    archive.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    with pytest.raises(HashMismatch, match=r"vllm-1\.2\.3\.tar\.gz") as raised:
        unpack(archive)
    assert raised.value.exit_code == 1


def test_sdist_with_damage_in_the_middle_is_refused(tmp_path: Path) -> None:
    archive = make_sdist(tmp_path / "s", BIG)
    data = bytearray(archive.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    archive.write_bytes(data)
    with pytest.raises(HashMismatch):
        unpack(archive)


@pytest.mark.parametrize("content", [b"PK\x03\x04 a zip", b"<html>404</html>", b"\x1f\x8bnot"])
def test_file_that_is_no_gzip_is_refused(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "vllm-1.2.3.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(HashMismatch, match="can't be unpacked") as raised:
        unpack(archive)
    assert raised.value.cause
    assert "Remove" in raised.value.remedy


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def device() -> tarfile.TarInfo:
    info = tarfile.TarInfo("vllm-1.2.3/dev")
    info.type = tarfile.CHRTYPE
    return info


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../evil"),
        tarfile.TarInfo("vllm-1.2.3/../../evil"),
        link("vllm-1.2.3/evil", "/etc/passwd"),
        link("vllm-1.2.3/evil", "../../../etc/passwd"),
        link("vllm-1.2.3/evil", "/etc/passwd", tarfile.LNKTYPE),
        device(),
    ],
    ids=["above", "above from inside", "absolute link", "link outside", "hard link", "device"],
)
def test_member_that_reaches_outside_is_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    archive = make_sdist(tmp_path / "s", {"a": "x"}, extra=(member,))
    with pytest.raises(HashMismatch, match="can't be unpacked"):
        unpack(archive)
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path.parent / "evil").exists()


def test_absolute_name_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "absolute"
    archive = make_sdist(tmp_path / "s", {"a": "x"}, extra=(tarfile.TarInfo(str(target)),))
    with pytest.raises(HashMismatch, match="can't be unpacked"):
        unpack(archive)
    assert not target.exists()


def test_python_before_3_11_4_reads_a_sdist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12's 3.11.2 has none of PEP 706's filters."""
    for name in ("data_filter", "tar_filter", "fully_trusted_filter"):
        monkeypatch.delattr(tarfile, name, raising=False)
    assert unpack(make_sdist(tmp_path / "s", {"a": "x"}))["a"] == b"x"


def test_other_top_folder_is_not_this_release(tmp_path: Path) -> None:
    archive = make_sdist(tmp_path / "s", {"a": "x"}, top="vllm-1.2.4")
    with pytest.raises(HashMismatch, match=r"no folder vllm-1\.2\.3/"):
        unpack(archive)


def test_disk_fault_while_reading_is_not_a_bad_sdist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make_sdist(tmp_path / "s", {"a": "x"})

    def full(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tarfile.TarFile, "extractfile", full)
    with pytest.raises(OSError, match="Input/output"):
        unpack(archive)


def test_plain_tar_is_no_sdist(tmp_path: Path) -> None:
    path = tmp_path / "vllm-1.2.3.tar.gz"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("vllm-1.2.3/a")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(HashMismatch):
        unpack(path)
