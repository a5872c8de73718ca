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
