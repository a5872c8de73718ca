"""Fixtures that unit and integration tests share."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm121.context import Context, Options
from sm121.files import HashMemory
from sm121.layout import Layout
from sm121.pins.load import default_stack, load_stack, stack_names
from sm121.pins.model import Stack
from sm121.ui import Ui
from support.checkouts import built, new_checkout  # noqa: F401 - fixtures
from support.stacks import minimal, write_stack

ROOT = Path(__file__).resolve().parents[1]
# A shell starts background jobs with SIGINT ignored, and a CI run may be one; tests that
# interrupt themselves need the usual handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Read once, before a test changes the environment: CI downloads into one folder.
SHARED_CACHE = Path(os.environ.get("SM121_CACHE", ROOT / "build" / "cache")).resolve()


# Tests that share something costly (a build, a real set of wheels, the release's tree) stay on
# one worker of xdist, the longest group first; what is in none goes wherever there is room.
GROUPS = {
    "build": {"built", "new_checkout"},
    "abi": {"tools"},
    "series": {"real", "sdist"},
    "sync": {"hosts"},
}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests for `--dist loadgroup`; a group's tests keep their order."""
    order = [*GROUPS, None]
    group_of: dict[str, str | None] = {}
    for item in items:
        used = set(getattr(item, "fixturenames", ()))
        group = next((name for name, fixtures in GROUPS.items() if fixtures & used), None)
        group_of[item.nodeid] = group
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: order.index(group_of[item.nodeid]))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the person running the tests has set may decide a result."""
    for name in list(os.environ):
        if name.startswith(("SM121_", "GIT_")) and name != "GIT_SSL_CAINFO":
            monkeypatch.delenv(name)
        if name.endswith("_SRC_DIR") or name.startswith("VLLM_"):
            monkeypatch.delenv(name)


@dataclass
class Screen:
    """A Ui whose output a test can read."""

    ui: Ui
    out: io.StringIO
    err: io.StringIO

    @property
    def text(self) -> str:
        return self.err.getvalue()


@pytest.fixture
def screen() -> Screen:
    out, err = io.StringIO(), io.StringIO()
    return Screen(Ui(out=out, err=err), out, err)


@pytest.fixture(scope="session")
def root() -> Path:
    """This checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_cache() -> Path:
    """Folder of downloads that outlives the tests: SM121_CACHE, else build/cache."""
    return SHARED_CACHE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stack", metavar="NAME", choices=stack_names(ROOT / "pins"),
        help="only this stack of pins/; its real builds too (default: the builds of pins/default)",
    )  # fmt: skip
    parser.addoption(
        "--jit", metavar="DIR",
        help="also verify-jit's tests with real compilers, on what it made (build/jit/<stack>)",
    )  # fmt: skip
    parser.addoption(
        "--jit-cache-listed", action="store_true",
        help="test_jit_cache.py compiles the modules that the stack lists (minutes), not the smallest",
    )  # fmt: skip
    parser.addoption(
        "--image", action="store_true", help="build Dockerfile.verify with buildah (test_image.py)"
    )


@pytest.fixture(scope="session")
def built_stack(request: pytest.FixtureRequest) -> str:
    """The stack whose real builds the tests make: --stack, else pins/default."""
    return request.config.getoption("--stack") or default_stack(ROOT / "pins")


@pytest.fixture(scope="session")
def stack_name(request: pytest.FixtureRequest, built_stack: str) -> str:
    """One stack; every one in turn for tests of a release's tree (integration/conftest.py)."""
    return str(getattr(request, "param", built_stack))


@pytest.fixture(scope="session")
def stack(stack_name: str) -> Stack:
    """The real pins."""
    return load_stack(ROOT / "pins", stack_name)


@pytest.fixture
def small(tmp_path: Path, screen: Screen) -> Context:
    """A context of a made-up stack in an otherwise empty checkout."""
    root = tmp_path / "checkout"
    write_stack(root / "pins", minimal())
    (root / "pins/default").write_text("1.2.3\n")
    (root / "patches/vllm/1.2.3").mkdir(parents=True)
    (root / "patches/vllm/1.2.3/series").write_text("")
    layout = Layout(
        root=root, build=root / "build", wheelhouse=root / "wheelhouse", cache=root / "build/cache"
    )
    return Context(
        layout=layout,
        stack_name="1.2.3",
        stack=load_stack(layout.pins, "1.2.3"),
        options=Options(),
        ui=screen.ui,
        memory=HashMemory(layout.build / "hashes.json"),
    )
