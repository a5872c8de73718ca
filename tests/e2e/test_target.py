"""verify-target on the smoke wheelhouse of the same run, by an emulated Python of aarch64.

What else only running shows: tests/integration/target and tests/integration/abi/test_emulated.py.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import jsonschema
import pytest

from support.checkouts import Checkout

pytestmark = pytest.mark.timeout(1800)


def verdict(checkout: Checkout, *arguments: str, code: int = 0) -> dict:
    out = checkout.root / "build/e2e-target.json"
    checkout.run("verify-target", *arguments, f"--json={out}", code=code)
    report = json.loads(out.read_text())
    schema = json.loads((checkout.root / "src/sm121/target/target.schema.json").read_text())
    jsonschema.validate(report, schema)
    return report


def test_the_built_wheelhouse_runs(built: Checkout) -> None:
    report = verdict(built, "--quick", "--fetch")
    rows = {row["step"]: row for row in report["rows"]}
    assert {name: (row["verdict"], row["how"]) for name, row in rows.items() if row["how"] != "not run"} == {
        "checksums": ("pass", "static"), "binaries": ("pass", "static"),
        "extensions": ("pass", "emulated"), "torchvision": ("pass", "emulated"),
    }  # fmt: skip
    assert rows["extensions"]["facts"] == dict.fromkeys(
        ("vllm.cumem_allocator", "vllm.fs_io_C", "vllm.spinloop"), "pass"
    )
    assert "no install.py" in rows["install"]["text"]
    machine = report["machine"]
    assert (machine["how"], machine["machine"], machine["driver"]) == (
        "emulated",
        "aarch64",
        "stub",
    )
    assert machine["python"].startswith("3.11.")
    assert any("CPython 3.12" in line for line in report["unproved"])


def test_one_byte_of_one_so_and_nothing_runs(built: Checkout, tmp_path: Path) -> None:
    house = tmp_path / "house"
    shutil.copytree(built.root / "wheelhouse", house)
    wheel = house / built.wheel.name
    with zipfile.ZipFile(wheel) as archive:
        member = archive.getinfo("vllm/spinloop.abi3.so")
        where = member.header_offset + 30 + len(member.filename) + member.file_size // 2
    data = bytearray(wheel.read_bytes())
    data[where] ^= 1
    wheel.write_bytes(data)
    report = verdict(built, str(house), code=1)
    assert [r["step"] for r in report["rows"] if r["verdict"] == "fail"] == ["checksums"]
    assert {r["verdict"] for r in report["rows"][1:]} == {"not run"}
    assert report["machine"] is None
