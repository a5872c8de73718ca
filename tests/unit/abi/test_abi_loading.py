"""The loader's scope and symbol lookup."""

import pytest
from make import Sym, context, elf, wheel

from sm121.abi.elf import Exports, Import
from sm121.abi.loading import findings, resolve
from sm121.abi.policy.load import load_policy
from sm121.abi.scope import Scene, search_folders
from sm121.abi.symbols import defines

VLLM = "vllm-0.26.0+sm121.smoke.1-cp311-abi3-linux_aarch64.whl"
TORCH = "torch-2.11.0-cp312-cp312-manylinux_2_28_aarch64.whl"


def imported(name, version="", library=""):
    return Import(name=name, version=version, library=library, weak=False)


@pytest.mark.parametrize(
    ("exports", "symbol", "found"),
    [
        (Exports(plain=frozenset("f"), base=frozenset("f")), imported("f"), True),
        (Exports(plain=frozenset("f"), base=frozenset("f")), imported("g"), False),
        # A versioned reference is satisfied by a library without versions (dl-lookup.c).
        (Exports(plain=frozenset("f"), base=frozenset("f")), imported("f", "V1", "l"), True),
        (Exports(versioned=True, exact=frozenset(["f@V1"]), plain=frozenset("f")), imported("f", "V1", "l"), True),
        (Exports(versioned=True, exact=frozenset(["f@V1"]), plain=frozenset("f")), imported("f", "V2", "l"), False),
        # … and by a symbol without a version of its own in a versioned one.
        (Exports(versioned=True, base=frozenset("f"), plain=frozenset("f")), imported("f", "V2", "l"), True),
        (Exports(versioned=True, exact=frozenset(["f@V1"])), imported("f"), False),
    ],
)  # fmt: skip
def test_name_and_version(exports, symbol, found):
    assert defines(exports, symbol) is found


def judged(*wheels, others=()):
    ctx = context(*wheels, others=others)
    found, rows = findings(ctx, resolve(ctx), ())
    return [f for f in found if f.severity == "fault"], rows


def torch(**more):
    return wheel(
        TORCH,
        {
            "torch/lib/libc10.so": elf([Sym(name="_ZN3c105errorEv", defined=True)], soname="libc10.so"),
            "torch/lib/libtorch.so": elf(soname="libtorch.so", needed=["libc10.so"], rpath="$ORIGIN"),
            "torch/_C.cpython-312-aarch64-linux-gnu.so": elf(
                [Sym(name="PyInit__C", defined=True)], needed=["libtorch.so"], rpath="$ORIGIN/lib"
            ),
            **more,
        },
    )  # fmt: skip


def extension(*symbols, needed=("libtorch.so", "libc.so.6"), **more):
    return elf([*symbols, Sym(name="PyInit_x", defined=True)], needed=needed, **more)


def test_torch_is_found_by_soname_without_a_search_path():
    ext = extension(Sym(name="_ZN3c105errorEv"))
    assert judged(wheel(VLLM, {"vllm/x.abi3.so": ext}), others=[torch()])[0] == []


def test_undefined_symbol_is_named_demangled():  # cases.md 2 and 5
    ext = extension(Sym(name="_ZN3c106vanishEv"), Sym(name="cutlass_moe_mm_sm100"))
    faults, rows = judged(wheel(VLLM, {"vllm/x.abi3.so": ext}), others=[torch()])
    assert [f.kind for f in faults] == ["symbol", "symbol"]
    by_name = {r.name: r for r in rows}
    assert by_name["_ZN3c106vanishEv"].demangled == "c10::vanish()"
    assert by_name["_ZN3c106vanishEv"].expected_in == "libc10.so"
    assert by_name["cutlass_moe_mm_sm100"].needed_by == "vllm/x.abi3.so"
    assert "cutlass_moe_mm_sm100" in " ".join(f.text for f in faults)


def test_neighbours_say_who_has_it():
    ext = extension(Sym(name="_ZN3c106vanishEv"))
    old = wheel(
        "torch-2.10.0-cp312-cp312-manylinux_2_28_aarch64.whl",
        {
            "torch/lib/libc10.so": elf(
                [Sym(name="_ZN3c106vanishEv", defined=True)], soname="libc10.so"
            )
        },
    )
    ctx = context(wheel(VLLM, {"vllm/x.abi3.so": ext}), others=[torch()])
    found, rows = findings(ctx, resolve(ctx), [old])
    assert rows[0].found_in == ("torch 2.10.0: torch/lib/libc10.so",)
    assert "torch 2.10.0" in found[0].text


