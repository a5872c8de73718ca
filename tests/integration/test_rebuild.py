"""What is compiled again and what is not, with the real nvcc, ninja, ccache and launcher.

A small CUDA library stands in for vLLM's; toolkit, toolchain file, environment and launcher
are those of a build. cases.md 23.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from sm121 import proc
from sm121.compile.jobs import Jobs
from sm121.compile.launching import cost_folder, prepare
from sm121.compile.page import cache_sentence
from sm121.compile.records import Record, read_records, read_run
from sm121.compile.timeline import read_links, summarise
from sm121.compile.toolchain import Tools, build_environment, prefix_maps, toolchain_text
from sm121.context import Context, Options
from sm121.files import HashMemory
from sm121.layout import Layout
from sm121.pins.model import Stack
from sm121.toolkit.machine import find_compilers
from sm121.ui import Ui
from support.checkouts import Checkout
from support.tools import tool

SOURCES = {
    "shared.h": "inline const char *where() { return __FILE__; }\n",
    "one.cu": '#include "shared.h"\nnamespace { __global__ void k(int *p) { *p = 1; } }\n'
    "const char *one(int *p) { k<<<1, 1>>>(p); return where(); }\n",
    "alone.cu": "namespace { __global__ void k(int *p) { *p = 2; } }\n"
    "void alone(int *p) { k<<<1, 1>>>(p); }\n",
    "host.cpp": '#include "shared.h"\nconst char *host() { return where(); }\n',
    "CMakeLists.txt": "cmake_minimum_required(VERSION 3.26)\nset(CMAKE_CUDA_ARCHITECTURES 120-real)\n"
    "project(tiny LANGUAGES CXX CUDA)\nadd_library(tiny MODULE host.cpp one.cu alone.cu)\n"
    "target_include_directories(tiny PRIVATE ${PROJECT_SOURCE_DIR})\n",
}
# The first test may have to make a smoke build.
pytestmark = pytest.mark.timeout(900)

ALL = {"host.cpp", "one.cu", "alone.cu"}


@dataclass
class Tree:
    """One folder with a copy of the sources and of the toolkit, as another checkout has them."""

    root: Path
    context: Context
    tools: Tools
    ccache: Path

    @property
    def src(self) -> Path:
        return self.root / "build" / "work" / "src"

    @property
    def ninja(self) -> Path:
        return self.root / "build" / "work" / "ninja-1" / "temp.linux"

    @property
    def library(self) -> Path:
        return self.ninja / "libtiny.so"

    def edit(self, name: str) -> None:
        with (self.src / name).open("a") as file:
            file.write(f"// edited {time.time_ns()}\n")

    def configure(self, *, jobs: int, cached: bool) -> dict[str, str]:
        """What the compile stage and then setup.py do before they build."""
        work = self.root / "build/work"
        launching = prepare(
            self.context, work=work, environment=self.tools.environment,
            jobs=Jobs(count=jobs, memory=64 << 30, reason=""),
        )  # fmt: skip
        prefixes = prefix_maps(
            {work: "build", self.src: "vllm", self.tools.cuda: "cuda"}, ninja_tree=self.ninja.parent
        )
        (work / "toolchain.cmake").write_text(
            toolchain_text(self.tools, prefixes=prefixes, variables={}, launcher=launching.command)
        )
        environment = build_environment(
            self.tools, toolchain=work / "toolchain.cmake", components=(), arch="12.1a", jobs=jobs,
            version="1", epoch=1_000_000_000, cache_base=self.root / "build", home=work / "home",
            sources={}, ccache_dir=self.ccache, replaced=["the same in all folders"],
            ninja=launching.ninja, settings=launching.settings,
        )  # fmt: skip
        if not cached:
            environment["CCACHE_DISABLE"] = "1"
        self.ninja.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["cmake", self.src, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
             *(f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("CXX", "CUDA")),
             "-DCMAKE_JOB_POOL_COMPILE:STRING=compile", f"-DCMAKE_JOB_POOLS:STRING=compile={jobs}",
             *environment["CMAKE_ARGS"].split()],
            cwd=self.ninja, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return environment

    def build(self, *, jobs: int = 2, cached: bool = True) -> list[Record]:
        """Build; the records of what the launcher ran, by start."""
        environment = self.configure(jobs=jobs, cached=cached)
        done = subprocess.run(
            ["cmake", "--build", ".", f"-j{jobs}"],
            cwd=self.ninja, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return self.last_run()

    def last_run(self) -> list[Record]:
        place = cost_folder(self.context)
        return sorted(read_records(place.records, run=read_run(place)), key=lambda r: r.start)


def names(records: list[Record]) -> list[str]:
    return [Path(record.source).name for record in records]


@pytest.fixture(scope="module")
def make_tree(built: Checkout, stack: Stack, stack_name: str, tmp_path_factory):
    tool("ccache")
    folder = tmp_path_factory.mktemp("rebuild")
    kept = built.root / f"build/toolkit/{stack_name}-linux-aarch64/cuda"

    def make(name: str) -> Tree:
        root = folder / name
        cuda = root / "build/toolkit/cuda"
        # nvcc finds its root by its real path; hard links have one of their own.
        shutil.copytree(kept, cuda, symlinks=True, copy_function=os.link)
        tree = Tree(
            root=root,
            context=Context(
                layout=Layout(
                    root=root, build=root / "build", wheelhouse=root / "w", cache=root / "c"
                ),
                stack_name=stack_name, stack=stack, options=Options(profile="kernels"),
                ui=Ui(out=io.StringIO(), err=io.StringIO()), memory=HashMemory(root / "h.json"),
            ),
            tools=Tools(
                machine="aarch64", cuda=cuda, torch=root, python_include=root,
                python_version="3.12", environment=built.root / "build/env" / stack_name,
                compilers=find_compilers("aarch64"),
            ),
            ccache=folder / "ccache",
        )  # fmt: skip
        tree.src.mkdir(parents=True)
        for file, text in SOURCES.items():
            (tree.src / file).write_text(text)
        return tree

    yield make
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def first(make_tree) -> Tree:
    """Built once; nothing is in the compiler cache before."""
    tree = make_tree("first")
    records = tree.build()
    assert set(names(records)) == ALL
    assert {r.cache for r in records} == {"miss"}
    return tree


def test_nothing_changed_compiles_nothing(first: Tree) -> None:
    before = first.library.stat().st_mtime_ns
    assert first.build() == []
    assert first.library.stat().st_mtime_ns == before


def test_link_is_drawn_after_the_objects_it_needs(first: Tree) -> None:
    """ninja logs the start of a command where its manual says the output's time."""
    records = read_records(cost_folder(first.context).records)[: len(ALL)]
    compiled = max(r.end for r in records)
    (link,) = read_links(first.ninja / ".ninja_log", since=compiled)
    assert link.library == first.library.name
    assert compiled - 0.1 <= link.start <= link.end


