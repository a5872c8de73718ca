"""METADATA, WHEEL and _version.py of an overlay."""

from __future__ import annotations

import pytest

from sm121.errors import CheckFailed
from sm121.overlay.metadata import (
    corrected_metadata,
    corrected_tags,
    corrected_version_file,
    listed_requirements,
)

CUDA = """# GPUs
-r common.txt

--extra-index-url https://example.invalid/whl
torch==2.11.0 # with a reason
flashinfer-python==0.6.14
flashinfer-cubin==0.6.14
nvidia-cutlass-dsl[cu13]==4.6.0
"""
COMMON = "regex # faster\nprotobuf >= 5.29.6, !=6.30.*\nsix>=1.16.0; python_version > '3.11'\n"
FILES = {"requirements/cuda.txt": CUDA, "requirements/common.txt": COMMON}
METADATA = """Metadata-Version: 2.4
Name: vllm
Version: 1.2.3
License-File: LICENSE
Requires-Dist: regex
Requires-Dist: protobuf!=6.30.*,>=5.29.6
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: torch==2.11.0
Requires-Dist: flashinfer-python==0.6.14
Requires-Dist: nvidia-cutlass-dsl[cu13]==4.6.0
Provides-Extra: bench
Requires-Dist: torch; extra == "bench"
Dynamic: requires-dist

Version: 1.2.3 is in the description too.

Requires-Dist: nothing
"""


def listed(cuda: str = CUDA) -> list[str]:
    return listed_requirements({**FILES, "requirements/cuda.txt": cuda})


def corrected(cuda: str) -> tuple[str, list[str]]:
    return corrected_metadata(METADATA, version="1.2.3+x", pristine=listed(), patched=listed(cuda))


def test_requirement_files_are_read_as_setup_py_does() -> None:
    assert listed() == [
        "regex", "protobuf!=6.30.*,>=5.29.6", 'six>=1.16.0; python_version > "3.11"',
        "torch==2.11.0", "flashinfer-python==0.6.14", "flashinfer-cubin==0.6.14",
        "nvidia-cutlass-dsl[cu13]==4.6.0",
    ]  # fmt: skip


def test_only_the_version_changes_when_the_requirements_do_not() -> None:
    text, changes = corrected(CUDA)
    assert text == METADATA.replace("Version: 1.2.3\n", "Version: 1.2.3+x\n", 1)
    assert changes == []


def test_requirements_change_appear_and_go() -> None:
    cuda = CUDA.replace("python==0.6.14", "python==0.6.17").replace(
        "cubin==0.6.14", "cubin==0.6.17"
    )
    cuda = cuda.replace("nvidia-cutlass-dsl[cu13]==4.6.0", "cuda-python==13.3.0")
    text, changes = corrected(cuda)
    lines = text.split("\n")
    at = lines.index("Requires-Dist: torch==2.11.0")
    assert lines[at + 1 : at + 4] == [
        "Requires-Dist: flashinfer-python==0.6.17", "Requires-Dist: cuda-python==13.3.0",
        "Provides-Extra: bench",
    ]  # fmt: skip
    # Upstream's setup.py keeps it out of METADATA; another version of it stays out.
    assert "flashinfer-cubin" not in text
    assert changes == [
        "METADATA: flashinfer-python==0.6.14 is now flashinfer-python==0.6.17",
        "METADATA: nvidia-cutlass-dsl[cu13]==4.6.0 is now left out",
        "METADATA: nothing is now cuda-python==13.3.0",
    ]
    assert text.partition("\n\n")[2] == METADATA.partition("\n\n")[2]


def test_metadata_of_another_source_is_refused() -> None:
    with pytest.raises(CheckFailed) as raised:
        corrected_metadata(METADATA, version="1", pristine=listed()[1:], patched=listed())
    assert raised.value.details == ("regex",)


def test_a_line_that_is_no_requirement() -> None:
    with pytest.raises(CheckFailed, match="requirement files can't be read"):
        listed("torch=2\n")


def test_wheel_gets_one_tag() -> None:
    text = "Wheel-Version: 1.0\nTag: cp38-abi3-linux_aarch64\nTag: x-y-z\nBuild: 1\n"
    assert corrected_tags(text, "cp311-abi3-any").split("\n") == [
        "Wheel-Version: 1.0", "Tag: cp311-abi3-any", "Build: 1", "",
    ]  # fmt: skip


def test_version_file() -> None:
    text = "a\n__version__ = version = '1.2.3'\n__version_tuple__ = version_tuple = (1, 2, 3)\nb\n"
    got = corrected_version_file(text, old="1.2.3", new="1.2.3+sm121.overlay.ab")
    names: dict[str, object] = {"a": 0, "b": 0}
    exec(got, names)
    assert names["__version__"] == "1.2.3+sm121.overlay.ab"
    assert names["version_tuple"] == (1, 2, 3, "sm121.overlay.ab")


@pytest.mark.parametrize("text", ["", "__version__ = version = '1.2.4'\n"])
def test_version_file_of_another_form(text: str) -> None:
    with pytest.raises(CheckFailed, match=r"_version\.py"):
        corrected_version_file(text, old="1.2.3", new="1.2.3+x")
