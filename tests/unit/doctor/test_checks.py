"""Single checks on made-up machines."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import jsonschema
import pytest

from sm121.context import Context
from sm121.doctor import resources
from sm121.doctor.gpu import driver_version
from sm121.doctor.machine import Machine
from sm121.doctor.model import SCHEMA_FILE, Check, schema_text
from sm121.doctor.reference import load_references, reference_of
from sm121.doctor.resources import (
    check_disk,
    check_locked_memory,
    check_memory,
    check_places,
    mount_of,
)
from sm121.doctor.tools import check_shadow
from sm121.pins.load import load_stack
from sm121.pins.model import Stack
from sm121.source.places import made_at

GIB = 1 << 30
MOUNTS = """/dev/sda1 / ext4 rw 0 0
server:/export /home nfs4 rw,vers=4.2 0 0
/dev/sdb1 /home/ada/local\\040disk xfs rw,noexec 0 0
tmpfs /tmp tmpfs rw 0 0
"""


def one(checks, name: str = "") -> Check:
    (found,) = (c for c in checks if not name or c.name == name)
    return found


def test_committed_schema_is_the_models() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()
    import json

    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/opt/x", "ext4"), ("/home/ada/sm121", "nfs4"), ("/home/ada/local disk/x", "xfs"),
     ("/homes", "ext4"), ("/tmp", "tmpfs")],
)  # fmt: skip
def test_mount_that_holds_a_folder(folder: str, kind: str) -> None:
    assert mount_of(Path(folder), MOUNTS)[0] == kind


def test_no_mounts_at_all() -> None:
    assert mount_of(Path("/x"), "") == ("", (), "")


@pytest.mark.parametrize(
    ("kind", "options", "level"),
    [("ext4", "rw", "ok"), ("nfs4", "rw", "warning"), ("tmpfs", "rw", "warning"), ("xfs", "rw,noexec", "fault")],
)  # fmt: skip
def test_file_system_of_the_build_folder(
    small: Context, tmp_path: Path, kind: str, options: str, level: str
) -> None:
    (tmp_path / "sys/proc").mkdir(parents=True)
    (tmp_path / "sys/proc/mounts").write_text(f"/dev/x / {kind} {options} 0 0\n")
    check = one(check_places(Machine(context=small, root=tmp_path / "sys")), "build folder")
    assert check.build == level
    assert bool(check.remedy) == (level != "ok")


def test_folder_of_somebody_else(small: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.os, "access", lambda *_: False)
    for check in check_places(Machine(context=small)):
        assert (check.build, check.run) == ("fault", "not needed")
        assert "can't be written to" in check.cause


@pytest.mark.parametrize(
    ("free_gb", "build", "run"),
    [(500, "ok", "ok"), (9, "warning", "warning"), (3, "fault", "warning")],
)
def test_disk(
    small: Context, monkeypatch: pytest.MonkeyPatch, free_gb: float, build: str, run: str
) -> None:
    usage = type("Usage", (), {"free": int(free_gb * 1e9)})
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(resources, "missing_files", lambda _: (0, []))
    check = one(check_disk(Machine(context=small), reference_of("smoke")))
    assert (check.build, check.run) == (build, run)
    assert "7.9 GB more" in check.found


def test_disk_counts_only_what_is_there_of_this_stack_and_target(
    small: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "missing_files", lambda _: (0, []))

    def needed(name: str) -> str:
        (small.layout.build / name).mkdir(parents=True)
        return one(check_disk(Machine(context=small), reference)).found

    reference = reference_of("smoke").model_copy(update={"build_gb": 0.5})
    monkeypatch.setattr(resources, "tree_size", lambda path: 1e8 * path.is_dir())
    for other in ("env/1.2.4", "toolkit/1.2.3-linux-x86_64", "work/1.2.3-linux-x86_64",
                  "dist/1.2.3-linux-aarch64-kernels", "source/vllm.git", "cache/files", "target"):  # fmt: skip
        assert "0.5 GB more" in needed(other)
    for own, left in {"env/1.2.3": 0.4, "toolkit/1.2.3-linux-aarch64": 0.3,
                      "work/1.2.3-linux-aarch64": 0.2, "dist/1.2.3-linux-aarch64-smoke": 0.1}.items():  # fmt: skip
        assert f"{left} GB more" in needed(own)
    cutlass = made_at("cutlass", small.stack.sources["cutlass"], small.layout.third_party)
    assert "0.0 GB more" in needed(str(cutlass))


def test_memory_that_no_compiler_fits_into(small: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases.md 12, before anything is started."""
    for gib, level in ((1, "fault"), (4, "warning"), (512, "ok")):
        monkeypatch.setattr(resources, "available_memory", lambda gib=gib: gib * GIB)
        monkeypatch.setattr(resources, "usable_cores", lambda: 16)
        check = one(check_memory(Machine(context=small)), "memory")
        assert check.build == level
        assert bool(check.remedy) == (level != "ok")


def test_locked_memory() -> None:
    assert one(check_locked_memory(resource.RLIM_INFINITY)).run == "ok"
    low = one(check_locked_memory(8 << 20))
    assert (low.build, low.run) == ("not needed", "warning")
    assert "memlock" in low.remedy


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build", "580.95.05"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.12  Wed Sep 20", "535.104.12"),
        ("", ""),
    ],
)  # fmt: skip
def test_driver_version(text: str, version: str) -> None:
    assert driver_version(text) == version


def test_path_of_a_service(small: Context, tmp_path: Path) -> None:
    machine = Machine(context=small, root=tmp_path)
    assert machine.service_path.startswith("/usr/local/sbin:")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/environment").write_text('LANG=C\nPATH="/usr/bin:/bin"\n')
    assert machine.service_path == "/usr/bin:/bin"


def test_a_folder_named_vllm_in_the_way(small: Context, tmp_path: Path) -> None:
    """cases.md 24."""
    there, path = tmp_path / "work", tmp_path / "path"
    (there / "vllm").mkdir(parents=True)
    path.mkdir()
    (path / "vllm.py").write_text("")
    clean = Machine(context=small, cwd=tmp_path, environment={})
    assert one(check_shadow(clean)).run == "ok"
    hidden = one(check_shadow(dataclasses.replace(clean, cwd=there)))
    assert (hidden.run, hidden.build) == ("warning", "ok")
    assert str(there / "vllm") in hidden.found
    by_path = dataclasses.replace(clean, environment={"PYTHONPATH": f"/nowhere:{path}"})
    assert str(path / "vllm.py") in one(check_shadow(by_path)).found


def test_reference_figures_are_of_profiles_that_exist(stack: Stack) -> None:
    assert set(load_references().profiles) <= set(stack.profiles) | {"full"}


def test_flashinfers_minutes_are_in_every_profile_that_compiles_it(root: Path) -> None:
    for name, pin in load_stack(root / "pins", "0.26.0").profiles.items():
        assert ("FlashInfer's 2.4" in reference_of(name).source) == pin.jit_cache
    assert load_references().jit_cache_minutes == 2.4


def test_estimate_is_scaled_by_jobs_down_to_the_longest_object() -> None:
    kernels = reference_of("kernels")
    assert kernels.seconds(1) > 1.9 * kernels.seconds(2) * 0.9
    assert kernels.seconds(1000) == 60 * (kernels.other_minutes + kernels.longest_minutes)
