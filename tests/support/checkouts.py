"""Real builds of the real release, in copies of this checkout.

Downloads are shared (SM121_CACHE, default build/cache of the checkout), everything else is
made from scratch in each copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm121.pins.load import load_stack
from sm121.pins.model import Stack

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Checkout:
    """A copy of the project that commands are run in, as a user runs them."""

    root: Path
    cache: Path
    stack: str

    @property
    def pins(self) -> Stack:
        """What its stack.toml says."""
        return load_stack(self.root / "pins", self.stack)

    @property
    def patches(self) -> Path:
        """Folder of its stack's series."""
        return self.root / "patches/vllm" / self.stack

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "sm121", *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(self.root / "src"),
            "SM121_CACHE": str(self.cache),
            **more,
        }

    def run(
        self, *arguments: str, code: int = 0, prefix: tuple[str, ...] = (), **environment: str
    ) -> str:
        """Run a verb; returns what it printed. Fails the test on another exit code."""
        finished = subprocess.run(
            [*prefix, *self.command(*arguments)],
            cwd=self.root,
            env=self.environment(**environment),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert finished.returncode == code, finished.stdout
        return finished.stdout

    @property
    def wheel(self) -> Path:
        (wheel,) = (self.root / "wheelhouse").glob("*.whl")
        return wheel


def copy_checkout(destination: Path) -> None:
    """What a clean clone would hold, with uncommitted changes."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            target = destination / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


@pytest.fixture(scope="session")
def new_checkout(
    tmp_path_factory: pytest.TempPathFactory, shared_cache: Path, built_stack: str
) -> Iterator[Callable[[str], Checkout]]:
    """Make further copies, in which --stack is the default; all are removed at the end (each
    takes several GB)."""
    made: list[Path] = []

    def make(name: str) -> Checkout:
        root = tmp_path_factory.mktemp(name) / "sm121"
        copy_checkout(root)
        (root / "pins/default").write_text(f"{built_stack}\n")
        made.append(root)
        return Checkout(root=root, cache=shared_cache, stack=built_stack)

    yield make
    for root in made:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def built(new_checkout: Callable[[str], Checkout]) -> Checkout:
    """A checkout with a finished aarch64 smoke build. Tests that use it put back what they edit."""
    checkout = new_checkout("first")
    checkout.run("build", "--profile", "smoke")
    return checkout
