"""The patch `fa2-kernels`: which of FA2's conditions its header leaves to be decided.

FA2's sources are in git only, so a header with the macros of its static_switch.h, in our words, and
a template that uses them stand in for it; both are compiled and run.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from support.tools import run

pytestmark = pytest.mark.patch("fa2-kernels")

HEADER = "cmake/external_projects/fa2_switches.h"
# As FA2's: a macro, others that are another name for it, and one that a definition makes constant.
STATIC_SWITCH = """
#pragma once
#define BOOL_SWITCH(COND, NAME, ...)                                       \\
  [&] {                                                                    \\
    if (COND) { constexpr static bool NAME = true; return __VA_ARGS__(); } \\
    constexpr static bool NAME = false; return __VA_ARGS__();              \\
  }()
#define EVENK_SWITCH BOOL_SWITCH
#define LOCAL_SWITCH BOOL_SWITCH
#define ALIBI_SWITCH BOOL_SWITCH
#define SOFTCAP_SWITCH BOOL_SWITCH
"""
# Nested as in FA2's launch template. Every kernel that is compiled counts itself.
SOURCE = """
#include "static_switch.h"
#include <cstdio>
#include <cstdlib>
int kernels = 0;
template <bool MN, bool K, bool Local, bool Split, bool Append, bool Alibi, bool Softcap>
struct Kernel {
  static inline const bool counted = (++kernels, true);
  static void run() {
    (void)&counted;
    std::printf("%d%d%d%d%d%d%d", MN, K, Local, Split, Append, Alibi, Softcap);
  }
};
int main(int, char** argv) {
  auto asked = [&](int i) { return argv[1][i] == '1'; };
  try {
    BOOL_SWITCH(asked(0), IsEvenMNConst, [&] {
      EVENK_SWITCH(asked(1), IsEvenKConst, [&] {
        LOCAL_SWITCH(asked(2), Is_local, [&] {
          BOOL_SWITCH(asked(3), Split, [&] {
            BOOL_SWITCH(asked(4), Append_KV, [&] {
              ALIBI_SWITCH(asked(5), Has_alibi, [&] {
                SOFTCAP_SWITCH(asked(6), Is_softcap, [&] {
                  BOOL_SWITCH(false, ReturnSoftmaxConst, [&] {
                    Kernel<IsEvenMNConst, IsEvenKConst, Is_local, Split, Append_KV, Has_alibi,
                           Is_softcap>::run();
                  });
                });
              });
            });
          });
        });
      });
    });
  } catch (const std::exception& error) {
    std::printf("%s", error.what());
  }
  std::printf("\\n%d\\n", kernels);
}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "static_switch.h").write_text(STATIC_SWITCH)
    return tmp_path


def compiled(folder: Path, source: str, *options: str) -> Path:
    (folder / "source.cpp").write_text(source)
    program = folder / "program"
    run("g++", "-std=c++20", "-I", folder, *options, folder / "source.cpp", "-o", program)
    return program


def included(patched_tree: Path) -> list[str]:
    return ["-include", str(patched_tree / HEADER)]


def test_upstream_compiles_kernels_that_vllm_never_calls(folder: Path) -> None:
    program = compiled(folder, SOURCE.replace("<cstdio>", "<stdexcept>\n#include <cstdio>"))
    assert run(program, "1010111").stdout.split() == ["1010111", "128"]


def test_two_conditions_are_decided_and_the_others_are_not(
    folder: Path, patched_tree: Path
) -> None:
    program = compiled(folder, SOURCE, *included(patched_tree))
    for number in range(128):
        asked = f"{number:07b}"
        said, count = run(program, asked).stdout.splitlines()
        assert count == "32"
        if asked[4] == "1":
            assert "FA2 was built without appending to the KV cache" in said
        else:
            assert said == f"0{asked[1:]}"


def test_a_condition_that_it_does_not_know_does_not_compile(
    folder: Path, patched_tree: Path
) -> None:
    new = SOURCE.replace("ReturnSoftmaxConst", "Has_sinks")
    compiled(folder, new.replace("<cstdio>", "<stdexcept>\n#include <cstdio>"))
    with pytest.raises(AssertionError, match="FA2_SWITCH_Has_sinks"):
        compiled(folder, new, *included(patched_tree))


def test_cmake_hands_the_header_to_the_compiler(tmp_path: Path, patched_tree: Path) -> None:
    """The tree's own statement, in a project of one source that needs the header, in a folder with
    a space. (A source's COMPILE_OPTIONS know no `SHELL:`, which a target's do.)"""
    folder = tmp_path / "a folder"
    folder.mkdir()
    tree_text = (patched_tree / "cmake/external_projects/vllm_flash_attn.cmake").read_text()
    found = re.search(
        r"set_property\(SOURCE \$\{FA2_GEN_SRCS\} [^)]*fa2_switches[^)]*\)", tree_text
    )
    assert found
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(one CXX)\nset(FA2_GEN_SRCS source.cpp)\n"
        f"{found[0]}\nadd_library(one OBJECT source.cpp)\ntarget_include_directories(one PRIVATE .)\n"
    )
    shutil.copy(patched_tree / HEADER, folder)
    (folder / "static_switch.h").write_text(STATIC_SWITCH)
    (folder / "source.cpp").write_text("#ifndef FA2_BOTH\n#error no header\n#endif\n")
    run("cmake", "-S", folder, "-B", folder / "build")
    run("cmake", "--build", folder / "build")
