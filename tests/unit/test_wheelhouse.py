"""The wheelhouse's manifest, sums and guard."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jsonschema
import pytest
from pydantic import ValidationError

from sm121.commands.build import first_start_line
from sm121.context import Context
from sm121.errors import CheckFailed
from sm121.jit.last import Source, keep_last, last_file
from sm121.jit.report import FirstStart, Report
from sm121.pins.load import load_stack
from sm121.wheelhouse.manifest import SCHEMA_FILE, Manifest, load_manifest, render, schema_text
from sm121.wheelhouse.stage import (
    WheelhouseStage,
    guard_foreign,
    verify_sums,
    write_sums,
)
from support.stacks import COMMIT, SHA256, minimal, write_stack

TREE = "5" * 40
RESULTS = {
    "source": {"commit": "1" * 40, "provider": "sdist", "reason": "--offline"},
    "patch": {
        "commit": "2" * 40,
        "tree": TREE,
        "patches": [
            {
                "name": "repair", "subject": "[Bugfix] Repair", "status": "applied",
                "upstream_status": "Pending", "commit": "3" * 40, "patch_id": "4" * 40, "offset": 0,
            }
        ],
    },
    "environment": {"python": "3.12.1", "tools": {"cmake": "3.31"}},
    "toolkit": {"native": False, "compiler": "aarch64-linux-gnu-g++ 12.2.0"},
    "compile": {
        "wheel": "vllm-1.2.3+sm121.smoke.1a2b3c4d-cp311-abi3-linux_aarch64.whl",
        "sha256": "x",
        "libraries": {
            "vllm/spinloop.abi3.so": {"machine": "aarch64", "needed": ["libc.so.6"]}
        },
    },
}  # fmt: skip


@pytest.fixture
def ready(small: Context) -> Context:
    """A checkout in which everything before the wheelhouse is done."""
    series = small.layout.patches / "vllm/1.2.3"
    (series / "repair.patch").write_text("the patch\n")
    (series / "series").write_text("repair.patch\n")
    (small.layout.pins / "1.2.3/pylock.linux-aarch64-cp312.toml").write_text("the lock\n")
    dist = small.layout.build / "dist/1.2.3-linux-aarch64-smoke"
    dist.mkdir(parents=True)
    (dist / RESULTS["compile"]["wheel"]).write_bytes(b"the wheel")
    (dist / RESULTS["compile"]["wheel"]).chmod(0o600)
    small.layout.wheelhouse.mkdir()
    (small.layout.wheelhouse / "README.md").write_text("readme\n")
    return small


def gather(context: Context) -> Path:
    WheelhouseStage().run(context, RESULTS)
    return context.layout.wheelhouse


def test_committed_schema_is_the_models() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


def test_manifest_is_valid_by_the_published_schema(ready: Context) -> None:
    data = json.loads((gather(ready) / "manifest.json").read_text())
    jsonschema.validate(data, json.loads(SCHEMA_FILE.read_text()))
    assert data["schema_version"] == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update(extra=1),
        lambda d: d.pop("patched_commit"),
        lambda d: d.update(schema_version=2),
        lambda d: d["wheels"][0].update(sha256="short"),
        lambda d: d["checks"][0].update(verdict="perhaps"),
    ],
)
def test_schema_and_model_refuse_the_same_faults(ready: Context, edit) -> None:
    data = json.loads((gather(ready) / "manifest.json").read_text())
    edit(data)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, json.loads(SCHEMA_FILE.read_text()))
    with pytest.raises(ValidationError):
        Manifest.model_validate(data)


def test_manifest_says_what_is_in_and_what_it_was_made_of(ready: Context) -> None:
    manifest = load_manifest(gather(ready))
    assert manifest is not None
    assert manifest.partial
    assert manifest.components.built == ("spinloop",)
    assert manifest.components.left_out == {
        "fs_io_C": "not in profile smoke", "_fa3": "for sm_90",
    }  # fmt: skip
    (patch,) = manifest.patches
    assert (patch.name, patch.status, patch.upstream_status) == ("repair", "applied", "Pending")
    assert patch.sha256 == hashlib.sha256(b"the patch\n").hexdigest()
    assert (manifest.base.provider, manifest.base.provider_reason) == ("sdist", "--offline")
    assert (manifest.base.commit, manifest.base.sdist_sha256) == (COMMIT, SHA256)
    (wheel,) = manifest.wheels
    assert wheel.sha256 == hashlib.sha256(b"the wheel").hexdigest()
    assert (wheel.version, wheel.size, wheel.origin) == ("1.2.3+sm121.smoke.1a2b3c4d", 9, "built")
    assert wheel.libraries["vllm/spinloop.abi3.so"].needed == ("libc.so.6",)
    assert manifest.lock_sha256 == {
        "pylock.linux-aarch64-cp312.toml": hashlib.sha256(b"the lock\n").hexdigest()
    }
    assert manifest.tools["build"] == "cross"


def test_manifest_says_what_a_node_compiles_if_verify_jit_passed_on_this_source(
    ready: Context,
) -> None:
    def kept(result: Literal["pass", "fail"], tree: str) -> Manifest:
        families = tuple(
            FirstStart(
                family=family, kernels=2, compilations=3, seconds=60.5, cache="~/.cache",
                shipped=family == "flashinfer",
            )
            for family in ("flashinfer", "triton")
        )  # fmt: skip
        report = Report(
            result=result, stack="1.2.3", target="sm_121a", tree="", versions={}, rows=(),
            first_start=families,
        )  # fmt: skip
        file = last_file(ready.layout.build, "1.2.3")
        keep_last(report, file, source=Source(commit="", tree=tree))
        manifest = load_manifest(gather(ready))
        assert manifest
        return manifest

    for manifest in (load_manifest(gather(ready)), kept("pass", "other"), kept("fail", TREE)):
        assert manifest
        assert manifest.first_start is None
        assert "verify-jit` has not passed" in first_start_line(manifest.first_start)
    inputs = WheelhouseStage().inputs(ready, RESULTS)
    found = kept("pass", TREE).first_start
    assert found
    assert [one.family for one in found] == ["flashinfer", "triton"]
    assert (
        first_start_line(found)
        == "a node compiles 3 of flashinfer, 3 of triton; one after another 2 min 01 s where verify-jit ran"
    )
    assert first_start_line(()) == "a node compiles nothing itself"
    # So that the next build writes it.
    assert WheelhouseStage().inputs(ready, RESULTS) != inputs


def test_sources_left_out_are_in_the_manifest_and_make_the_stage_run(ready: Context) -> None:
    inputs = WheelhouseStage().inputs(ready, RESULTS)
    less = {"patch": "repair", "component": "spinloop", "sources": ["csrc/a.cu"], "reason": "sm_90"}
    write_stack(ready.layout.pins, minimal() | {"sources-left-out": [less]})
    ready = replace(ready, stack=load_stack(ready.layout.pins, "1.2.3"))
    assert WheelhouseStage().inputs(ready, RESULTS) != inputs
    data = json.loads((gather(ready) / "manifest.json").read_text())
    jsonschema.validate(data, json.loads(SCHEMA_FILE.read_text()))
    assert data["components"]["sources_left_out"] == [less | {"kernels": ""}]


def test_manifest_round_trip(ready: Context) -> None:
    folder = gather(ready)
    manifest = load_manifest(folder)
    assert manifest is not None
    assert render(manifest) == (folder / "manifest.json").read_text()


def test_manifest_holds_nothing_of_this_machine(ready: Context) -> None:
    """The same build in another folder must give the same manifest."""
    assert str(ready.layout.root) not in (gather(ready) / "manifest.json").read_text()


def test_no_manifest_is_none(tmp_path: Path) -> None:
    assert load_manifest(tmp_path) is None


def test_readme_stays_and_the_wheel_is_a_readable_copy(ready: Context) -> None:
    folder = gather(ready)
    assert (folder / "README.md").read_text() == "readme\n"
    wheel = folder / RESULTS["compile"]["wheel"]
    assert wheel.stat().st_mode & 0o777 == 0o644
    wheel.write_bytes(b"edited")
    made = ready.layout.build / "dist/1.2.3-linux-aarch64-smoke" / wheel.name
    assert made.read_bytes() == b"the wheel"


def test_old_wheels_of_another_build_are_gone(ready: Context) -> None:
    folder = gather(ready)
    (folder / "vllm-0-py3-none-any.whl").write_text("old")
    with (folder / "SHA256SUMS").open("a") as sums:
        sums.write(f"{hashlib.sha256(b'old').hexdigest()}  vllm-0-py3-none-any.whl\n")
    gather(ready)
    assert [p.name for p in folder.glob("*.whl")] == [RESULTS["compile"]["wheel"]]


# --- sums ---------------------------------------------------------------------------


def test_sums_are_in_the_format_of_sha256sum(ready: Context) -> None:
    folder = gather(ready)
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    names = sorted([RESULTS["compile"]["wheel"], "manifest.json"])
    assert lines == [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}" for n in names]
    assert verify_sums(ready, folder) == []


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda f, w: (f / w).unlink(), "{wheel} is missing"),
        (lambda f, w: (f / w).write_bytes(b"the whEel"), "{wheel} was altered"),
        (lambda f, w: (f / "manifest.json").write_text("{}"), "manifest.json was altered"),
        (lambda f, w: (f / "more-1-py3-none-any.whl").write_text("x"), "more-1-py3-none-any.whl is not listed"),
        (lambda f, w: (f / "SHA256SUMS").unlink(), "SHA256SUMS is missing"),
    ],
    ids=["missing", "altered", "manifest", "extra", "no sums"],
)  # fmt: skip
def test_damage_is_found_and_named_and_makes_the_stage_run(
    ready: Context, damage, fault: str
) -> None:
    result = WheelhouseStage().run(ready, RESULTS)
    folder = ready.layout.wheelhouse
    assert WheelhouseStage().standing(ready, result)
    damage(folder, RESULTS["compile"]["wheel"])
    assert verify_sums(ready, folder) == [fault.format(wheel=RESULTS["compile"]["wheel"])]
    assert not WheelhouseStage().standing(ready, result)


def test_sums_cannot_name_a_file_outside(ready: Context, tmp_path: Path) -> None:
    folder = gather(ready)
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../../../etc/passwd\n")
    assert "../../../etc/passwd is missing" in verify_sums(ready, folder)


def test_sums_of_an_empty_folder_are_those_of_its_manifest(ready: Context, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/manifest.json").write_text("{}")
    write_sums(ready, tmp_path / "w")
    assert (tmp_path / "w/SHA256SUMS").read_text().endswith("  manifest.json\n")


# --- foreign folders ----------------------------------------------------------------


def test_folder_with_foreign_files_is_not_replaced(ready: Context) -> None:
    (ready.layout.wheelhouse / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckFailed, match=r"thesis\.txt") as raised:
        gather(ready)
    assert "--wheelhouse" in raised.value.remedy
    assert (ready.layout.wheelhouse / "thesis.txt").read_text() == "years of work"


OURS = json.dumps({"schema_version": 99, "stack": "s", "profile": "p", "wheels": []})


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"README.md": "x"},
        {"manifest.json": OURS, "x.whl": "", "SHA256SUMS": f"{'0' * 64}  x.whl\n"},
    ],
)
def test_own_and_empty_folders_may_be_replaced(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    guard_foreign(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"manifest.json": "{}"},  # a browser extension has one too
        {"manifest.json": OURS, "SHA256SUMS": "", "my-own-torch.whl": "x"},
        {"manifest.json": OURS, "notes.txt": "x"},
    ],
)
def test_what_no_build_made_is_not_lost(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckFailed, match=sorted(files)[-1]):
        guard_foreign(tmp_path)


def test_folder_that_does_not_exist_is_fine(tmp_path: Path) -> None:
    guard_foreign(tmp_path / "none")


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"schema_version": 99}'])
def test_manifest_that_is_none_is_said_and_is_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckFailed, match="is no manifest of a wheelhouse"):
        load_manifest(tmp_path)
