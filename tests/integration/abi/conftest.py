"""Real compilers, a real toolkit made of wheels, real wheels from the index. No skips."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm121 import proc
from sm121.fetch import Cache, download_all, fetch_locked
from sm121.files import HashMemory
from sm121.index import IndexFile, compile_lock
from sm121.layout import Layout
from sm121.lock.pylock import Target, lock_path, locked_files, read_lock
from sm121.toolkit.cuda import assemble
from sm121.toolkit.machine import find_compilers, host_machine
from sm121.ui import Ui

sys.path.insert(0, str(Path(__file__).parents[2] / "unit/abi"))  # make.py

_TOOLKIT_HOST = ("nvidia-cuda-nvcc", "nvidia-nvvm")
# nvcc's wheel also has headers (fatbinary_section.h), which are taken from the target's.
_TOOLKIT_TARGET = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")


@pytest.fixture(scope="session")
def layout() -> Layout:
    return Layout.find(start=Path(__file__).parent)


@pytest.fixture(scope="session")
def cache(layout) -> Cache:
    memory = HashMemory(layout.cache / "abi-test-hashes.json")
    yield Cache(layout.cache, memory)
    memory.save()


@pytest.fixture(scope="session")
def locked(layout, cache) -> Callable[..., dict[str, Path]]:
    """Distribution → wheel, of a lock of stack 0.26.0. kind: 'family' or 'host'."""

    def get(kind: str, machine: str, names: tuple[str, ...] | None) -> dict[str, Path]:
        target = Target.make(f"linux-{machine}", python="3.12", glibc="2.39")
        lock = read_lock(lock_path(layout.pins, "0.26.0", kind, target))
        files = [f for f in locked_files(lock, target) if names is None or f.distribution in names]
        assert names is None or len(files) == len(names), f"the lock lacks one of {names}"
        found = fetch_locked(files, target=target, cache=cache, offline=False, ui=Ui(quiet=True))
        return {f.distribution: found[f.sha256] for f in files}

    return get


@pytest.fixture(scope="session")
def indexed(cache) -> Callable[..., Path]:
    """The aarch64 wheel of an exact 'name==version' from the index."""

    def get(requirement: str, python: str = "3.12") -> Path:
        target = Target.make("linux-aarch64", python=python, glibc="2.39")
        files = compile_lock(
            [requirement], uv_platform=target.uv_platform, python=python, arguments=["--no-deps"]
        )
        from packaging.utils import parse_wheel_filename

        rank = {tag: place for place, tag in enumerate(target.tags())}
        ranked: list[tuple[int, IndexFile]] = []
        for file in files:
            places = [rank[t] for t in parse_wheel_filename(file.filename)[3] if t in rank]
            if places:
                ranked.append((min(places), file))
        file = min(ranked, key=lambda pair: pair[0])[1]
        if cache.find(file.sha256, file.filename, Ui(quiet=True)) is None:
            download_all([file], cache=cache, ui=Ui(quiet=True))
        return cache.path(file.sha256, file.filename)

    return get


@dataclass(frozen=True)
class Tools:
    """A toolkit for aarch64 with this machine's nvcc, and the C++ compiler for aarch64."""

    root: Path
    cxx: Path

    def nvcc(self, source: str, output: Path, *flags: str) -> Path:
        """Compile CUDA code for aarch64 into an object."""
        cu = output.with_suffix(".cu")
        cu.write_text(source)
        proc.run(
            [self.root / "bin/nvcc", "-ccbin", self.cxx, "-Xcompiler", "-fPIC", "-c", cu, "-o", output, *flags]
        )  # fmt: skip
        return output

    def shared(self, output: Path, *inputs: object, source: str = "") -> Path:
        """Link a shared library, from objects and C++ source."""
        argv: list[str | Path] = [self.cxx, "-shared", "-fPIC", "-o", output]
        if source:
            file = output.with_suffix(".cpp")
            file.write_text(source)
            argv.append(file)
        proc.run([*argv, *map(str, inputs), f"-L{self.root}/lib64", f"-L{self.root}/lib64/stubs"])
        return output


@pytest.fixture(scope="session")
def tools(tmp_path_factory, locked) -> Tools:
    folder = tmp_path_factory.mktemp("toolkit") / "cuda"
    compilers = find_compilers("aarch64")
    assemble(
        folder,
        host_wheels=list(locked("host", host_machine(), _TOOLKIT_HOST).values()),
        target_wheels=list(locked("family", "aarch64", _TOOLKIT_TARGET).values()),
        machine="aarch64", compilers=compilers, log=folder.parent / "log",
    )  # fmt: skip
    return Tools(folder, compilers.cxx)
