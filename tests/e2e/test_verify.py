"""The smoke wheelhouse is verified at the end of its build; made worse, it fails for that reason.

GPU code and mixed CuTeDSL files, which this profile does not have, are made worse in
tests/integration/abi/test_made_worse.py.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from support.checkouts import Checkout

pytestmark = pytest.mark.timeout(900)
SPINLOOP, FS_IO, CUMEM = (
    f"vllm/{name}.abi3.so" for name in ("spinloop", "fs_io_C", "cumem_allocator")
)
Edit = Callable[[bytes], bytes | None]


def verdict(checkout: Checkout, *arguments: str, code: int = 0) -> tuple[dict, str]:
    """Run the verb; returns the JSON report and what a person sees."""
    out = checkout.root / "build/e2e-report.json"
    said = checkout.run("verify-abi", *arguments, "--no-run", f"--json={out}", code=code)
    report = json.loads(out.read_text())
    schema = json.loads((checkout.root / "src/sm121/abi/report.schema.json").read_text())
    jsonschema.validate(report, schema)
    return report, said


def test_the_built_wheelhouse_passes(built: Checkout) -> None:
    report, said = verdict(built)
    assert report["result"] == "pass"
    assert "PASS: every binary fits." in said
    (wheel,) = report["wheels"]
    assert (wheel["binaries"], wheel["faults"]) == (3, 0)
    assert wheel["symbols"] > 50
    torch = built.pins.family["torch"].version
    # torch and its libraries were in the cache, so everything was really looked up.
    assert any(name.startswith(f"torch-{torch}-") for name in report["against"])
    assert [n["check"] for n in report["not_run"]] == ["imports"]
    components = {c["component"] for c in report["components"] if c["expected"] == "required"}
    assert components == {"spinloop", "fs_io_C", "cumem_allocator"}


def test_the_build_left_its_report(built: Checkout) -> None:
    name = f"{built.stack}-linux-aarch64-smoke"
    report = json.loads((built.root / f"build/reports/{name}.json").read_text())
    assert report["result"] == "pass"
    assert "<script" not in (built.root / f"build/reports/{name}.html").read_text()
    state = json.loads((built.root / "build/state.json").read_text())
    summary = state["stages"][f"verify/{name}"]["result"]["summary"]
    assert summary.startswith("every binary fits (3 files, ")


def worse(built: Checkout, folder: Path, edits: dict[str, Edit]) -> Path:
    """A copy of the wheelhouse with some files of the wheel edited, or left out (None)."""
    folder.mkdir()
    copy = folder / built.wheel.name
    with (
        zipfile.ZipFile(built.wheel) as source,
        zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target,
    ):
        for member in source.infolist():
            data = source.read(member)
            edit = edits.get(member.filename)
            if edit is None or (data := edit(data)) is not None:
                target.writestr(member, data)
    manifest = json.loads((built.root / "wheelhouse/manifest.json").read_text())
    manifest["wheels"][0]["sha256"] = hashlib.sha256(copy.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def replace(old: bytes, new: bytes) -> Edit:
    def edit(data: bytes) -> bytes:
        assert len(old) == len(new)
        assert data.count(old) >= 1
        return data.replace(old, new)

    return edit


def machine(number: int) -> Edit:
    return lambda data: data[:18] + struct.pack("<H", number) + data[20:]


@pytest.mark.parametrize(
    ("path", "edit", "kind", "words"),
    [
        # What an empty driver stub does: NEEDED libcuda.so.1 is lost (another name for a tag
        # of the same size is a library that is there anyway).
        (CUMEM, replace(b"\0libcuda.so.1\0", b"\0libdl.so.2\0\0\0"), "symbol", "(the driver) should have it"),
        (CUMEM, replace(b"\0cuMemRelease\0", b"\0cuMemReleasf\0"), "symbol", "cuMemReleasf"),
        (FS_IO, lambda data: data[: len(data) // 2], "damaged", "cut off"),
        (SPINLOOP, machine(62), "machine", "x86_64"),
        (SPINLOOP, lambda _: None, "component", "component spinloop is missing"),
        (
            "vllm/utils/nccl.py",
            replace(b"allow_cross_node_cudagraphs(", b"allow_cross_node_cudagraphx("),
            "patch", "nccl-guard",
        ),
    ],
    ids=["driver-stub", "symbol", "cut", "machine", "component", "patch"],
)  # fmt: skip
def test_made_worse(
    built: Checkout, tmp_path: Path, path: str, edit: Edit, kind: str, words: str
) -> None:
    folder = worse(built, tmp_path / "house", {path: edit})
    report, said = verdict(built, str(folder), code=1)
    faults = [f for f in report["findings"] if f["severity"] == "fault" and f["kind"] == kind]
    assert faults, report["findings"]
    assert words in " ".join(f["text"] for f in faults)
    assert words in said
    assert said.rindex("error: verify-abi found") > said.rindex("FAIL: ")


def test_a_wheel_that_was_altered_after_the_build(built: Checkout, tmp_path: Path) -> None:
    folder = worse(built, tmp_path / "house", {"vllm/__init__.py": lambda data: data + b"\n"})
    manifest = (built.root / "wheelhouse/manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest)
    report, _ = verdict(built, str(folder), code=1)
    assert [f["kind"] for f in report["findings"] if f["severity"] == "fault"] == ["archive"]
