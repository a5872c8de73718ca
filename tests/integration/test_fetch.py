"""Downloads from real servers on this machine, well-behaved and not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sm121 import fetch
from sm121.errors import HashMismatch, NetworkFault
from sm121.fetch import Cache, download, download_all, fetch_locked
from sm121.files import HashMemory
from sm121.index import IndexFile
from sm121.lock.pylock import LockedFile, Target
from support.servers import Site, serve_file

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
TARGET = Target.make("linux-aarch64", python="3.12", glibc="2.39")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", HashMemory(tmp_path / "hashes.json"))


@pytest.fixture
def site():
    with serve_file(Site(CONTENT)) as site:
        yield site


def offered(url: str, *, sha256: str = SHA256, size: int = len(CONTENT)) -> IndexFile:
    return IndexFile(
        distribution="file", version="1", filename="file.whl", url=url, sha256=sha256, size=size
    )


def kept(cache: Cache) -> list[str]:
    """Files below the cache, by their names; not the locks of those who write them."""
    return sorted(p.name for p in cache.root.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_file_arrives_whole_under_its_hash(cache: Cache, site: Site) -> None:
    told: list[int] = []
    path = download(offered(site.url), cache=cache, advance=lambda _, n: told.append(n))
    assert path == cache.root / "files" / SHA256 / "file.whl"
    assert path.read_bytes() == CONTENT
    assert told[-1] == len(CONTENT)
    assert kept(cache) == ["file.whl"]


def test_file_that_is_there_is_not_asked_for(cache: Cache, site: Site) -> None:
    download(offered(site.url), cache=cache)
    download(offered(site.url), cache=cache)
    assert len(site.requests) == 1


def test_transfer_of_an_earlier_run_is_continued(cache: Cache, site: Site) -> None:
    part = cache.path(SHA256, "file.whl.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:300_000])
    assert download(offered(site.url), cache=cache).read_bytes() == CONTENT
    assert site.requests == [("/some/file.whl", "bytes=300000-")]
    assert kept(cache) == ["file.whl"]


def test_cut_off_transfer_is_continued_where_it_stopped(cache: Cache, site: Site) -> None:
    site.cut = [100_000, 200_000]
    assert download(offered(site.url), cache=cache).read_bytes() == CONTENT
    assert [r for _, r in site.requests] == [None, "bytes=100000-", "bytes=300000-"]


def test_server_without_ranges_starts_again(cache: Cache, site: Site) -> None:
    site.ranges = False
    site.cut = [100_000]
    assert download(offered(site.url), cache=cache).read_bytes() == CONTENT
    assert len(site.requests) == 2


def test_whole_part_file_is_only_checked(cache: Cache, site: Site) -> None:
    part = cache.path(SHA256, "file.whl.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT)
    assert download(offered(site.url), cache=cache).read_bytes() == CONTENT
    assert site.requests == []


@pytest.mark.parametrize("size", [len(CONTENT), 0], ids=["size known", "size unknown"])
def test_part_file_that_is_too_long_is_thrown_away(cache: Cache, site: Site, size: int) -> None:
    part = cache.path(SHA256, "file.whl.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT + b"more")
    assert download(offered(site.url, size=size), cache=cache).read_bytes() == CONTENT


def test_transfer_that_keeps_breaking_ends_and_keeps_what_it_has(cache: Cache, site: Site) -> None:
    site.cut = [50_000] * 20
    with pytest.raises(NetworkFault, match="could not be downloaded") as raised:
        download(offered(site.url), cache=cache)
    assert raised.value.cause
    assert "continues where" in raised.value.remedy
    assert kept(cache) == ["file.whl.part"]
    have = cache.path(SHA256, "file.whl.part").stat().st_size
    assert have == 50_000 * len(site.requests)
    site.cut = []
    assert download(offered(site.url), cache=cache).read_bytes() == CONTENT


def test_wrong_content_is_refused_and_not_kept(cache: Cache, site: Site) -> None:
    wrong = "0" * 64
    with pytest.raises(HashMismatch, match=r"file\.whl is not the pinned file") as raised:
        download(offered(site.url, sha256=wrong), cache=cache)
    assert wrong in raised.value.cause
    assert SHA256 in raised.value.cause
    assert kept(cache) == []


def test_damaged_part_file_is_not_continued_for_ever(cache: Cache, site: Site) -> None:
    part = cache.path(SHA256, "file.whl.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"not the beginning")
    with pytest.raises(HashMismatch):
        download(offered(site.url), cache=cache)
    assert kept(cache) == []
    assert download(offered(site.url), cache=cache).read_bytes() == CONTENT


@pytest.mark.parametrize("status", [401, 403, 404])
def test_refusal_is_not_repeated(cache: Cache, site: Site, status: int) -> None:
    site.statuses = [status] * 10
    with pytest.raises(NetworkFault) as raised:
        download(offered(site.url), cache=cache)
    assert str(status) in raised.value.cause
    assert len(site.requests) == 1


@pytest.mark.parametrize("status", [500, 503])
def test_trouble_of_the_server_is_repeated(cache: Cache, site: Site, status: int) -> None:
    site.statuses = [status]
    assert download(offered(site.url), cache=cache).read_bytes() == CONTENT
    assert len(site.requests) == 2


def test_no_server_is_a_network_fault(cache: Cache) -> None:
    with pytest.raises(NetworkFault) as raised:
        download(offered("http://127.0.0.1:9/file.whl"), cache=cache)
    assert raised.value.exit_code == 3
    assert "ConnectError" in raised.value.cause


@pytest.mark.parametrize("name", ["file.whl", "a file+ä.whl"])
def test_file_url_is_copied(cache: Cache, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CONTENT)
    assert download(offered((tmp_path / name).as_uri()), cache=cache).read_bytes() == CONTENT


def test_file_url_with_wrong_content_is_refused(cache: Cache, tmp_path: Path) -> None:
    (tmp_path / "file.whl").write_bytes(b"other")
    with pytest.raises(HashMismatch):
        download(offered((tmp_path / "file.whl").as_uri()), cache=cache)
    assert kept(cache) == []
    assert (tmp_path / "file.whl").read_bytes() == b"other"


def test_several_files_at_once_with_one_progress(cache: Cache, screen, tmp_path: Path) -> None:
    files = []
    for n in range(8):
        content = bytes([n]) * 1000
        (tmp_path / f"{n}.whl").write_bytes(content)
        files.append(
            IndexFile(
                distribution=f"d{n}", version="1", filename=f"{n}.whl",
                url=(tmp_path / f"{n}.whl").as_uri(),
                sha256=hashlib.sha256(content).hexdigest(), size=1000,
            )
        )  # fmt: skip
    download_all(files, cache=cache, ui=screen.ui)
    assert kept(cache) == [f"{n}.whl" for n in range(8)]


def test_one_failure_among_several_is_the_failure_of_all(cache: Cache, screen, site: Site) -> None:
    files = [offered(site.url), offered("http://127.0.0.1:9/x", sha256="0" * 64)]
    with pytest.raises(NetworkFault):
        download_all(files, cache=cache, ui=screen.ui)


# --- the cache ----------------------------------------------------------------------

LOCKED = LockedFile(
    distribution="file", version="1", filename="file.whl", sha256=SHA256, size=len(CONTENT)
)


def put(cache: Cache, content: bytes) -> Path:
    path = cache.path(SHA256, "file.whl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_what_is_in_the_cache_needs_no_network(cache: Cache, screen) -> None:
    path = put(cache, CONTENT)
    assert fetch_locked([LOCKED], target=TARGET, cache=cache, offline=True, ui=screen.ui) == {
        SHA256: path
    }
    assert screen.text == ""


def test_offline_names_what_is_missing(cache: Cache, screen) -> None:
    with pytest.raises(NetworkFault, match="--offline") as raised:
        fetch_locked([LOCKED], target=TARGET, cache=cache, offline=True, ui=screen.ui)
    assert raised.value.exit_code == 3
    assert "file.whl" in raised.value.cause
    assert "without --offline" in raised.value.remedy


def test_damaged_file_offline_is_not_used(cache: Cache, screen) -> None:
    put(cache, CONTENT[:-1])
    with pytest.raises(NetworkFault):
        fetch_locked([LOCKED], target=TARGET, cache=cache, offline=True, ui=screen.ui)
    assert "file.whl in the cache is damaged" in screen.text


def test_damaged_file_is_fetched_again_and_said_so(
    cache: Cache, screen, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the index's answer is stood in for: it names the server of this test."""
    path = put(cache, CONTENT[:-1] + b"x")
    monkeypatch.setattr(fetch, "locate", lambda *_, **__: {SHA256: offered(site.url)})
    fetch_locked([LOCKED], target=TARGET, cache=cache, offline=False, ui=screen.ui)
    assert path.read_bytes() == CONTENT
    assert "file.whl in the cache is damaged; it is fetched again" in screen.text
