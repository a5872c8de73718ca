"""Two NCCL builds with equal version strings are told apart. cases.md 11."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm121.repair.identity import identify
from support.wheels import compile_library

SOURCE = 'const char banner[] = "NCCL version 2.30.4+cuda13.0";\n'

pytestmark = pytest.mark.compiler


def test_version_and_build_id(tmp_path: Path) -> None:
    found = []
    for name, build in (("one", "0x1111"), ("two", "0x2222")):
        library = tmp_path / f"{name}.so"
        compile_library(library, SOURCE, flags=[f"-Wl,--build-id={build}"])
        found.append(identify(library))
    assert found == ["2.30.4+cuda13.0, build id 1111", "2.30.4+cuda13.0, build id 2222"]


def test_what_is_no_library_is_said_to_be_unreadable(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"\x7fELF cut")
    assert identify(tmp_path / "x.so").startswith("unreadable")
