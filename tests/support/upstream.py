"""A tiny upstream that looks like vLLM to the pipeline: its build files and a release."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.gits import Work
from support.stacks import minimal, write_stack

FILES: dict[str, str] = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.26)
set(CUTLASS_REVISION "v4.4.2")
FetchContent_Declare(
    cutlass
    GIT_REPOSITORY https://github.com/NVIDIA/cutlass.git
    # Please keep this in sync.
    GIT_TAG ${CUTLASS_REVISION}
    GIT_PROGRESS TRUE)
""",
    "setup.py": """ext_modules = [CMakeExtension(name="vllm.spinloop"), CMakeExtension(name="vllm.fs_io_C")]
ext_modules.append(
    CMakeExtension(
        name="vllm.vllm_flash_attn._fa3"))
""",
    "tools/build_rust.py": "",
    "requirements/cuda.txt": "torch==2.11.0\n",
    "requirements/common.txt": "numpy\n",
    "vllm/__init__.py": "".join(f"line_{n} = {n}\n" for n in range(1, 41)),
    "vllm/other.py": "x = 1\n",
    "csrc/spinloop.cpp": "int spin() { return 1; }\n",
}


@dataclass(frozen=True, slots=True)
class Upstream:
    """A git repository with a tag, and the pins that fit it."""

    work: Work
    commit: str
    pins: dict[str, Any]


def make_upstream(folder: Path) -> Upstream:
    work = Work.init(folder)
    commit = work.commit(dict(FILES), "Release")
    work.git("tag", "v1.2.3")
    pins = minimal()
    pins["vllm"].update({"git": work.url, "commit": commit})
    return Upstream(work, commit, pins)


def make_sdist(
    folder: Path,
    files: dict[str, str | bytes],
    *,
    top: str = "",
    version: str = "1.2.3",
    extra: tuple[tarfile.TarInfo, ...] = (),
) -> Path:
    """A sdist as any backend makes it: gzipped tar with one top folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{version}.tar.gz"
    top = top or f"vllm-{version}"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {
            "PKG-INFO": f"Metadata-Version: 2.2\nName: vllm\nVersion: {version}\n",
            **files,
        }.items():
            data = text.encode() if isinstance(text, str) else text
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in extra:
            archive.addfile(info)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_checkout(root: Path, pins: dict[str, Any]) -> Path:
    """A checkout of sm121 as far as its data goes: pins and an empty series."""
    write_stack(root / "pins", pins)
    (root / "pins/default").write_text("1.2.3\n")
    series = root / "patches/vllm/1.2.3"
    series.mkdir(parents=True)
    (series / "series").write_text("")
    return root