def test_one_letter_off():
    ext = extension(Sym(name="_ZN3c105errosEv"))
    faults, _ = judged(wheel(VLLM, {"vllm/x.abi3.so": ext}), others=[torch()])
    assert len(faults) == 1


def test_system_symbols_by_name_and_version():
    good = extension(Sym(name="memcpy", version="GLIBC_2.17", library="libc.so.6"))
    bad = extension(Sym(name="memcpi", version="GLIBC_2.17", library="libc.so.6"))
    assert judged(wheel(VLLM, {"vllm/x.abi3.so": good}), others=[torch()])[0] == []
    faults, _ = judged(wheel(VLLM, {"vllm/x.abi3.so": bad}), others=[torch()])
    assert "memcpi" in faults[0].text
    assert "libc.so.6" in faults[0].text


def test_python_symbols_against_the_interpreter():
    def one(name):
        return judged(wheel(VLLM, {"vllm/x.abi3.so": extension(Sym(name=name))}), others=[torch()])[
            0
        ]

    assert one("PyModule_Create2") == []
    assert "the Python interpreter" in one("PyModule_Create3")[0].text


def test_driver_symbols_need_libcuda_in_needed():
    with_it = extension(Sym(name="cuMemRelease"), needed=("libcuda.so.1", "libc.so.6"))
    assert judged(wheel(VLLM, {"vllm/cumem_allocator.abi3.so": with_it}))[0] == []
    # Linked with --as-needed against an empty stub: the entry is lost (facts.md §2).
    without = extension(Sym(name="cuMemRelease"), needed=("libc.so.6",))
    faults, rows = judged(wheel(VLLM, {"vllm/cumem_allocator.abi3.so": without}))
    assert "cuMemRelease" in faults[0].text
    assert rows[0].expected_in == "libcuda.so.1 (the driver)"


def test_the_drivers_libraries_are_the_systems():
    """libnvcuvid is no wheel's; but a name that is not the decoder's does not come from it."""
    for symbol, open_ones in (("cuvidCreateDecoder", 0), ("NvEncodeAPICreateInstance", 1)):
        one = extension(Sym(name=symbol), needed=("libnvcuvid.so.1", "libc.so.6"))
        faults, _ = judged(wheel(VLLM, {"vllm/x.abi3.so": one}))
        assert len(faults) == open_ones


def test_a_missing_library_is_one_fault_not_a_hundred():
    ext = extension(Sym(name="a"), Sym(name="b"), needed=("libgone.so.1", "libc.so.6"))
    faults, rows = judged(wheel(VLLM, {"vllm/x.abi3.so": ext}))
    assert [f.kind for f in faults] == ["library"]
    assert "libgone.so.1" in faults[0].text
    assert rows == []


def test_weak_is_no_fault():
    assert judged(wheel(VLLM, {"vllm/x.abi3.so": extension(Sym(name="maybe", weak=True), needed=["libc.so.6"])}))[0] == []  # fmt: skip


def test_other_interpreters_modules_are_not_looked_at():
    name = "vllm/third_party/deep_gemm/_C.cpython-313-aarch64-linux-gnu.so"
    assert judged(wheel(VLLM, {name: extension(Sym(name="gone"), needed=["libc.so.6"])}))[0] == []


def test_a_library_may_rely_on_what_its_user_brings():
    """libinner's symbol is defined by a sibling that only the extension needs."""
    files = {
        "vllm/x.abi3.so": extension(
            needed=["libinner.so", "libhelp.so", "libc.so.6"], runpath="$ORIGIN"
        ),
        "vllm/libinner.so": elf([Sym(name="help")], soname="libinner.so", needed=["libc.so.6"]),
        "vllm/libhelp.so": elf([Sym(name="help", defined=True)], soname="libhelp.so"),
    }
    assert judged(wheel(VLLM, files))[0] == []


