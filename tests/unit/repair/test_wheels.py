"""Repair of wheels: metadata only, binaries byte for byte, the same result anywhere."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm121.errors import FamilyFault, WheelFault
from sm121.lock.pylock import LockedFile
from sm121.pins.model import Stack
from sm121.repair.wheel import (
    installed_path,
    parse_record,
    read_wheel,
    record_digest,
    rewrite_wheel,
)
from sm121.repair.wheels import plan_repairs, write_repair
from support.stacks import minimal
from support.wheels import make_wheel

BINARY = bytes(range(256)) * 500


def stack(**changes: object) -> Stack:
    data = minimal()
    data["family"]["nvidia-nccl-cu13"] = {"version": "2.30.4", "reason": "deadlock"}
    data["overrides"] = {"nvidia-nccl-cu13": "torch pins another"}
    return Stack.model_validate({**data, **changes})


def locked(wheel: Path) -> LockedFile:
    read = read_wheel(wheel)
    return LockedFile(
        distribution=read.distribution, version=read.version, filename=wheel.name,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), size=wheel.stat().st_size,
    )  # fmt: skip


def repairs(pins: Stack, *wheels: Path) -> list:
    files = {f.distribution: f for f in map(locked, wheels)}
    return plan_repairs(pins, files, {read_wheel(w).distribution: read_wheel(w) for w in wheels})


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    return make_wheel(
        tmp_path, {"torch/lib/libtorch.so": BINARY, "torch/ab.py": "x = 1\n"},
        name="torch", version="2.11.0", tag="cp312-cp312-manylinux_2_28_aarch64",
        requires=['nvidia-nccl-cu13==2.28.9; platform_system == "Linux"', "sympy>=1.13"],
    )  # fmt: skip


@pytest.fixture
def nccl(tmp_path: Path) -> Path:
    return make_wheel(tmp_path, {"nvidia/nccl.so": b"1"}, name="nvidia_nccl_cu13", version="2.30.4")


def stored(wheel: Path, member: str) -> bytes:
    """A member's bytes as they lie in the archive, compressed."""
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo(member)
    data = wheel.read_bytes()[info.header_offset :]
    name_size, extra_size = struct.unpack("<HH", data[26:30])
    start = 30 + name_size + extra_size
    return data[start : start + info.compress_size]


def test_torch_asks_for_the_pinned_nccl_and_nothing_else_changes(
    tmp_path: Path, torch: Path, nccl: Path
) -> None:
    """cases.md 10."""
    (repair,) = repairs(stack(), torch, nccl)
    assert repair.changes == (
        "METADATA: Requires-Dist nvidia-nccl-cu13==2.28.9 is now nvidia-nccl-cu13==2.30.4",
    )
    output = tmp_path / repair.filename
    write_repair(repair, torch, output)
    assert output.name == "torch-2.11.0-1sm121-cp312-cp312-manylinux_2_28_aarch64.whl"
    before, after = read_wheel(torch), read_wheel(output)
    assert after.metadata == before.metadata.replace("==2.28.9;", "==2.30.4;")
    assert "Build: 1sm121\n" in after.tags
    for member in ("torch/lib/libtorch.so", "torch/ab.py"):
        assert stored(output, member) == stored(torch, member)
        assert after.record[member] == before.record[member]
    with zipfile.ZipFile(output) as archive:
        assert archive.testzip() is None
        note = json.loads(archive.read("torch-2.11.0.dist-info/sm121-repair.json"))
        for name, entry in after.record.items():
            assert entry.digest == record_digest(archive.read(name))
            assert entry.size == archive.getinfo(name).file_size
        assert set(archive.namelist()) == {*after.record, "torch-2.11.0.dist-info/RECORD"}
    assert note["original"]["sha256"] == locked(torch).sha256
    assert "not for publishing" in note["notice"]


