"""What is remembered, and what a cubin is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sm121.abi.source import Malformed
from sm121.jit import results
from sm121.jit.cubin import Code, Cubin, read_cubin
from sm121.jit.drive import Told
from sm121.jit.results import (
    Results,
    environment_identity,
    key_of,
    read_cubins,
    tree_identity,
    variants_of,
)
from support.jit import record


def test_results_outlive_the_process_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    memory = Results(file)
    memory.put("k", Told(records=[{"a": 1}], error="failed"))
    memory.save(["k"])
    again = Results(file).find("k")
    assert again == Told(records=[{"a": 1}], error="failed")
    file.write_text("{")
    assert Results(file).find("k") is None


def test_a_run_of_one_recipe_forgets_no_other(tmp_path: Path) -> None:
    memory = Results(tmp_path / "results.json")
    for number in range(400):
        memory.put(str(number), Told())
    memory.save(["0"])
    again = Results(tmp_path / "results.json")
    assert again.find("0") is not None  # used
    assert again.find("399") is not None  # of the newest
    assert again.find("1") is None


@pytest.mark.parametrize("error", ["timed out after 5 s", "killed by signal 9 (Killed)"])
def test_what_may_end_otherwise_next_time_is_not_kept(tmp_path: Path, error: str) -> None:
    memory = Results(tmp_path / "results.json")
    memory.put("k", Told(error=error))
    assert memory.find("k") is None


@pytest.mark.parametrize(
    "said",
    [
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "OSError: [Errno 28] No space left on device",
        "OSError: [Errno 12] Cannot allocate memory: 'nvcc'",
    ],
)
def test_nor_is_a_compiler_that_this_machine_ended(tmp_path: Path, said: str) -> None:
    memory = Results(tmp_path / "results.json")
    memory.put(
        "k", Told(records=[{"kernel": "a"}, {"kernel": "b", "error": f"nvcc failed\n{said}"}])
    )
    memory.put("l", Told(records=[{"kernel": "b", "error": "error: no such instruction"}]))
    assert memory.find("k") is None
    assert memory.find("l") is not None


def test_host_code_that_crashes_is_kept_and_one_that_the_machine_ended_is_not(
    tmp_path: Path,
) -> None:
    """As launches.py says it: to compile the module again takes minutes and changes nothing."""
    memory = Results(tmp_path / "results.json")
    said = "RuntimeError: sampling.so: its host code was killed by signal"
    memory.put("crash", Told(records=[{"kernel": "a"}], error=f"{said} 11 (Segmentation fault)\n"))
    memory.put("memory", Told(records=[{"kernel": "a"}], error=f"{said} 9 (Killed)\n"))
    assert memory.find("crash") is not None
    assert memory.find("memory") is None


@pytest.mark.parametrize("name", ["work.py", "gb10.c"])
def test_code_that_runs_inside_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The driver's stand-in too: by its answers DeepGEMM chooses its tiles."""
    shutil.copytree(results.INSIDE, tmp_path / "inside")
    monkeypatch.setattr(results, "INSIDE", tmp_path / "inside")
    before = results.code_identity()
    with (tmp_path / "inside" / name).open("a") as file:
        file.write("\n")
    assert results.code_identity() != before


def test_every_input_is_in_the_key() -> None:
    inputs = {"tree": "a", "environment": "b"}
    keys = {
        key_of(recipe="r", mode="triton", inputs=inputs),
        key_of(recipe="s", mode="triton", inputs=inputs),
        key_of(recipe="r", mode="cutedsl", inputs=inputs),
        key_of(recipe="r", mode="triton", inputs={**inputs, "tree": "c"}),
        key_of(recipe="r", mode="triton", inputs={**inputs, "environment": "c"}),
    }
    assert len(keys) == 5


def test_an_environment_with_another_compiler_is_another(tmp_path: Path) -> None:
    for name in ("triton", "tilelang", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.so").write_text("1")
    before = environment_identity(tmp_path)
    os.utime(tmp_path / "numpy/a.so", (1, 1))
    assert environment_identity(tmp_path) == before
    os.utime(tmp_path / "tilelang/a.so", (1, 1))
    assert environment_identity(tmp_path) != before


def test_a_tree_with_another_header_is_another(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("1")
    before = tree_identity(tmp_path)
    (tmp_path / "note.txt").write_text("1")
    assert tree_identity(tmp_path) == before
    (tmp_path / "a.cuh").write_text("2")
    assert tree_identity(tmp_path) != before


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02" + bytes(60), b"MZ" + bytes(200)])
def test_what_is_no_cubin_is_said(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(Malformed):
        read_cubin(data)
    (tmp_path / "x.cubin").write_bytes(data)
    told = Told(records=[{"cubin": str(tmp_path / "x.cubin")}])
    read_cubins(told)
    assert told.records[0]["error"].startswith("the cubin can't be read")


@pytest.mark.parametrize("family", ["flashinfer", "tilelang"])
def test_a_launch_of_what_was_not_compiled_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """FlashInfer's launches are of all sources of the module, TileLang's of the one cubin."""
    cubins = [tmp_path / "a", tmp_path / "b"]
    for file in cubins:
        file.write_text(file.name)
    # What a cubin is made of is test_cubin.py's; here its kernel is called as its content.
    monkeypatch.setattr(
        results, "read_cubin",
        lambda data: Cubin(sm=121, kernels=(Code(name=data.decode(), registers=8, threads=32, shared=0, stack=0),)),
    )  # fmt: skip

    def told(*launches: str) -> list[str]:
        given = {name: {"threads": 32, "dynamic_shared": 0} for name in launches}
        some = [{"family": family, "cubin": str(file), "launches": dict(given)} for file in cubins]
        one = Told(records=some)
        read_cubins(one)
        return [record.get("error", "") for record in one.records]

    assert told() == ["", ""]
    lost = "launched, and in no cubin that was compiled: "
    if family == "flashinfer":
        assert told("a", "b") == ["", ""]
        assert told("a", "c") == [f"{lost}c", f"{lost}c"]
    else:
        assert told("a") == ["", f"{lost}a"]
    cubins[1].unlink()  # which is an error of its own, and then names may be missing
    assert [error.partition(":")[0] for error in told("a", "b")][1] == "the cubin can't be read"
    assert "c" not in told("a")[0]


def test_spills_are_what_the_assembler_said_or_known_to_be_none() -> None:
    said = """ptxas info    : Function properties for k
    10272 bytes stack frame, 20520 bytes spill stores, 20520 bytes spill loads
ptxas info    : Function properties for other
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""
    one = record("k", "triton", ptxas=said)
    one["codes"][0]["stack"] = 10272
    (variant,) = variants_of(one)
    assert (variant.spills, variant.stack) == (41040, 10272)
    (silent,) = variants_of(record("k", "cutedsl"))
    assert silent.spills == 0  # no stack frame, so nothing was spilt
    one["ptxas"] = ""
    assert variants_of(one)[0].spills == -1
    one["ptxas"] = said
    one["codes"].append({**one["codes"][0], "name": "other"})
    assert [(v.variant["entry"], v.spills) for v in variants_of(one)] == [
        ("k", 41040),
        ("other", 8),
    ]