def test_missing_version_in_a_library_of_the_set():
    files = {
        "vllm/x.abi3.so": extension(Sym(name="f", version="V2", library="libv.so"), needed=["libv.so", "libc.so.6"], runpath="$ORIGIN"),
        "vllm/libv.so": elf([Sym(name="f", defined=True, version="V1")], soname="libv.so"),
    }  # fmt: skip
    faults, _ = judged(wheel(VLLM, files))
    assert {f.kind for f in faults} == {"symbol", "symbol-version"}


def test_optional_plugins_are_notes():
    path = "nvidia/nvshmem/lib/nvshmem_transport_ucx.so.3"
    one = wheel(
        "nvidia_nvshmem_cu13-3.4.5-py3-none-manylinux2014_aarch64.whl",
        {path: elf(needed=["libucp.so.0"])},
    )
    ctx = context(one)
    found, _ = findings(ctx, resolve(ctx), ())
    assert [f.severity for f in found] == ["note"]
    assert "nvshmem plugins" in found[0].why


class TestSearch:
    def scene(self, **files):
        one = wheel(VLLM, {p.replace("__", "/"): d for p, d in files.items()})
        return Scene([one], machine="aarch64", system=["libc.so.6"])

    def test_rpath_is_inherited_and_runpath_is_not(self):
        deep = elf(soname="libb.so", needed=["libc1.so"])
        leaf = elf(soname="libc1.so")
        for tag, expected in (("rpath", []), ("runpath", ["libc1.so"])):
            scene = self.scene(
                a=elf(needed=["libb.so"], **{tag: "$ORIGIN/lib"}),
                **{"lib__libb.so": deep, "lib__libc1.so": leaf},
            )
            closure = scene.closure(scene.files["a"])
            assert [name for _, name in closure.missing] == expected

    def test_runpath_switches_rpath_off(self):
        scene = self.scene(a=elf(needed=["libb.so"], rpath="$ORIGIN/lib", runpath="$ORIGIN/no"), **{"lib__libb.so": elf(soname="libb.so")})  # fmt: skip
        assert scene.closure(scene.files["a"]).missing[0][1] == "libb.so"

    def test_already_loaded_wins_over_the_search(self):
        scene = self.scene(
            a=elf(needed=["libb.so"], rpath="$ORIGIN/one"),
            **{"one__libb.so": elf(soname="libb.so"), "two__libb.so": elf(soname="libb.so")},
        )
        other = scene.files["two/libb.so"]
        assert scene.closure(scene.files["a"], [other]).objects[1] is other
        assert scene.closure(scene.files["a"]).objects[1] is scene.files["one/libb.so"]

    def test_breadth_first(self):
        scene = self.scene(
            a=elf(needed=["l1.so", "l2.so"], rpath="$ORIGIN"),
            **{"l1.so": elf(soname="l1.so", needed=["l3.so"]), "l2.so": elf(soname="l2.so"),
               "l3.so": elf(soname="l3.so")},
        )  # fmt: skip
        assert [o.path for o in scene.closure(scene.files["a"]).objects] == [
            "a",
            "l1.so",
            "l2.so",
            "l3.so",
        ]

    def test_folders(self):
        assert search_folders("$ORIGIN/../x:/abs:${ORIGIN}::rel", "p/q/r.so") == ["p/x", "p/q"]


@pytest.mark.parametrize(("torch", "covered"), [("24", True), ("29", True), ("211", False), ("213", False)])  # fmt: skip
def test_only_add_ons_for_other_torches_may_lack_symbols(torch: str, covered: bool) -> None:
    """torch-c-dlpack-ext has one library per torch; core.py opens that of torch's own version."""
    path = f"torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch{torch}-cuda.so"
    found = [rule for rule in load_policy().optional if rule.covers(path, "torch-c-dlpack-ext", "0.1.5")]  # fmt: skip
    assert bool(found) == covered


@pytest.mark.parametrize(
    ("name", "covered"),
    [
        ("core8", True),
        ("custom_ops4", True),
        ("heic", True),
        ("pybind_ops", False),
        ("image", False),
    ],
)
def test_only_what_ffmpeg_or_libheif_is_for_may_lack_them(name: str, covered: bool) -> None:
    """torchcodec opens the others whenever it is imported."""
    path = f"torchcodec/libtorchcodec_{name}.so"
    found = [rule for rule in load_policy().optional if rule.covers(path, "torchcodec", "0.17.0")]
    assert bool(found) == covered
