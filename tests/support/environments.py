"""Environments and wheelhouses of tiny wheels, made without an installer."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from sm121.repair.wheel import Wheel, read_wheel
from sm121.wheelhouse.manifest import (
    Base,
    ComponentEntry,
    Manifest,
    WheelEntry,
    render,
)
from support.stacks import COMMIT, SHA256
from support.wheels import make_wheel


def family(folder: Path) -> dict[str, Path]:
    """A small family as wheels: torch, NCCL, torchvision and two CuTeDSL components."""
    wheels = [
        make_wheel(
            folder,
            {"torch/version.py": "__version__ = '2.11.0+cu130'\n", "torch/lib/libtorch.so": b"\x7fELF" * 99},
            name="torch", version="2.11.0", requires=["nvidia-nccl-cu13==2.30.4"],
        ),
        make_wheel(
            folder,
            {"torchvision/version.py": "__version__ = '0.26.0+cu130'\n", "torchvision/_C.so": b"\x7fELFcuda"},
            name="torchvision", version="0.26.0", requires=["torch==2.11.0"],
        ),
        make_wheel(
            folder, {"nvidia/nccl/lib/libnccl.so.2": b"\x7fELF NCCL version 2.30.4+cuda13.0\0%s\0more"},
            name="nvidia_nccl_cu13", version="2.30.4",
        ),
        make_wheel(
            folder, {"cutlass/LICENSE": "base"}, name="nvidia_cutlass_dsl_libs_base", version="4.5.1"
        ),
        make_wheel(
            folder, {"cutlass/_mlir.so": b"\x7fELF13", "cutlass/cute.py": "cu13 = 1\n"},
            name="nvidia_cutlass_dsl_libs_cu13", version="4.5.1",
        ),
    ]  # fmt: skip
    return {read_wheel(wheel).distribution: wheel for wheel in wheels}


def fake_environment(root: Path, *, python: str = "3.12") -> Path:
    """An empty virtual environment; returns its site-packages."""
    site = root / f"lib/python{python}/site-packages"
    site.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "pyvenv.cfg").write_text("home = /usr/bin\n")
    return site


def unpack(wheel: Path, site: Path) -> None:
    """Install a wheel as an installer does: files, RECORD with INSTALLER in it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    info = site / read_wheel(wheel).dist_info
    (info / "INSTALLER").write_text("test")
    with (info / "RECORD").open("a") as record:
        record.write(f"{info.name}/INSTALLER,,\n")


def read_all(wheels: Mapping[str, Path]) -> dict[str, Wheel]:
    return {name: read_wheel(path) for name, path in wheels.items()}


def snapshot(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """inode, time and content of every file, to see what was touched."""
    return {
        str(p.relative_to(root)): (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes())
        for p in root.rglob("*")
        if p.is_file() and not p.is_symlink()
    }


def manifest_text(wheels: Iterable[WheelEntry] = (), **facts: object) -> str:
    """manifest.json of a complete x86-64 wheelhouse, with other facts where given."""
    values: dict[str, object] = {
        "schema_version": 1, "stack": "1.2.3", "target": "linux-x86_64", "python": "3.12",
        "glibc": "2.17", "profile": "full", "partial": False, "complete": True, "notices": (),
        "arch": "12.1a", "patches": (), "patched_commit": COMMIT, "lock_sha256": {}, "tools": {},
        "base": Base(
            version="1.2.3", commit=COMMIT, provider="sdist", provider_reason="", sdist_sha256=SHA256
        ),
        "components": ComponentEntry(built=(), left_out={}), "wheels": tuple(wheels), "checks": (),
    }  # fmt: skip
    return render(Manifest.model_validate({**values, **facts}))


def listed(wheel: Path, sha256: str = "") -> WheelEntry:
    """A wheel as a manifest lists it."""
    distribution, version, *_ = wheel.name.split("-")
    return WheelEntry(
        filename=wheel.name, distribution=distribution, version=version, origin="index",
        size=wheel.stat().st_size,
        sha256=sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )  # fmt: skip


def wheelhouse(folder: Path, wheels: Iterable[Path], **facts: object) -> Path:
    """A complete wheelhouse with manifest and SHA256SUMS."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for wheel in wheels:
        if wheel.parent != folder:
            shutil.copy2(wheel, folder)
        read = read_wheel(wheel)
        entries.append(
            WheelEntry(
                filename=wheel.name, distribution=read.distribution, version=read.version,
                size=wheel.stat().st_size, origin="index",
                sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            )
        )  # fmt: skip
    (folder / "manifest.json").write_text(manifest_text(entries, **facts))
    sums(folder)
    return folder


def sums(folder: Path) -> None:
    """Write SHA256SUMS over what is there now."""
    lines = [
        f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n"
        for f in sorted(folder.iterdir())
        if f.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))
