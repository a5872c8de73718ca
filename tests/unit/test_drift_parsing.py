"""Reading upstream's CMake and setup.py."""

from __future__ import annotations

import pytest

from sm121.source.drift import Fetched, declared_components, declared_sources


def one(text: str) -> Fetched:
    (found,) = declared_sources(text, "f.cmake")
    return found


@pytest.mark.parametrize(
    "text",
    [
        """FetchContent_Declare(x
             GIT_REPOSITORY https://host/Owner/Name.git
             GIT_TAG v1)""",
        """FetchContent_Declare(x
             GIT_REPOSITORY https://host/Owner/Name
             # a comment
             # and another
             GIT_TAG v1
             GIT_PROGRESS TRUE)""",
        """set(REV "v1" CACHE STRING "x")
           FetchContent_Declare(x GIT_REPOSITORY https://host/Owner/Name.git GIT_TAG ${REV})""",
        """set(REV v1)
           set(URL https://host/owner/name.git)
           fetchcontent_declare(x git_repository ${URL} git_tag "${REV}")""",
        """FetchContent_Declare(x GIT_REPOSITORY https://host/owner/name.git # why
             GIT_TAG v1)""",
    ],
)
def test_source_is_read_with_variables_and_comments(text: str) -> None:
    assert one(text) == Fetched(file="f.cmake", repository="owner/name", ref="v1")


def test_all_sources_of_a_file_are_read() -> None:
    text = "".join(
        f"FetchContent_Declare(x{n} GIT_REPOSITORY https://h/o/n{n}.git GIT_TAG v{n})\n"
        for n in range(3)
    )
    assert [(s.repository, s.ref) for s in declared_sources(text, "f")] == [
        ("o/n0", "v0"), ("o/n1", "v1"), ("o/n2", "v2"),
    ]  # fmt: skip


def test_unknown_variable_stays_visible() -> None:
    text = "FetchContent_Declare(x GIT_REPOSITORY https://h/o/n.git GIT_TAG ${ELSEWHERE})"
    assert one(text).ref == "${ELSEWHERE}"


BY_DEVICE = """if (DEFINED ENV{X_SRC_DIR})
  FetchContent_Declare(x SOURCE_DIR $ENV{X_SRC_DIR})
else()
  if (VLLM_TARGET_DEVICE STREQUAL "%s")
    set(URL "https://h/rocm/n.git")
    set(REV "r1")
  else()
    set(URL "https://h/o/n.git")
    set(REV "v1")
  endif()
  FetchContent_Declare(x GIT_REPOSITORY ${URL} GIT_TAG ${REV})
endif()
"""


def test_what_another_device_fetches_is_not_ours() -> None:
    """As cmake/external_projects/triton_kernels.cmake has it from 0.28 on."""
    assert one(BY_DEVICE % "rocm") == Fetched(file="f.cmake", repository="o/n", ref="v1")


@pytest.mark.parametrize(
    "text",
    [
        BY_DEVICE % "cuda",
        (BY_DEVICE % "rocm").replace("if (VLLM_TARGET_DEVICE", "if (NOT VLLM_TARGET_DEVICE"),
        """set(REV "v1")
           if(NEWER)
             set(REV "v2")
           endif()
           FetchContent_Declare(x GIT_REPOSITORY https://h/o/n.git GIT_TAG ${REV})""",
    ],
)
def test_a_variable_with_two_values_stays_visible(text: str) -> None:
    """Neither is taken by chance: no pin agrees with it, so it is told."""
    assert one(text).ref == "${REV}"


def test_a_variable_that_is_set_twice_to_the_same_is_known() -> None:
    text = (
        'if(A)\n  set(REV "v1")\nelse()\n  set(REV "v1")\nendif()\n'
        "FetchContent_Declare(x GIT_REPOSITORY https://h/o/n.git GIT_TAG ${REV})"
    )
    assert one(text).ref == "v1"


def test_components_of_setup_and_rust() -> None:
    setup = """
ext_modules.append(CMakeExtension(name="vllm._C"))
ext_modules.append(
    CMakeExtension(
        name="vllm.vllm_flash_attn._vllm_fa2_C", optional=True
    )
)
"""
    rust = 'RustExtension(target="vllm.vllm-rs"), RustExtension(target="vllm._rust_tool_parser")'
    assert declared_components(setup, rust) == {
        "_C", "_vllm_fa2_C", "vllm-rs", "_rust_tool_parser",
    }  # fmt: skip
