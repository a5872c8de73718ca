"""Wheelhouses of tiny wheels that the real install.py installs with the real uv."""

from __future__ import annotations

import platform
import shutil
import sys
import zipfile
from pathlib import Path

from sm121.index import uv_binary
from sm121.lock.pylock import LockedFile, make_lock, render_lock
from sm121.wheelhouse.manifest import Manifest, load_manifest
from sm121.wheelhouse.stage import INSTALLER
from support.environments import sums
from support.wheels import make_wheel

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
HERE = {"python": PYTHON, "target": f"linux-{platform.machine()}"}


def uv_wheel(folder: Path) -> Path:
    """uv itself as a wheel, uncompressed to be quick."""
    wheel = make_wheel(folder, {}, name="uv", version="0.0.1", tag="py3-none-any")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.write(uv_binary(), "uv-0.0.1.data/scripts/uv")
    return wheel


def finish(folder: Path) -> Path:
    manifest = load_manifest(folder)
    assert isinstance(manifest, Manifest)
    files = [
        LockedFile(
            distribution=e.distribution, version=e.version, filename=e.filename,
            sha256=e.sha256, size=e.size,
        )
        for e in manifest.wheels
    ]  # fmt: skip
    lock = make_lock(files, python=PYTHON, inputs="", folder="")
    (folder / "pylock.toml").write_text(render_lock(lock))
    shutil.copy2(INSTALLER, folder)
    sums(folder)
    return folder
