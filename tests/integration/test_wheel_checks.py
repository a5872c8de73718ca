"""The built wheel's checks, on tiny real wheels with real ELF files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from sm121.compile.wheel import Library, check_wheel, read_library
from sm121.errors import WheelFault
from sm121.pins.model import FamilyPin
from support.tools import run, tool
from support.wheels import compile_library, make_wheel

pytestmark = pytest.mark.compiler

VERSION = "1.2.3+sm121.smoke.1a2b3c4d"
COMPONENTS = ("spinloop", "cumem_allocator")
REQUIRES = ("torch==2.11.0", "numpy>=2")


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libcuda to link with: SONAME libcuda.so.1."""
    folder = tmp_path_factory.mktemp("stub")
    compile_library(
        folder / "libcuda.so", "int cuMemRelease(void) { return 34; }\n",
        flags=["-Wl,-soname,libcuda.so.1"],
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    folder = tmp_path_factory.mktemp("libraries")
    count = iter(range(1000))

    def make(source: str = "int answer(void) { return 42; }\n", **how) -> bytes:
        return compile_library(folder / f"{next(count)}.so", source, **how)

    return make


@pytest.fixture(scope="module")
def good(library, stub: Path) -> dict[str, bytes]:
    """Members of a wheel that has nothing wrong."""
    user = "int cuMemRelease(void); int use(void) { return cuMemRelease(); }\n"
    return {
        "vllm/__init__.py": b"",
        "vllm/spinloop.abi3.so": library(),
        "vllm/cumem_allocator.abi3.so": library(
            user, flags=[f"-L{stub}", "-Wl,--as-needed", "-lcuda"]
        ),
    }


def check(wheel: Path, **changes) -> dict[str, Library]:
    arguments = {
        "machine": "aarch64",
        "filename": f"vllm-{VERSION}-cp311-abi3-linux_aarch64.whl",
        "components": COMPONENTS,
        "forbidden": ["/secret/build"],
        "family": {
            "torch": FamilyPin(version="2.11.0", reason="-"),
            "absent": FamilyPin(version="1.0", reason="-"),
        },
        "required": ["torch"],
        "python": "3.12",
        **changes,
    }
    return check_wheel(wheel, **arguments)


def wheel_of(folder: Path, files, **how) -> Path:
    facts = {
        "name": "vllm", "version": VERSION, "tag": "cp311-abi3-linux_aarch64", "requires": REQUIRES,
        **how,
    }  # fmt: skip
    return make_wheel(folder, files, **facts)


def faults(wheel: Path, **changes) -> tuple[str, ...]:
    with pytest.raises(WheelFault) as raised:
        check(wheel, **changes)
    error = raised.value
    assert error.exit_code == 1
    assert f"{len(error.details)} fault(s)" in error.what
    assert wheel.name in error.cause
    return error.details


def test_good_wheel_passes_and_its_libraries_are_listed(good, tmp_path: Path) -> None:
    libraries = check(wheel_of(tmp_path, good))
    assert libraries == {
        "vllm/spinloop.abi3.so": Library(machine="aarch64", needed=(), paths=()),
        "vllm/cumem_allocator.abi3.so": Library(
            machine="aarch64", needed=("libcuda.so.1",), paths=()
        ),
    }


def test_missing_component_is_named_with_its_place(good, tmp_path: Path) -> None:
    """cases.md 4: the build was green."""
    files = {k: v for k, v in good.items() if "spinloop" not in k}
    assert faults(wheel_of(tmp_path, files)) == (
        "component spinloop is missing (vllm/spinloop.abi3.so)",
    )


def test_deep_gemm_is_there_for_the_targets_cpython(good, library, tmp_path: Path) -> None:
    """cases.md 4: its Python package alone is no DeepGEMM, and one for another CPython none here."""
    folder = "vllm/third_party/deep_gemm"
    chosen = [*COMPONENTS, "_deep_gemm_C"]
    files = {**good, f"{folder}/__init__.py": b"from . import _C"}
    wanted = f"{folder}/_C.cpython-312-aarch64-linux-gnu.so"
    missing = (f"component _deep_gemm_C is missing ({wanted})",)
    assert faults(wheel_of(tmp_path / "none", files), components=chosen) == missing
    files[f"{folder}/_C.cpython-311-aarch64-linux-gnu.so"] = library()
    assert faults(wheel_of(tmp_path / "other", files), components=chosen) == missing
    files[wanted] = library()
    assert wanted in check(wheel_of(tmp_path / "good", files), components=chosen)
    assert len(faults(wheel_of(tmp_path / "left over", files))) == 2


def test_component_for_another_machine_is_named(good, library, tmp_path: Path) -> None:
    files = {**good, "vllm/spinloop.abi3.so": library(compiler="gcc")}
    (fault,) = faults(wheel_of(tmp_path, files))
    assert fault == "vllm/spinloop.abi3.so: code for x86_64, wanted aarch64"


@pytest.mark.parametrize(
    "flag",
    [
        "-Wl,-rpath,/opt/cuda/lib,--enable-new-dtags",
        "-Wl,-rpath,/opt/cuda/lib,--disable-new-dtags",
        "-Wl,-rpath,$ORIGIN/../torch/lib",
        "-Wl,-rpath,/a::/b",
    ],
    ids=["runpath", "rpath", "origin", "empty entry"],
)
def test_any_library_path_is_a_fault(good, library, tmp_path: Path, flag: str) -> None:
    files = {**good, "vllm/spinloop.abi3.so": library(flags=[flag])}
    (fault,) = faults(wheel_of(tmp_path, files))
    assert fault.startswith("vllm/spinloop.abi3.so: has RPATH or RUNPATH")
    assert flag.split(",")[2] in fault


def test_empty_library_path_is_a_fault(good, library, tmp_path: Path) -> None:
    """An empty entry is the current directory of whoever starts the program."""
    data = bytearray(library(flags=["-Wl,-rpath,/secret"]))
    place = data.index(b"/secret\0")
    data[place] = 0
    files = {**good, "vllm/spinloop.abi3.so": bytes(data)}
    (fault,) = faults(wheel_of(tmp_path, files))
    assert fault == "vllm/spinloop.abi3.so: has RPATH or RUNPATH ''"


def test_library_path_is_found_without_section_headers(good, library, tmp_path: Path) -> None:
    data = bytearray(library(flags=["-Wl,-rpath,/opt/lib"]))
    struct.pack_into("<Q", data, 0x28, 0)  # e_shoff
    struct.pack_into("<HH", data, 0x3C, 0, 0)  # e_shnum, e_shstrndx
    files = {**good, "vllm/spinloop.abi3.so": bytes(data)}
    assert "/opt/lib" in faults(wheel_of(tmp_path, files))[0]


def test_build_path_inside_a_library_is_a_fault(good, library, tmp_path: Path) -> None:
    source = 'const char *where(void) { return "/secret/build/src/x.cpp"; }\n'
    files = {**good, "vllm/spinloop.abi3.so": library(source)}
    assert faults(wheel_of(tmp_path, files)) == (
        "vllm/spinloop.abi3.so: holds the build path /secret/build",
    )


def test_name_of_the_checkout_inside_a_mapped_path_is_no_fault(
    good, library, tmp_path: Path
) -> None:
    source = 'const char *where(void) { return "csrc/flash_attn/src/x.h"; }\n'
    check(
        wheel_of(tmp_path, {**good, "vllm/spinloop.abi3.so": library(source)}), forbidden=["/src"]
    )


@pytest.mark.parametrize(
    "place",
    [
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/third_party/x.so.1",
        "vllm/bin/tool",
        "vllm/vllm-rs",
    ],
)
def test_leftover_of_another_profile_is_found_whatever_its_name(
    good, library, tmp_path: Path, place: str
) -> None:
    (fault,) = faults(wheel_of(tmp_path, {**good, place: library()}))
    assert fault == f"{place}: compiled, but no component of this profile: a leftover"


@pytest.mark.parametrize("keep", [4, 20, 100, 0.5, 0.95])
def test_truncated_library_is_no_library(good, tmp_path: Path, keep: float) -> None:
    data = good["vllm/spinloop.abi3.so"]
    cut = data[: int(keep if keep >= 1 else keep * len(data))]
    found = faults(wheel_of(tmp_path, {**good, "vllm/spinloop.abi3.so": cut}))
    assert any("not a whole ELF file" in f for f in found)


def test_driver_that_is_not_needed_is_a_fault(good, library, tmp_path: Path) -> None:
    files = {**good, "vllm/cumem_allocator.abi3.so": library()}
    (fault,) = faults(wheel_of(tmp_path, files))
    assert "NEEDED libcuda.so.1 is missing" in fault


def test_metadata_that_asks_for_another_version_is_a_fault(good, tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, good, requires=["torch==2.10.0", "torchvision>=0.1"])
    assert faults(wheel) == ("METADATA asks for torch==2.10.0, the pins for torch==2.11.0",)


@pytest.mark.parametrize(
    "tag",
    ["cp311-abi3-linux_x86_64", "cp311-abi3-manylinux_2_28_aarch64", "py3-none-any"],
)
def test_other_platform_tag_is_a_fault(good, tmp_path: Path, tag: str) -> None:
    """cases.md 22."""
    (fault,) = faults(wheel_of(tmp_path, good, tag=tag))
    assert tag in fault
    assert "wanted vllm-1.2.3+sm121.smoke.1a2b3c4d-cp311-abi3-linux_aarch64.whl" in fault


def test_other_version_is_a_fault(good, tmp_path: Path) -> None:
    """cases.md 13."""
    (fault,) = faults(wheel_of(tmp_path, good, version="0.1.dev1"))
    assert "the wheel is vllm-0.1.dev1-cp311-abi3-linux_aarch64.whl, wanted vllm-1.2.3" in fault


def test_all_faults_are_told_at_once(good, library, tmp_path: Path) -> None:
    files = {
        "vllm/cumem_allocator.abi3.so": library(compiler="gcc", flags=["-Wl,-rpath,/x"]),
        "vllm/left.so": library(),
    }
    wheel = wheel_of(tmp_path, files, requires=["torch==1"], tag="cp311-abi3-linux_x86_64")
    assert len(faults(wheel)) == 7


def test_reader_agrees_with_readelf(good, tmp_path: Path) -> None:
    readelf = tool("readelf", "binutils")
    for name, data in good.items():
        if not name.endswith(".so"):
            continue
        file = tmp_path / "x.so"
        file.write_bytes(data)
        dynamic = run(readelf, "-d", file).stdout
        library = read_library(data)
        assert all(f"[{n}]" in dynamic for n in library.needed)
        assert dynamic.count("(NEEDED)") == len(library.needed)
        assert "AArch64" in run(readelf, "-h", file).stdout