def test_touching_one_source_compiles_one_object(first: Tree) -> None:
    first.edit("alone.cu")
    assert names(first.build()) == ["alone.cu"]


def test_header_edit_compiles_exactly_its_dependents(first: Tree) -> None:
    first.edit("shared.h")
    assert set(names(first.build())) == {"one.cu", "host.cpp"}
    assert first.build() == []


def test_same_source_in_another_folder_is_taken_out_of_the_cache(first: Tree, make_tree) -> None:
    """cases.md 23: paths of the first folder must be in neither key nor dependencies."""
    second = make_tree("second")
    records = second.build()
    assert set(names(records)) == ALL
    assert cache_sentence(summarise(records)) == "3 of 3 objects out of ccache (100.0%)"
    assert str(first.root).encode() not in second.library.read_bytes()
    # What it depends on is in its own folder, although the first one's compiler found it out.
    deps = subprocess.run(
        [second.tools.environment / "bin/ninja", "-t", "deps"],
        cwd=second.ninja, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "shared.h" in deps
    assert str(first.root) not in deps
    second.edit("shared.h")
    assert set(names(second.build())) == {"one.cu", "host.cpp"}


def test_dearest_object_starts_first(make_tree) -> None:
    """ninja's own order is that of the source list: host, one, alone."""
    tree = make_tree("ordered")
    assert names(tree.build(jobs=1)) == ["host.cpp", "one.cu", "alone.cu"]
    records = tree.last_run()
    costs = {"alone.cu": 50.0, "one.cu": 90.0, "host.cpp": 5.0}
    dearer = [replace(r, cpu=costs[Path(r.source).name], cache="miss") for r in records]
    cost_folder(tree.context).records.write_text(
        "".join(json.dumps(asdict(r)) + "\n" for r in dearer)
    )
    library = tree.library.read_bytes()
    shutil.rmtree(tree.ninja)
    assert names(tree.build(jobs=1)) == ["one.cu", "alone.cu", "host.cpp"]
    # Which is no reason for another library: the order of linking stays.
    assert tree.library.read_bytes() == library


def test_killed_build_loses_what_was_in_flight_and_the_rest_is_the_same_at_this_path(
    first: Tree, make_tree
) -> None:
    tree = make_tree("killed")
    environment = tree.configure(jobs=1, cached=False)
    mark = str(tree.root)
    process = subprocess.Popen(
        ["cmake", "--build", ".", "-j1"], cwd=tree.ninja,
        env={**environment, proc.MARKER: f"{mark}:1"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    log = tree.ninja / ".ninja_log"
    deadline = time.monotonic() + 100
    while not (log.exists() and ".cu.o" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    # SIGKILL to all, as the next run does to what a killed one has left (sm121.state.exclusive).
    assert proc.kill_marked(mark) >= 3
    process.wait()
    done = [line.split("\t")[3] for line in log.read_text().splitlines() if ".o\t" in line]
    assert 0 < len(done) < 3
    times = {name: (tree.ninja / name).stat().st_mtime_ns for name in done}
    again = tree.build(cached=False)
    assert {r.object for r in again}.isdisjoint(done)
    assert len(again) == 3 - len(done)
    assert {name: (tree.ninja / name).stat().st_mtime_ns for name in done} == times

    library = tree.library.read_bytes()
    shutil.rmtree(tree.ninja)
    assert len(tree.build(cached=False)) == 3
    assert tree.library.read_bytes() == library
    # ccache compiles by relative paths, which must not show either.
    shutil.rmtree(tree.ninja)
    tree.ccache = tree.root / "empty-ccache"
    assert {r.cache for r in tree.build()} == {"miss"}
    assert tree.library.read_bytes() == library
    # nvcc puts a hash of the source's real path into the names of kernels without linkage.
    other = make_tree("other")
    other.build(cached=False)
    assert other.library.read_bytes() != library