def test_result_is_the_same_anywhere(tmp_path: Path, torch: Path, nccl: Path) -> None:
    (repair,) = repairs(stack(), torch, nccl)
    digests = set()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        write_repair(repair, torch, folder / repair.filename)
        digests.add(hashlib.sha256((folder / repair.filename).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_requirement_that_is_met_needs_no_repair(tmp_path: Path, nccl: Path) -> None:
    other = make_wheel(tmp_path, {}, name="other", requires=["nvidia-nccl-cu13>=2.28"])
    assert repairs(stack(), other, nccl) == []


def test_requirement_that_is_not_overruled_is_left_alone(tmp_path: Path, nccl: Path) -> None:
    """Only what stack.toml overrides may be rewritten; the rest has to be a fault."""
    other = make_wheel(tmp_path, {}, name="other", requires=["sympy==1.0"])
    sympy = make_wheel(tmp_path, {}, name="sympy", version="2.0")
    assert repairs(stack(), other, sympy, nccl) == []


def test_line_ends_of_metadata_stay(tmp_path: Path, nccl: Path) -> None:
    plain = make_wheel(
        tmp_path / "lf", {}, name="windows", requires=["nvidia-nccl-cu13==1", 'x; extra == "y"']
    )
    text = (
        read_wheel(plain).metadata.replace("\n", "\r\n")
        + "\r\nRequires-Dist: nvidia-nccl-cu13==1\r\n"
    )
    wheel = tmp_path / plain.name
    rewrite_wheel(plain, wheel, edits={"windows-1.0.dist-info/METADATA": text.encode()})
    (repair,) = repairs(stack(), wheel, nccl)
    changed = repair.edits["windows-1.0.dist-info/METADATA"].decode()
    # The second one is in the description, behind an empty line.
    assert changed == text.replace("nvidia-nccl-cu13==1\r", "nvidia-nccl-cu13==2.30.4\r", 1)


def test_a_tag_that_no_installer_knows_is_the_file_names(tmp_path: Path) -> None:
    """nvidia-cusparselt-cu13 0.8.0: `uv pip check` refuses what it installed, on aarch64."""
    plain = make_wheel(
        tmp_path, {"nvidia/x.so": BINARY}, name="sparse", tag="py3-none-manylinux2014_aarch64"
    )
    odd = read_wheel(plain).tags.replace("manylinux2014_aarch64", "manylinux2014_sbsa")
    wheel = tmp_path / "odd" / plain.name
    wheel.parent.mkdir()
    rewrite_wheel(plain, wheel, edits={"sparse-1.0.dist-info/WHEEL": odd.encode()})
    (repair,) = repairs(stack(overrides={}), wheel)
    assert repair.changes == (
        "WHEEL: Tag py3-none-manylinux2014_sbsa is now py3-none-manylinux2014_aarch64",
    )
    write_repair(repair, wheel, tmp_path / repair.filename)
    tags = read_wheel(tmp_path / repair.filename).tags
    assert tags.replace("Build: 1sm121\n", "") == read_wheel(plain).tags


def test_one_common_tag_is_enough(tmp_path: Path) -> None:
    plain = make_wheel(tmp_path, {}, name="both", tag="py3-none-manylinux2014_aarch64")
    more = read_wheel(plain).tags + "Tag: py3-none-manylinux2014_sbsa\n"
    wheel = tmp_path / "more" / plain.name
    wheel.parent.mkdir()
    rewrite_wheel(plain, wheel, edits={"both-1.0.dist-info/WHEEL": more.encode()})
    assert repairs(stack(overrides={}), wheel) == []


def yielding(tmp_path: Path) -> tuple[Path, Path]:
    base = make_wheel(
        tmp_path, {"d/same.py": "same", "d/other.so": b"12", "d/LICENSE": "mine"},
        name="libs_base", version="4.5.1",
    )  # fmt: skip
    cu13 = make_wheel(
        tmp_path, {"d/same.py": "same", "d/other.so": b"13", "d/more.py": ""},
        name="libs_cu13", version="4.5.1",
    )  # fmt: skip
    return base, cu13


def test_yielding_wheel_keeps_only_what_is_its_own(tmp_path: Path) -> None:
    """cases.md 7: with two owners the installer's order would decide."""
    base, cu13 = yielding(tmp_path)
    pins = stack(overrides={}, yields={"libs-base": {"to": "libs-cu13", "reason": "overlap"}})
    (repair,) = repairs(pins, base, cu13)
    assert "2 files left out that libs-cu13 owns too (1 of them" in repair.changes[0]
    write_repair(repair, base, tmp_path / repair.filename)
    mine, theirs = read_wheel(tmp_path / repair.filename), read_wheel(cu13)
    assert "d/LICENSE" in mine.record
    assert mine.installed().keys().isdisjoint(theirs.installed())


def test_yielding_to_an_absent_wheel_is_refused(tmp_path: Path) -> None:
    base, _ = yielding(tmp_path)
    pins = stack(overrides={}, yields={"libs-base": {"to": "libs-cu13", "reason": "overlap"}})
    with pytest.raises(FamilyFault, match="libs-cu13"):
        repairs(pins, base)


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 not a zip"])
def test_damaged_wheel_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "x-1-py3-none-any.whl").write_bytes(damage)
    with pytest.raises(WheelFault, match=r"x-1-py3-none-any\.whl"):
        read_wheel(tmp_path / "x-1-py3-none-any.whl")


@pytest.mark.parametrize(
    ("member", "path"),
    [
        ("a/b.py", ("a/b.py", False)),
        ("a-1.data/purelib/a.py", ("a.py", False)),
        ("a-1.data/platlib/a.so", ("a.so", False)),
        ("a-1.data/scripts/run", ("../../../bin/run", True)),
        ("a-1.data/data/share/x", ("../../../share/x", False)),
        ("a-1.data/headers/a.h", ("../../../include/site/a/a.h", False)),
    ],
)
def test_where_members_are_installed(member: str, path: tuple[str, bool]) -> None:
    assert installed_path(member, "a") == path


NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=5, unique=True), content=st.binary(max_size=200))
def test_any_member_survives_a_rewrite(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], content: bytes
) -> None:
    """Names with commas, quotes and other letters; any content."""
    folder = tmp_path_factory.mktemp("any")
    edits = {f"p/{name.replace('/', '_')}": content for name in names}
    plain = make_wheel(folder / "in", {"p/__init__.py": ""})
    rewrite_wheel(plain, folder / plain.name, edits=edits)
    again = folder / "again" / plain.name
    again.parent.mkdir()
    rewrite_wheel(folder / plain.name, again, edits={})
    with zipfile.ZipFile(again) as archive:
        assert all(archive.read(name) == content for name in edits)
        record = parse_record(archive.read("tiny-1.0.dist-info/RECORD").decode())
    assert all(record[name].digest == record_digest(content) for name in edits)
