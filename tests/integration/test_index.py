"""Whatever index uv is configured with: the real one, local ones, and none."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sm121 import proc
from sm121.errors import HashMismatch, NetworkFault, ToolFailed
from sm121.fetch import Cache, fetch_locked
from sm121.files import HashMemory, sha256_file
from sm121.index import compile_lock, locate
from sm121.lock.pylock import LockedFile, Target, lock_path, locked_files, read_lock
from support.servers import serve_index
from support.wheels import make_wheel

TARGET = Target.make("linux-aarch64", python="3.12", glibc="2.39")
HOW = {"uv_platform": TARGET.uv_platform, "python": TARGET.python}


@pytest.fixture(scope="module")
def uv_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uv-cache")


@pytest.fixture(autouse=True)
def _uv_of_our_own(monkeypatch: pytest.MonkeyPatch, uv_cache: Path) -> None:
    """A cache of its own: uv must not answer out of an earlier run. No waiting."""
    monkeypatch.setenv("UV_CACHE_DIR", str(uv_cache))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", HashMemory(tmp_path / "hashes.json"))


def tiny(folder: Path, version: str = "1.0", **how) -> Path:
    return make_wheel(
        folder, {"sm121_tiny.py": f"x = '{version}'\n"}, name="sm121_tiny", version=version, **how
    )


def locked(wheel: Path, **changes) -> LockedFile:
    facts = {
        "distribution": "sm121-tiny", "version": "1.0", "filename": wheel.name,
        "sha256": sha256_file(wheel), "size": wheel.stat().st_size, **changes,
    }  # fmt: skip
    return LockedFile(**facts)


@pytest.mark.network
def test_real_index_offers_a_locked_file(
    root: Path, stack_name: str, cache: Cache, screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest pure wheel of the lock, from the configured index, into an empty cache."""
    monkeypatch.delenv("UV_HTTP_RETRIES")
    files = locked_files(read_lock(lock_path(root / "pins", stack_name, "family", TARGET)), TARGET)
    smallest = min((f for f in files if "none-any" in f.filename), key=lambda f: f.size)
    paths = fetch_locked([smallest], target=TARGET, cache=cache, offline=False, ui=screen.ui)
    path = paths[smallest.sha256]
    assert sha256_file(path) == smallest.sha256
    assert path.stat().st_size == smallest.size


@pytest.mark.parametrize("hashes", [True, False], ids=["with hashes", "without hashes"])
def test_local_simple_index_works(
    cache: Cache, screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: bool
) -> None:
    wheel = tiny(tmp_path / "shelf")
    with serve_index(tmp_path / "shelf", hashes=hashes) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        paths = fetch_locked(
            [locked(wheel)], target=TARGET, cache=cache, offline=False, ui=screen.ui
        )
    assert paths[sha256_file(wheel)].read_bytes() == wheel.read_bytes()


def test_flat_folder_works(
    cache: Cache, screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tiny(tmp_path / "a shelf")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path / "a shelf"))
    paths = fetch_locked([locked(wheel)], target=TARGET, cache=cache, offline=False, ui=screen.ui)
    assert paths[sha256_file(wheel)].read_bytes() == wheel.read_bytes()


def test_index_with_another_file_of_that_name_is_refused(
    cache: Cache, screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tiny(tmp_path / "shelf")
    wanted = locked(wheel, sha256="0" * 64)
    with serve_index(tmp_path / "shelf") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        with pytest.raises(HashMismatch, match="pinned content") as raised:
            fetch_locked([wanted], target=TARGET, cache=cache, offline=False, ui=screen.ui)
    assert wheel.name in raised.value.cause
    assert not (cache.root / "files").exists()


def test_file_that_changes_behind_the_indexs_back_is_refused(
    cache: Cache, screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index promises the pinned hash and its server delivers something else."""
    wheel = tiny(tmp_path / "shelf")
    wanted = locked(wheel)
    with serve_index(tmp_path / "shelf") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        offered = locate([("sm121-tiny", "1.0")], **HOW)
        make_wheel(tmp_path / "shelf", {"sm121_tiny.py": "evil"}, name="sm121_tiny")
        monkeypatch.setattr("sm121.fetch.locate", lambda *_, **__: offered)
        with pytest.raises(HashMismatch, match="is not the pinned file"):
            fetch_locked([wanted], target=TARGET, cache=cache, offline=False, ui=screen.ui)
    assert [p for p in cache.root.rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def test_unreachable_index_is_a_network_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    with pytest.raises(NetworkFault) as raised:
        locate([("sm121-tiny", "1.0")], **HOW)
    assert raised.value.exit_code == 3
    assert "127.0.0.1:9" in raised.value.cause
    assert "UV_DEFAULT_INDEX" in raised.value.remedy


@pytest.mark.parametrize("version", ["2.0"])
def test_version_that_the_index_lacks_is_told_in_uvs_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    tiny(tmp_path / "shelf")
    with serve_index(tmp_path / "shelf") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        with pytest.raises(ToolFailed, match="cannot be resolved") as raised:
            locate([("sm121-tiny", version)], **HOW)
    assert "sm121-tiny==2.0" in "\n".join(raised.value.details)


def test_sources_are_offered_only_when_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.upstream import make_sdist

    make_sdist(tmp_path / "shelf", {"a": "x"})
    with serve_index(tmp_path / "shelf") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        with pytest.raises(ToolFailed):
            locate([("vllm", "1.2.3")], **HOW)
        (file,) = locate([("vllm", "1.2.3")], **HOW, allow_sdist=True).values()
    assert file.filename == "vllm-1.2.3.tar.gz"


def test_resolution_is_the_targets_and_not_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    tiny(
        shelf,
        requires=[
            'for-arm; platform_machine == "aarch64"',
            'for-pc; platform_machine == "x86_64"',
            'for-old; python_version < "3.12"',
        ],
    )
    for name in ("for_arm", "for_pc", "for_old"):
        make_wheel(shelf, {}, name=name)
    with serve_index(shelf) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        files = compile_lock(["sm121-tiny==1.0"], **HOW, log=tmp_path / "log")
    assert {f.distribution for f in files} == {"sm121-tiny", "for-arm"}
    assert (tmp_path / "log").read_text().startswith("$ ")


def test_asking_the_index_fetches_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv would fetch a CPython of the target's version when this machine has none."""
    tiny(tmp_path / "shelf")
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "pythons"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", "http://127.0.0.1:9/")
    seen: list[dict[str, str]] = []
    run = proc.run

    def watched(argv, **how):
        seen.append(dict(how.get("env") or os.environ))
        return run(argv, **how)

    monkeypatch.setattr(proc, "run", watched)
    with serve_index(tmp_path / "shelf") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        started = time.monotonic()
        locate([("sm121-tiny", "1.0")], uv_platform=TARGET.uv_platform, python="3.14")
    assert time.monotonic() - started < 10
    assert seen[0]["UV_PYTHON_DOWNLOADS"] == "never"
    assert not (tmp_path / "pythons").exists()
