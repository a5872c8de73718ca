"""A CUDA toolkit assembled from NVIDIA's wheels; no system CUDA is needed.

Layout as nvcc, CMake's FindCUDAToolkit and FindCUDA expect it when crossing:
host programs in bin/ and nvvm/, the target's libraries in targets/<triple>/lib, headers
shared. FindCUDA unsets cached paths whenever the toolkit root changes, so the target's
libraries must be where it searches (targets/), not in cache variables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sm121.toolkit.driver_stub import build_stub
from sm121.toolkit.machine import Compilers
from sm121.toolkit.unpack import unpack_all

# The root that all CUDA 13 wheels share inside site-packages.
_ROOT = "nvidia/cu13/"
# Programs that run on the host; everything else belongs to the target.
_HOST_WHEELS = ("nvidia_cuda_nvcc-", "nvidia_nvvm-")
_TRIPLES = {
    # FindCUDAToolkit looks for sbsa-linux on a server-class Arm, FindCUDA for aarch64-linux.
    "aarch64": ("sbsa-linux", "aarch64-linux"),
    "x86_64": ("x86_64-linux",),
}


def assemble(
    folder: Path,
    *,
    host_wheels: Sequence[Path],
    target_wheels: Sequence[Path],
    machine: str,
    compilers: Compilers,
    log: Path,
) -> list[str]:
    """Fill `folder` with a toolkit that produces code for `machine`.

    host_wheels: nvidia-* wheels of the building machine (nvcc, cicc are taken from them);
    target_wheels: those of the target. Returns the names the driver stub exports.
    """
    triples = _TRIPLES[machine]
    library = f"targets/{triples[0]}/lib"

    def host(name: str) -> str | None:
        inside = name.removeprefix(_ROOT)
        return inside if inside != name and inside.startswith(("bin/", "nvvm/")) else None

    def target(name: str) -> str | None:
        inside = name.removeprefix(_ROOT)
        if inside == name:
            return None
        if inside.startswith("lib/"):
            return f"{library}/{inside.removeprefix('lib/')}"
        return inside if inside.startswith("include/") else None

    unpack_all([w for w in host_wheels if w.name.startswith(_HOST_WHEELS)], folder, host)
    unpack_all([w for w in target_wheels if w.name.startswith("nvidia_")], folder, target)
    (folder / f"targets/{triples[0]}/include").symlink_to("../../include")
    for other in triples[1:]:
        (folder / "targets" / other).symlink_to(triples[0])
    for name in ("lib64", "lib"):
        (folder / name).symlink_to(library)
    link_names(folder / library)
    return build_stub(
        folder / "include/cuda.h", folder / library / "stubs/libcuda.so", compilers, log=log
    )


def link_names(library: Path) -> None:
    """Give each versioned library the name that a linker looks for (libX.so → libX.so.N).

    Wheels hold only the versioned file.
    """
    for file in sorted(library.glob("lib*.so.*")):
        name = re.sub(r"\.so\..*$", ".so", file.name)
        link = library / name
        if not link.exists():
            link.symlink_to(file.name)
