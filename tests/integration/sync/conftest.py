"""A pair of hosts for each test module, and small wheelhouses to send."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.environments import family, wheelhouse
from support.hosts import Hosts, pair
from support.stacks import minimal
from support.tools import run
from support.upstream import make_checkout
from support.wheelhouses import HERE, finish, uv_wheel
from support.wheels import make_wheel

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheels that wheelhouses are made of: a family, uv, and one of 3 MB that does not compress."""
    folder = tmp_path_factory.mktemp("wheels")
    wheels = family(folder)
    noise = random.Random(8).randbytes(3 << 20)
    wheels["model"] = make_wheel(
        folder, {"model/data.bin": noise, "model/__init__.py": "ok = 1\n"}, name="model"
    )
    wheels["uv"] = uv_wheel(folder)
    return wheels


def _house(
    folder: Path, parts: dict[str, Path], *more: Path, without: str = "", **facts: object
) -> Path:
    wheels = [path for key, path in parts.items() if key != without]
    return finish(wheelhouse(folder, [*wheels, *more], **{**HERE, **facts}))


@pytest.fixture
def make_house(tmp_path: Path, parts: dict[str, Path]) -> Make:
    """A wheelhouse; extra wheels and facts of the manifest as given."""

    def make(name: str = "wheelhouse", *more: Path, without: str = "", **facts: object) -> Path:
        return _house(tmp_path / name, parts, *more, without=without, **facts)

    return make


@pytest.fixture(scope="session")
def old_house(tmp_path_factory: pytest.TempPathFactory, parts: dict[str, Path]) -> Path:
    """A wheelhouse without the large wheel; only for reading."""
    return _house(tmp_path_factory.mktemp("houses") / "old", parts, without="model")


@pytest.fixture(scope="session")
def new(tmp_path_factory: pytest.TempPathFactory, parts: dict[str, Path]) -> Path:
    """The next one, with it; only for reading."""
    return _house(tmp_path_factory.mktemp("houses") / "new", parts)


@pytest.fixture(scope="session")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    make_checkout(folder / "checkout", minimal())
    yield from pair(folder, f"sm{os.getpid()}")


@pytest.fixture
def hosts(_pair: Hosts) -> Hosts:
    """Two hosts with nothing on them."""
    _pair.wipe()
    return _pair


@pytest.fixture(scope="session")
def _old_disk(_pair: Hosts, old_house: Path) -> Path:
    """The disk of a node to which the old wheelhouse was synced."""
    _pair.wipe()
    _pair.seed(old_house)
    _pair.sync("worker", "--wheelhouse", str(old_house))
    kept = _pair.folder / "kept"
    run("cp", "-a", _pair.disk("worker"), kept)  # with hard links, unlike shutil.copytree
    return kept


@pytest.fixture
def old(hosts: Hosts, _old_disk: Path) -> str:
    """Id of the release that is current on the worker: of the old wheelhouse."""
    run("cp", "-a", f"{_old_disk}/.", hosts.disk("worker"))
    return hosts.current()
