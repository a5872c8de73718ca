"""A wheelhouse with compiled components passes; made worse in each known way it fails, for that reason."""

import shutil
import struct
import zipfile

import pytest
from make import TARGET, write_wheel

from sm121.abi.policy.load import load_policy
from sm121.abi.verify import verify
from support.environments import listed, manifest_text

pytestmark = [pytest.mark.network, pytest.mark.compiler, pytest.mark.timeout(1800)]

NAME = "vllm-0.26.0+sm121.kernels.test-cp311-abi3-linux_aarch64.whl"
BUILT = ["spinloop", "cumem_allocator", "_C_stable_libtorch"]
SPINLOOP, CUMEM = "vllm/spinloop.abi3.so", "vllm/cumem_allocator.abi3.so"
C = "vllm/_C_stable_libtorch.abi3.so"
KERNEL = "__global__ void k{n}(float *x) {{ x[threadIdx.x] *= {n}; }}\nvoid run{n}(float *x) {{ k{n}<<<1, 1>>>(x); }}\n"
MODULE = """
#include <stdexcept>
#include <string>
extern "C" {{
int PyModule_Create2(void *, int);
{declared}
void *PyInit_{name}() {{
  {calls}
  if (PyModule_Create2(nullptr, 3) == 7) throw std::runtime_error(std::string("x"));
  return nullptr;
}}
}}
"""


def module(name, *functions):
    return MODULE.format(
        name=name, declared="".join(f"int {f}(int);\n" for f in functions),
        calls="".join(f"{f}(0);" for f in functions),
    )  # fmt: skip


@pytest.fixture(scope="session")
def parts(tools, tmp_path_factory):
    """The pieces: objects, libraries, and the good contents of the wheel."""
    folder = tmp_path_factory.mktemp("parts")
    good = ["-gencode=arch=compute_121a,code=sm_121a"]
    objects = [tools.nvcc(KERNEL.format(n=n), folder / f"k{n}.o", *good) for n in (1, 2)]
    stub = folder / "stub"
    stub.mkdir()
    tools.shared(stub / "libtorch.so", "-Wl,-soname,libtorch.so", source="")
    torch = ["-Wl,--no-as-needed", f"-L{stub}", "-ltorch", "-Wl,--as-needed"]

    class Parts:
        def c(self, *third):
            extra = tools.nvcc(KERNEL.format(n=3), folder / "k3.o", *third)
            return tools.shared(
                folder / "c.so", *objects, extra, *torch, "-lcudart",
                source=module("_C_stable_libtorch", "aoti_torch_get_dim"),
            ).read_bytes()  # fmt: skip

        def cumem(self, *flags):
            return tools.shared(
                folder / "cumem.so", "-Wl,--as-needed", *flags, "-lcuda",
                source=module("cumem_allocator", "cuMemRelease", "cuMemCreate"),
            ).read_bytes()  # fmt: skip

        def spinloop(self, *flags):
            return tools.shared(
                folder / "spin.so", *torch, *flags, source=module("spinloop")
            ).read_bytes()

        empty_stub = folder / "empty"

    made = Parts()
    made.empty_stub.mkdir()
    tools.shared(made.empty_stub / "libcuda.so", "-Wl,-soname,libcuda.so.1", source="")
    made.good = {SPINLOOP: made.spinloop(), CUMEM: made.cumem(), C: made.c(*good)}
    return made


@pytest.fixture(scope="session")
def family(locked, layout):
    """torch with all of its CUDA libraries, as the lock has them."""
    everything = locked("family", "aarch64", None)
    return [p for n, p in everything.items() if n == "torch" or n.startswith("nvidia-")]


@pytest.fixture
def check(tmp_path, family, layout):
    def run(files, *, name=NAME, built=BUILT):
        house = tmp_path / "wheelhouse"
        shutil.rmtree(house, ignore_errors=True)
        house.mkdir()
        for wheel in family:
            (house / wheel.name).symlink_to(wheel)
        write_wheel(house, name, files)
        # The family's are links into the cache, whose folders are named by the hash.
        wheels = [
            listed(p, p.resolve().parent.name if p.is_symlink() else "")
            for p in house.glob("*.whl")
        ]
        text = manifest_text(
            wheels, target="linux-aarch64", profile="kernels",
            components={"built": built, "left_out": {}},
        )  # fmt: skip
        (house / "manifest.json").write_text(text)
        return verify(
            [house], policy=load_policy(), target=TARGET, arch="12.1a", cache=layout.cache
        )

    return run


def only(report, kind, *words):
    """Exactly faults of one kind, whose text has the words."""
    assert report.result == "fail"
    assert {f.kind for f in report.faults} == {kind}, [f.text for f in report.faults]
    text = " / ".join(f"{f.file}: {f.text}" for f in report.faults)
    for word in words:
        assert word in text, text


