"""The build context of Dockerfile.verify: all that its verify step needs, since it has no network.

Dockerfile.verify
wheelhouse/   what is verified
sm121/        this project: src, pins, patches
tools/        what this project needs to run (requirements/runtime.lock), for the target's Python
driver/       libcuda's stand-in, if a toolkit was assembled here
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sm121 import proc
from sm121.errors import CheckFailed
from sm121.files import fresh_directory, link_or_copy
from sm121.index import uv_binary
from sm121.layout import Layout
from sm121.lock.pylock import Target

DOCKERFILE = "Dockerfile.verify"
_MEMBERS = {DOCKERFILE, "wheelhouse", "sm121", "tools", "driver"}


def write_context(
    layout: Layout, house: Path, target: Target, folder: Path, *, stub: Path | None
) -> None:
    """Fill the folder; what an earlier run put there is replaced. target: with the image's Python.

    Raises CheckFailed for a folder with anything else in it, ToolFailed if a tool can't be had.
    """
    folder = folder.resolve()  # of '.' there is no sibling to fill
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    # A checkout of this project has a Dockerfile.verify too.
    if other := sorted(held - _MEMBERS) if DOCKERFILE in held else sorted(held):
        raise CheckFailed(
            f"{folder} holds what is no part of a context: {', '.join(other[:4])}.",
            cause="a context replaces the whole folder",
            remedy="Name a folder that is empty or not there.",
        )
    with fresh_directory(folder) as fresh:
        shutil.copyfile(layout.root / DOCKERFILE, fresh / DOCKERFILE)
        wheels = fresh / "wheelhouse"
        wheels.mkdir()
        for file in sorted(f for f in house.iterdir() if f.is_file()):
            link_or_copy(file, wheels / file.name)
        for name in ("src", "pins", "patches"):
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(layout.root / name, fresh / "sm121" / name, ignore=ignored)
        (fresh / "driver").mkdir()
        if stub:
            shutil.copyfile(stub, fresh / "driver" / "libcuda.so.1")
        install_tools(layout, target, fresh / "tools")


def install_tools(layout: Layout, target: Target, folder: Path) -> None:
    """The runtime lock's wheels for that platform and Python, unpacked into a folder."""
    proc.run(
        [
            uv_binary(), "pip", "install", "--quiet", "--target", folder, "--no-deps",
            "--only-binary", ":all:", "--require-hashes", "--link-mode", "copy",
            "--python-platform", target.uv_platform, "--python-version", target.python,
            "-r", layout.root / "requirements" / "runtime.lock",
        ],
        log=layout.log / "tools.log",
    )  # fmt: skip
