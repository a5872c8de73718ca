"""One content, one file: the canonical form of a wheel; and taking wheels apart."""

from __future__ import annotations

import time
import zipfile
from pathlib import Path

import pytest

from sm121.compile.wheel import canonical_wheel, component_path, metadata_faults
from sm121.errors import HashMismatch
from sm121.pins.model import FamilyPin, Stack
from sm121.toolkit.unpack import unpack, unpack_all
from support.wheels import make_wheel

FILES = {"vllm/b.py": "two", "vllm/a.so": b"\x7fELF", "bin/tool": "#!/bin/sh\n", "vllm/c.py": ""}
EPOCH = 1784975693  # 2026-07-25 10:34:53 UTC


def canonical(folder: Path, epoch: int = EPOCH, **how) -> Path:
    wheel = make_wheel(folder / "in", FILES, executable=["bin/tool"], **how)
    canonical_wheel(wheel, folder / "out.whl", epoch=epoch)
    return folder / "out.whl"


def test_order_times_and_umask_do_not_count(tmp_path: Path) -> None:
    one = canonical(tmp_path / "1")
    two = canonical(tmp_path / "2", order=-1, date=(2031, 5, 6, 7, 8, 10), umask=0o077)
    assert (tmp_path / "1/in").is_dir()
    inputs = [next((tmp_path / n / "in").iterdir()).read_bytes() for n in "12"]
    assert inputs[0] != inputs[1]
    assert one.read_bytes() == two.read_bytes()


def test_time_zone_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = canonical(tmp_path / "1").read_bytes()
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        assert canonical(tmp_path / "2").read_bytes() == one
    finally:
        monkeypatch.undo()
        time.tzset()


def test_content_does_count(tmp_path: Path) -> None:
    one = canonical(tmp_path / "1").read_bytes()
    FILES_CHANGED = {**FILES, "vllm/b.py": "twO"}
    wheel = make_wheel(tmp_path / "in", FILES_CHANGED, executable=["bin/tool"])
    canonical_wheel(wheel, tmp_path / "out.whl", epoch=EPOCH)
    assert (tmp_path / "out.whl").read_bytes() != one


def test_canonical_of_canonical_is_itself(tmp_path: Path) -> None:
    out = canonical(tmp_path)
    canonical_wheel(out, tmp_path / "again.whl", epoch=EPOCH)
    assert (tmp_path / "again.whl").read_bytes() == out.read_bytes()


def test_record_is_last_and_unchanged_and_so_is_every_member(tmp_path: Path) -> None:
    out = canonical(tmp_path, order=-1)
    with zipfile.ZipFile(next((tmp_path / "in").iterdir())) as before, zipfile.ZipFile(out) as now:
        assert now.testzip() is None
        assert set(now.namelist()) == set(before.namelist())
        assert now.namelist()[-1] == "tiny-1.0.dist-info/RECORD"
        assert [n for n in now.namelist() if ".dist-info" in n] == now.namelist()[-3:]
        for name in now.namelist():
            assert now.read(name) == before.read(name)


def test_executable_bit_is_kept_and_no_other(tmp_path: Path) -> None:
    with zipfile.ZipFile(canonical(tmp_path, umask=0o077)) as archive:
        modes = {i.filename: i.external_attr >> 16 for i in archive.infolist()}
    assert modes["bin/tool"] == 0o100755
    assert {m for n, m in modes.items() if n != "bin/tool"} == {0o100644}


@pytest.mark.parametrize(
    ("epoch", "date"),
    [(EPOCH, (2026, 7, 25, 10, 34, 52)), (0, (1980, 1, 1, 0, 0, 0))],
)
def test_every_member_has_the_release_time(tmp_path: Path, epoch: int, date: tuple) -> None:
    with zipfile.ZipFile(canonical(tmp_path, epoch)) as archive:
        assert {i.date_time for i in archive.infolist()} == {date}


# --- METADATA -----------------------------------------------------------------------


FAMILY = {
    "torch": FamilyPin(version="2.11.0", reason="-"),
    "nvidia-cutlass-dsl": FamilyPin(version="4.5.1", reason="-", extras=("cu13",)),
    "triton": FamilyPin(version="3.6.0", reason="-"),
}
GOOD = ["torch==2.11.0", "Nvidia_Cutlass.DSL[cu13]>=4.5", "numpy>=2", 'triton==1; extra == "x"']


def faults_of(*requirements: str) -> list[str]:
    lines = "".join(f"Requires-Dist: {line}\n" for line in requirements)
    metadata = f"Metadata-Version: 2.1\nName: vllm\n{lines}\nRequires-Dist: body==1\n"
    return metadata_faults(metadata, FAMILY, ["torch", "nvidia-cutlass-dsl"])


def test_metadata_that_allows_the_pins_is_right() -> None:
    assert faults_of(*GOOD) == []


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("torch==2.11.0", "torch==2.12.0", "asks for torch==2.12.0, the pins for torch==2.11.0"),
        ("torch==2.11.0", "torch===2.10.0", "the pins for torch==2.11.0"),
        ("torch==2.11.0", "torch>2.11", "the pins for torch==2.11.0"),
        ("torch==2.11.0", "numpy", "does not ask for torch"),
        ("Nvidia_Cutlass.DSL[cu13]>=4.5", "nvidia-cutlass-dsl==4.5.1", "without [cu13]"),
    ],
)
def test_metadata_that_contradicts_the_pins_is_a_fault(good: str, bad: str, said: str) -> None:
    (fault,) = faults_of(*(bad if line == good else line for line in GOOD))
    assert said in fault


def test_every_component_of_the_stack_has_a_place_of_its_own(stack: Stack) -> None:
    places = [component_path(c) for c in stack.components]
    assert len(set(places)) == len(places)
    assert component_path("spinloop") == "vllm/spinloop.abi3.so"


# --- unpacking ----------------------------------------------------------------------


def test_unpack_renames_chooses_and_keeps_executable_bits(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"p/bin/x": "1", "p/lib/y": "2", "q": "3"}, executable=["p/bin/x"])
    written = unpack(wheel, tmp_path / "out", lambda n: n[2:] if n.startswith("p/") else None)
    assert sorted(written) == ["bin/x", "lib/y"]
    assert (tmp_path / "out/bin/x").stat().st_mode & 0o777 == 0o755
    assert not (tmp_path / "out/lib/y").stat().st_mode & 0o111
    assert not (tmp_path / "out/q").exists()


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil"])
def test_member_outside_is_refused(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path / "in", {name: "x"})
    with pytest.raises(HashMismatch, match="evil"):
        unpack(wheel, tmp_path / "out", lambda n: n)
    assert not (tmp_path / "evil").exists()


def test_cut_off_wheel_is_damaged(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "in", {"a": "x" * 1000})
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(HashMismatch, match="is damaged"):
        unpack(wheel, tmp_path / "out", lambda n: n)


def test_wheel_with_a_flipped_bit_is_damaged(tmp_path: Path) -> None:
    """A bad CRC is only seen while reading the member."""
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("a", "unmistakable")
    wheel.write_bytes(wheel.read_bytes().replace(b"unmistakable", b"unmistakablE"))
    with pytest.raises(HashMismatch, match="is damaged"):
        unpack_all([wheel], tmp_path / "out", lambda n: n)