def test_the_good_one_passes(check, parts):
    report = check(parts.good)
    assert report.faults == ()
    assert report.result == "pass"
    row = next(c for c in report.components if c.file == C)
    assert (row.sass, row.ptx, row.none, row.verdict) == (3, 0, 0, "native")
    assert next(b for b in report.binaries if b.file == CUMEM).symbols >= 3


def test_empty_driver_stub(check, parts):
    worse = parts.good | {CUMEM: parts.cumem(f"-L{parts.empty_stub}")}
    only(check(worse), "symbol", CUMEM, "cuMemRelease", "libcuda.so.1 (the driver) should have it")


@pytest.mark.parametrize(
    ("path", "word"), [("/home/builder/lib", "absolute"), ("$ORIGIN:", "current directory")]
)
def test_runpath(check, parts, path, word):
    worse = parts.good | {SPINLOOP: parts.spinloop("-Wl,--enable-new-dtags", f"-Wl,-rpath,{path}")}
    only(check(worse), "search-path", SPINLOOP, "RUNPATH", word)


@pytest.mark.parametrize("arch", ["75", "120a"])
def test_one_object_for_another_gpu(check, parts, arch):
    worse = parts.good | {C: parts.c(f"-gencode=arch=compute_{arch},code=sm_{arch}")}
    only(
        check(worse),
        "gpu-code",
        "1 of 3 objects of _C_stable_libtorch",
        f"sm_{arch}",
        "wanted: sm_121a",
    )


def test_arch_list_lost(check, parts):
    only(check(parts.good | {C: parts.c()}), "gpu-code", "PTX JIT", "compute_75")


def test_component_missing(check, parts):
    worse = {p: d for p, d in parts.good.items() if p != CUMEM}
    only(check(worse), "component", "component cumem_allocator is missing", "profile kernels")


def test_code_of_another_machine(check, parts):
    data = bytearray(parts.good[SPINLOOP])
    struct.pack_into("<H", data, 18, 62)
    only(check(parts.good | {SPINLOOP: bytes(data)}), "machine", SPINLOOP, "x86_64", "aarch64")


@pytest.mark.parametrize("path", [SPINLOOP, C])
def test_cut_in_half(check, parts, path):
    data = parts.good[path]
    report = check(parts.good | {path: data[: len(data) // 2]})
    assert "damaged" in {f.kind for f in report.faults}
    damaged = next(f for f in report.faults if f.kind == "damaged")
    assert damaged.file == path
    assert "cut off" in damaged.text


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (C, b"\0aoti_torch_get_dim\0", b"\0aoti_torch_get_din\0"),
        (CUMEM, b"\0cuMemRelease\0", b"\0cuMemReleasf\0"),
        (SPINLOOP, b"\0PyModule_Create2\0", b"\0PyModule_Create9\0"),
        (SPINLOOP, b"\0_ZNSt13runtime_errorD1Ev\0", b"\0_ZNSt13runtime_errosD1Ev\0"),
    ],
)
def test_one_letter_of_a_symbol(check, parts, path, old, new):
    data = parts.good[path]
    assert data.count(old) >= 1, f"{old!r} is not in {path}"
    report = check(parts.good | {path: data.replace(old, new)})
    named = new.strip(b"\0").decode()
    assert [(f.file, f.names) for f in report.faults if f.kind == "symbol"] == [(path, (named,))]
    # A misspelt Py name is outside the stable ABI, too.
    assert {f.kind for f in report.faults} <= {"symbol", "abi3"}


def test_wheel_for_another_platform(check, parts):  # cases.md 22
    report = check(parts.good, name=NAME.replace("aarch64", "x86_64"))
    assert "no matching platform tag" in " ".join(f.text for f in report.faults)


@pytest.mark.parametrize("mixed", [False, True])
def test_cutedsl_files(locked, tmp_path, layout, mixed):
    """An environment of both 4.5.1 packages: cu13's files on top, or some of base's."""
    base_name, winner_name = "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13"
    wheels = locked("family", "aarch64", (base_name, winner_name))
    site = tmp_path / "site"
    for name in (base_name, winner_name):
        with zipfile.ZipFile(wheels[name]) as archive:
            archive.extractall(site)
    common = {"policy": load_policy(), "target": TARGET, "arch": "12.1a", "cache": layout.cache}
    if mixed:
        with (
            zipfile.ZipFile(wheels[base_name]) as base,
            zipfile.ZipFile(wheels[winner_name]) as other,
        ):
            shared = set(base.namelist()) & set(other.namelist())
            differ = sorted(
                n for n in shared if n.endswith(".py") and base.read(n) != other.read(n)
            )
            assert len(differ) > 3
            for member in differ[:3]:
                (site / member).write_bytes(base.read(member))
    report = verify([], env=site, **common)
    mixture = [f for f in report.faults if f.kind == "mixture"]
    if mixed:
        assert mixture[0].names == tuple(differ[:3])
        assert "mixed" in mixture[0].text
    else:
        assert mixture == []
