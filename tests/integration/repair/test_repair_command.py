"""`repair --env` on real environments that real uv made and something damaged."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import sys
from pathlib import Path

import pytest

from sm121 import cli, proc
from sm121.errors import HashMismatch, UsageFault
from sm121.index import uv_binary
from support.environments import family, sums, wheelhouse
from support.wheels import make_wheel

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """uv can reach nothing, as on a node that is off the network."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))


class Node:
    def __init__(self, folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checkout = folder / "checkout"
        (checkout / "patches").mkdir(parents=True)
        shutil.copytree(root / "pins", checkout / "pins")
        monkeypatch.chdir(checkout)
        self.env, self.folder = folder / "env", folder
        self.wheels = family(folder / "wheels")
        self.wheelhouse = wheelhouse(
            checkout / "wheelhouse", self.wheels.values(), python=PYTHON,
            target=f"linux-{platform.machine()}",
        )  # fmt: skip
        proc.run([uv_binary(), "venv", "--python", sys.executable, self.env])
        self.put(*self.wheels.values())
        self.site = next(self.env.glob("lib/python3*/site-packages"))

    def put(self, *wheels: Path) -> None:
        proc.run(
            [uv_binary(), "pip", "install", "--python", self.env / "bin/python", "--no-index",
             "--no-deps", "--reinstall", *wheels]
        )  # fmt: skip

    def other(self, name: str, version: str, files: dict[str, bytes | str]) -> None:
        self.put(make_wheel(self.folder / "other", files, name=name, version=version))

    def times(self) -> dict[str, tuple[int, int]]:
        return {
            str(p.relative_to(self.site)): (p.stat().st_ino, p.stat().st_mtime_ns)
            for p in self.site.rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        }


@pytest.fixture
def node(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, offline: None) -> Node:
    return Node(tmp_path, root, monkeypatch)


def repair(node: Node, screen, *options: str) -> int:
    return cli.run(["repair", "--env", str(node.env), *options], screen.ui)


DAMAGE = {
    "torch of another build": (
        lambda n: n.other("torch", "2.11.0", {"torch/version.py": "__version__ = '2.11.0+cpu'\n"}),
        {"torch"},
    ),
    "torchvision for the CPU": (
        lambda n: n.other("torchvision", "0.26.0", {"torchvision/_C.so": b"cpu"}),
        {"torchvision"},
    ),
    "NCCL 2.28.9": (
        lambda n: n.other(
            "nvidia_nccl_cu13", "2.28.9", {"nvidia/nccl/lib/libnccl.so.2": b"2.28.9"}
        ),
        {"nvidia_nccl_cu13", "nvidia"},
    ),
    "cu13 at 4.5.2": (
        lambda n: n.other(
            "nvidia_cutlass_dsl_libs_cu13", "4.5.2", {"cutlass/cute.py": "cu13 = 2\n"}
        ),
        {"nvidia_cutlass_dsl_libs_cu13", "cutlass"},
    ),
    "base over cu13": (
        lambda n: n.other(
            "nvidia_cutlass_dsl_libs_base", "4.5.1",
            {"cutlass/LICENSE": "base", "cutlass/_mlir.so": b"12", "cutlass/cute.py": "cu12\n"},
        ),
        {"nvidia_cutlass_dsl_libs_base", "nvidia_cutlass_dsl_libs_cu13", "cutlass"},
    ),
    "cu13 uninstalled": (
        lambda n: proc.run(
            [uv_binary(), "pip", "uninstall", "--python", n.env / "bin/python",
             "nvidia-cutlass-dsl-libs-cu13"]
        ),
        {"nvidia_cutlass_dsl_libs_cu13", "cutlass"},
    ),
    "dist-info deleted": (
        lambda n: shutil.rmtree(n.site / "torch-2.11.0.dist-info"), {"torch"},
    ),
    "library cut short": (
        lambda n: cut(n.site / "torchvision/_C.so"), {"torchvision"},
    ),
}  # fmt: skip


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:3])


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_only_it_is_repaired(node: Node, screen, name: str) -> None:
    """cases.md 1, 6, 7, 10, 19."""
    damage, touched = DAMAGE[name]
    damage(node)
    assert repair(node, screen, "--dry-run") == 1
    assert "why it matters" in screen.text
    before = node.times()
    assert repair(node, screen) == 0
    after = node.times()
    changed = {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
    assert {p.split("/")[0].partition("-")[0] for p in changed} == touched
    assert "uv pip check has no complaint" in screen.text
    assert repair(node, screen) == 0
    assert "Nothing to do" in screen.text


def test_dry_run_changes_nothing(node: Node, screen) -> None:
    (node.site / "torch/version.py").unlink()
    before = node.times()
    assert repair(node, screen, "--dry-run") == 1
    assert "Would reinstall 1 of 5: torch" in screen.text
    assert node.times() == before


def test_extra_package_is_mentioned_and_left(node: Node, screen) -> None:
    node.other("extra", "1.0", {"extra.py": "x = 1\n"})
    before = node.times()
    assert repair(node, screen) == 0
    assert "extra 1.0 is not of this stack; it is left alone" in screen.text
    assert node.times() == before


def test_interrupted_repair_can_be_run_again(
    node: Node, screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between removing and installing: the worst moment."""
    (node.site / "torch/version.py").write_text("wrong")
    from sm121.repair import restore

    def killed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(restore, "install", killed)
        with pytest.raises(KeyboardInterrupt):
            repair(node, screen)
    assert not (node.site / "torch").exists()
    assert repair(node, screen) == 0
    assert (node.site / "torch/version.py").is_file()
    assert repair(node, screen) == 0
    assert "Nothing to do" in screen.text


def test_damaged_wheel_in_the_wheelhouse_is_not_used(node: Node, screen) -> None:
    (node.site / "torch/version.py").unlink()
    wheel = node.wheelhouse / node.wheels["torch"].name
    make_wheel(node.wheelhouse, {"torch/version.py": "evil"}, name="torch", version="2.11.0")
    sums(node.wheelhouse)
    before = node.times()
    with pytest.raises(HashMismatch, match=wheel.name):
        repair(node, screen)
    assert node.times() == before


@pytest.mark.parametrize("facts", [{"complete": False}, {"python": "3.9"}])
def test_wheelhouse_that_does_not_fit_is_refused(node: Node, screen, facts: dict) -> None:
    wheelhouse(node.wheelhouse, node.wheels.values(), **{"python": PYTHON, **facts})
    with pytest.raises(UsageFault):
        repair(node, screen)
