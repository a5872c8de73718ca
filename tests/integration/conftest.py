"""Fixtures on real input: the release's sdist, the series, wheels of the lock."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm121.fetch import Cache, fetch_locked
from sm121.files import HashMemory
from sm121.gitrepo import Repository
from sm121.lock.pylock import LockedFile, Target, lock_path, locked_files, read_lock
from sm121.patches.apply import AppliedSeries, apply_series
from sm121.patches.series import Patch, load_series
from sm121.pins.load import stack_names
from sm121.pins.model import Stack
from sm121.source.vllm import import_sdist, sdist_file
from sm121.ui import Ui
from support.checkouts import ROOT, Checkout
from support.desk import desk  # noqa: F401 - a fixture

PATCHES = ROOT / "patches/vllm"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that reads a release's tree runs for every stack, or for those that it is marked for.

    `stacks(NAME, ...)`: these; else `patch(NAME)`: those whose series has that patch. --stack:
    only that one of them.
    """
    if "real" not in metafunc.fixturenames:
        return
    names = stack_names(ROOT / "pins")
    if mark := metafunc.definition.get_closest_marker("stacks"):
        assert set(mark.args) <= set(names), "a stack that there is not"
        names = list(mark.args)
    elif mark := metafunc.definition.get_closest_marker("patch"):
        names = [n for n in names if mark.args[0] in {p.name for p in load_series(PATCHES / n)}]
    if only := metafunc.config.getoption("--stack"):
        names = [n for n in names if n == only]
    metafunc.parametrize("stack_name", names, indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that asks for the release may have to download and import it."""
    for item in items:
        if "torch_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(900))  # the first one makes a smoke build
        elif {"real", "sdist", "locked_wheel"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder for a made-up repository."""
    return tmp_path / "upstream"


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """An empty repository of the pipeline."""
    repository = Repository(tmp_path / "own.git")
    yield repository
    repository.close()


@pytest.fixture(scope="session")
def ship_target(stack: Stack) -> Target:
    """The Spark, and the Python that the stack ships for."""
    pin = stack.targets["linux-aarch64"]
    return Target.make("linux-aarch64", python=pin.pythons[0], glibc=pin.glibc)


@pytest.fixture(scope="session")
def download_cache(shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """The shared downloads; hashes are remembered for this session only."""
    return Cache(shared_cache, HashMemory(tmp_path_factory.mktemp("memory") / "hashes.json"))


def _fetched(file: LockedFile, target: Target, cache: Cache, *, sdist: bool = False) -> Path:
    quiet = Ui(out=io.StringIO(), err=io.StringIO())
    return fetch_locked(
        [file], target=target, cache=cache, offline=False, ui=quiet, allow_sdist=sdist
    )[file.sha256]


@pytest.fixture(scope="session")
def sdist(stack: Stack, ship_target: Target, download_cache: Cache) -> Path:
    """The release's real sdist, out of the cache or the index."""
    return _fetched(sdist_file(stack.vllm), ship_target, download_cache, sdist=True)


@pytest.fixture(scope="session")
def locked_wheel(root: Path, stack_name: str, ship_target: Target, download_cache: Cache):
    """A wheel of the stack's lock, by distribution."""

    def get(distribution: str, kind: str = "family") -> Path:
        lock = read_lock(lock_path(root / "pins", stack_name, kind, ship_target))
        (file,) = (f for f in locked_files(lock, ship_target) if f.distribution == distribution)
        return _fetched(file, ship_target, download_cache)

    return get


@pytest.fixture(scope="session")
def flashinfer_wheel(locked_wheel) -> Path:
    """The stack's real FlashInfer wheel."""
    return locked_wheel("flashinfer-python")


@pytest.fixture(scope="session")
def torch_python(built: Checkout) -> Path:
    """A Python with torch (a CUDA build; there is no GPU): the build host's own.

    It is the built stack's torch, also for another stack's tree: a second one would cost several
    GB. What that leaves untested is named in docs/patches.md.
    """
    return built.root / "build/env" / built.stack / "bin/python"


@dataclass(frozen=True, slots=True)
class RealSeries:
    """The release as a commit, the series, and what became of it. Only for reading."""

    repository: Repository
    base: str
    series: list[Patch]
    applied: AppliedSeries


@pytest.fixture(scope="session")
def real(
    root: Path,
    stack: Stack,
    stack_name: str,
    sdist: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealSeries]:
    folder = tmp_path_factory.mktemp("real")
    repository = Repository(folder / "vllm.git")
    base = import_sdist(sdist, sdist_file(stack.vllm), stack.vllm.date, repository)
    repository.point("refs/test/base", base)
    series = load_series(root / "patches/vllm" / stack_name)
    applied = apply_series(repository, base, series)
    repository.point("refs/test/patched", applied.commit)
    yield RealSeries(repository, base, series, applied)
    repository.close()


@pytest.fixture(scope="session")
def pristine_tree(real: RealSeries, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of the vLLM tree as upstream released it. Only for reading."""
    folder = tmp_path_factory.mktemp("pristine") / "vllm"
    real.repository.export(real.base, folder)
    return folder


@pytest.fixture(scope="session")
def patched_tree(real: RealSeries, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of the vLLM tree with the series applied. Only for reading."""
    folder = tmp_path_factory.mktemp("patched") / "vllm"
    real.repository.export(real.applied.commit, folder)
    return folder
