"""The built wheel: check that it is what profile and target promise, and make it canonical.

Canonical: members sorted, one time (SOURCE_DATE_EPOCH), fixed modes, not compressed. So the
same content is the same file, whatever the umask and the order of os.listdir, and whichever
zlib Python has (zlib and zlib-ng compress the same bytes differently).
"""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sm121.abi.elf import read_elf
from sm121.abi.source import BytesSource, Malformed
from sm121.compile.traces import path_faults
from sm121.errors import WheelFault
from sm121.files import write_atomic
from sm121.pins.model import FamilyPin

# Where a component ends up, if not at vllm/<name>.abi3.so.
_PLACES = {
    "_vllm_fa2_C": "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "_vllm_fa4_cutedsl_C": "vllm/vllm_flash_attn/cute/__init__.py",
    "triton_kernels": "vllm/third_party/triton_kernels/__init__.py",
    "_deep_gemm_C": "vllm/third_party/deep_gemm/__init__.py",
    "vllm-rs": "vllm/vllm-rs",
    "_rust_tool_parser": "vllm/_rust_tool_parser.abi3.so",
    "_vllm_fa3_C": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "fmha_sm100": "vllm/third_party/fmha_sm100/__init__.py",
    "tml_fa4": "vllm/third_party/tml_fa4/__init__.py",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """What an ELF file says: machine (as in targets), NEEDED, and RPATH or RUNPATH."""

    machine: str
    needed: tuple[str, ...]
    paths: tuple[str, ...]


def component_paths(component: str, *, python: str, machine: str) -> tuple[str, ...]:
    """All members that have to be there, for a CPython ('3.12') that the wheel is to run on."""
    if component != "_deep_gemm_C":
        return (component_path(component),)
    # The package alone imports nowhere: its `_C` is for one CPython, and CMake may skip it.
    tag = python.replace(".", "")
    library = f"vllm/third_party/deep_gemm/_C.cpython-{tag}-{machine}-linux-gnu.so"
    return component_path(component), library


def component_path(component: str) -> str:
    """The member of the wheel that proves a component is in it."""
    return _PLACES.get(component, f"vllm/{component}.abi3.so")


def read_library(data: bytes) -> Library:
    """Read one ELF file. Raises Malformed if it is not a whole one."""
    elf = read_elf(BytesSource(data))
    paths = [path for path in (elf.rpath, elf.runpath) if path is not None]
    return Library(machine=elf.machine, needed=elf.needed, paths=tuple(paths))


def check_wheel(
    wheel: Path,
    *,
    machine: str,
    filename: str,
    components: Sequence[str],
    forbidden: Sequence[str],
    family: Mapping[str, FamilyPin],
    required: Collection[str],
    python: str,
) -> dict[str, Library]:
    """Check a built wheel; returns its libraries by member name.

    components: must be in, and nothing else compiled may be. forbidden: build
    paths that no library may hold. family and required: see metadata_faults. python: the
    CPython that it ships for. Raises WheelFault listing every fault.
    """
    faults: list[str] = []
    if wheel.name != filename:
        faults.append(f"the wheel is {wheel.name}, wanted {filename}")
    expected = {
        path: c for c in components for path in component_paths(c, python=python, machine=machine)
    }
    libraries: dict[str, Library] = {}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        faults += [
            f"component {c} is missing ({path})"
            for path, c in expected.items()
            if path not in names
        ]
        for name in sorted(names):
            with archive.open(name) as member:
                if member.read(4) != b"\x7fELF":
                    continue
            data = archive.read(name)
            try:
                library = read_library(data)
            except Malformed as error:
                faults.append(f"{name}: not a whole ELF file ({error})")
                continue
            libraries[name] = library
            extra = "_deep_gemm_C" in components and name.startswith(
                "vllm/third_party/deep_gemm/_C."
            )
            if name not in expected and not extra:
                faults.append(f"{name}: compiled, but no component of this profile: a leftover")
            if library.machine != machine:
                faults.append(f"{name}: code for {library.machine}, wanted {machine}")
            if library.paths:
                faults.append(f"{name}: has RPATH or RUNPATH {':'.join(library.paths)!r}")
            if name == component_path("cumem_allocator") and "libcuda.so.1" not in library.needed:
                faults.append(
                    f"{name}: NEEDED libcuda.so.1 is missing; the driver stub exports too little"
                )
            faults += path_faults(name, data, forbidden)
        metadata_name = next((n for n in names if n.endswith(".dist-info/METADATA")), None)
        metadata = archive.read(metadata_name).decode() if metadata_name else ""
    faults += metadata_faults(metadata, family, required)
    if faults:
        raise WheelFault(
            f"The built wheel has {len(faults)} fault(s).",
            details=faults,
            cause=wheel.name,
            remedy="The wheel was not taken into the wheelhouse; see build/log/compile.log.",
        )
    return libraries


def metadata_faults(
    metadata: str, family: Mapping[str, FamilyPin], required: Collection[str]
) -> list[str]:
    """Where METADATA (core metadata, Requires-Dist) and the pins of the family disagree.

    required: members of the family that must be asked for at all.
    """
    asked: dict[str, Requirement] = {}
    for line in HeaderParser().parsestr(metadata).get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if "extra" not in str(requirement.marker or ""):
            asked[canonicalize_name(requirement.name)] = requirement
    faults = [
        f"METADATA does not ask for {name}, which vLLM's requirement files name"
        for name in sorted(set(required) - set(asked))
    ]
    for name, pin in family.items():
        if name not in asked:
            continue
        requirement = asked[name]
        if not requirement.specifier.contains(pin.version, prereleases=True):
            faults.append(f"METADATA asks for {requirement}, the pins for {name}=={pin.version}")
        if lost := sorted(set(pin.extras) - requirement.extras):
            faults.append(f"METADATA asks for {requirement} without [{', '.join(lost)}]")
    return faults


def canonical_wheel(source: Path, output: Path, *, epoch: int) -> None:
    """Rewrite a wheel as the one canonical file of its content (RECORD stays as it is)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in sorted(old.namelist(), key=member_order):
            if name.endswith("/"):
                continue
            info = canonical_member(name, epoch, like=old.getinfo(name))
            new.writestr(info, old.read(name), zipfile.ZIP_STORED)
    write_atomic(output, buffer.getvalue())


def member_order(name: str) -> tuple[bool, bool, str]:
    """Sorting key: dist-info last, RECORD at the very end (PEP 427's recommendation)."""
    return ".dist-info/" in name, name.endswith("/RECORD"), name


def canonical_member(name: str, epoch: int, *, like: zipfile.ZipInfo | None) -> zipfile.ZipInfo:
    """Header of a member: one time, one of two modes. like: whose executable bit it keeps."""
    # ZIP keeps local time without a zone, from 1980 on, in steps of two seconds.
    info = zipfile.ZipInfo(name, time.gmtime(max(epoch, 315532800))[:6])
    executable = like is not None and (like.external_attr >> 16) & 0o100
    info.external_attr = (0o100755 if executable else 0o100644) << 16
    info.create_system = 3
    return info
