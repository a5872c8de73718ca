"""Which statement of build.ninja comes first, and what must not move."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sm121.compile import order
from sm121.compile.order import longest_first, sort_file

A, B, C = (f"CMakeFiles/t.dir/{name}.cu.o" for name in "abc")
TEXT = f"""ninja_required_version = 1.5
include CMakeFiles/rules.ninja
build cmake_order: phony || x
# Object build statements
build {A}: CUDA_COMPILER__t_unscanned_Release /s/a.cu || cmake_order
  FLAGS = -O3 $
  -DA
  pool = compile

build {B}: CXX_COMPILER__t_unscanned_Release /s/b.cpp || cmake_order
  FLAGS = b

#############
build {C}: CUDA_COMPILER__t_unscanned_Release /s/c.cu || cmake_order
  FLAGS = c
build t.so: CXX_MODULE_LIBRARY_LINKER__t_Release {A} {B} {C}
  LINK_FLAGS = -s
"""


def outputs(text: str) -> list[str]:
    return [line.split(":")[0][6:] for line in text.splitlines() if line.startswith("build ")]


def test_dearest_comes_first_with_its_own_variables() -> None:
    text = longest_first(TEXT, {A: 1, B: 3, C: 9})
    assert outputs(text) == ["cmake_order", C, B, A, "t.so"]
    assert (
        f"build {A}: CUDA_COMPILER__t_unscanned_Release /s/a.cu || cmake_order\n  FLAGS = -O3 $\n  -DA\n  pool = compile\n"
        in text
    )
    assert sorted(text.splitlines()) == sorted(TEXT.splitlines())


def test_order_of_linking_stays() -> None:
    """It is part of the library, and so would be the figures of an earlier build."""
    assert f"t_Release {A} {B} {C}\n" in longest_first(TEXT, {A: 1, B: 3, C: 9})


def test_one_never_measured_counts_as_the_mean() -> None:
    assert outputs(longest_first(TEXT, {A: 1, C: 9}))[1:4] == [C, B, A]


@pytest.mark.parametrize("seconds", [{}, {A: 9, B: 3, C: 1}])
def test_nothing_to_change(seconds: dict[str, float]) -> None:
    assert longest_first(TEXT, seconds) == TEXT


def settings(folder: Path) -> Path:
    file = folder / "launch.json"
    file.write_text(json.dumps({"objects": {C: {"cpu": 9.5, "rss": 1}, A: {"cpu": 1, "rss": 1}}}))
    return file


def test_ninja_sees_no_newer_file(tmp_path: Path) -> None:
    file = tmp_path / "build.ninja"
    file.write_text(TEXT)
    os.utime(file, ns=(5_000_000_123, 5_000_000_123))
    sort_file(str(file), str(settings(tmp_path)))
    assert outputs(file.read_text())[1] == C
    assert file.stat().st_mtime_ns == 5_000_000_123
    assert sorted(p.name for p in tmp_path.iterdir()) == ["build.ninja", "launch.json"]


@pytest.mark.parametrize(
    ("arguments", "first"),
    [(["-j2"], C), (["-t", "restat", "build.ninja"], A), (["--version"], A)],
    ids=["a build", "a tool", "the version"],
)
def test_only_a_build_sorts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], first: str
) -> None:
    (tmp_path / "build.ninja").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SM121_LAUNCH", str(settings(tmp_path)))
    became: list[list[str]] = []
    monkeypatch.setattr(order.os, "execvp", lambda name, argv: became.append([name, *argv]))
    order.main(["/env/ninja", *arguments])
    assert became == [["/env/ninja", "/env/ninja", *arguments]]
    assert outputs((tmp_path / "build.ninja").read_text())[1] == first


def test_without_build_file_or_settings_ninja_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    became: list[str] = []
    monkeypatch.setattr(order.os, "execvp", lambda name, argv: became.append(name))
    monkeypatch.setenv("SM121_LAUNCH", str(tmp_path / "none.json"))
    order.main(["ninja"])
    monkeypatch.delenv("SM121_LAUNCH")
    order.main(["ninja"])
    assert became == ["ninja", "ninja"]
