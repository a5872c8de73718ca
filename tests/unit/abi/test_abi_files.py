"""Floors, stable ABI, tags, machines, search paths."""

import pytest
from make import TARGET, Sym, context, elf, wheel

from sm121.abi.floors import abi3_needs, check_abi3, check_floors, floors_of
from sm121.abi.identity import check_identity, check_paths
from sm121.lock.pylock import Target

VLLM = "vllm-0.26.0+sm121.smoke.1-cp311-abi3-linux_aarch64.whl"


def faults(found):
    return [f for f in found if f.severity == "fault"]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"libc.so.6": ["GLIBC_2.39"]}, []),
        ({"libc.so.6": ["GLIBC_2.17", "GLIBC_2.40"]}, ["GLIBC_2.40"]),
        ({"libstdc++.so.6": ["GLIBCXX_3.4.34"]}, ["GLIBCXX_3.4.34"]),
        ({"libstdc++.so.6": ["GLIBCXX_3.4.9", "CXXABI_1.3.15"]}, []),
        ({"libstdc++.so.6": ["CXXABI_1.3.16"]}, ["CXXABI_1.3.16"]),
    ],
)
def test_floors(versions, expected):
    one = wheel(VLLM, {"vllm/a.so": elf(needs=versions)})
    assert [f.names[0] for f in faults(check_floors(context(one)))] == expected


def test_floor_table_compares_numbers_not_text():
    one = wheel(VLLM, {"a.so": elf(needs={"libc.so.6": ["GLIBC_2.9", "GLIBC_2.17"]})})
    assert floors_of(one, context(one)) == {"GLIBC": "2.17"}


def test_abi3_floor_of_a_file():
    def needs(*names):
        one = wheel(VLLM, {"vllm/a.abi3.so": elf([Sym(name=n) for n in names])})
        return abi3_needs(one.binaries[0])

    assert needs("PyBuffer_Release", "PyModule_Create2")[0] == (3, 11)
    assert needs("PyUnicode_AsUTF8AndSize")[0] == (3, 10)
    assert needs("PyUnicode_AsUTF8AndSize")[1] == ["PyUnicode_AsUTF8AndSize"]
    assert needs("_PyObject_GetDictPtr")[2] == ["_PyObject_GetDictPtr"]


def test_abi3_against_tag_and_target():
    files = {"vllm/spinloop.abi3.so": elf([Sym(name="PyBuffer_Release")])}
    assert faults(check_abi3(context(wheel(VLLM, files)))) == []
    wrong = wheel(VLLM.replace("cp311", "cp38"), files)
    assert "promises 3.8" in faults(check_abi3(context(wrong)))[0].text
    old = Target.make("linux-aarch64", python="3.10", glibc="2.39")
    assert (
        "needs CPython 3.11" in faults(check_abi3(context(wheel(VLLM, files), target=old)))[0].text
    )


def test_upstreams_own_tag_is_a_note():
    one = wheel("vllm-0.26.0-cp38-abi3-manylinux_2_28_aarch64.whl", {"vllm/spinloop.abi3.so": elf([Sym(name="PyBuffer_Release")])})  # fmt: skip
    assert [f.severity for f in check_abi3(context(one))] == ["note"]


def test_wrong_machine_inside_a_wheel():
    one = wheel(VLLM, {"vllm/a.so": elf(), "vllm/b.so": elf(machine="x86_64")})
    found = faults(check_identity(context(one)))
    assert [(f.kind, f.file) for f in found] == [("machine", "vllm/b.so")]
    assert "x86_64" in found[0].text
    assert "aarch64" in found[0].text


def test_tag_of_another_platform():  # cases.md 22
    one = wheel("x-1-cp312-cp312-manylinux_2_28_x86_64.whl")
    assert "no matching platform tag" in faults(check_identity(context(one)))[0].text
    new = wheel("x-1-cp312-cp312-manylinux_2_41_aarch64.whl")
    assert "glibc 2.39" in faults(check_identity(context(new)))[0].text
    other = wheel("x-1-cp313-cp313-manylinux_2_28_aarch64.whl")
    assert [f.kind for f in faults(check_identity(context(other)))] == ["tag"]


def test_tag_against_content():
    lying = wheel("x-1-py3-none-any.whl", {"x/a.so": elf()})
    assert "is tagged 'any'" in faults(check_identity(context(lying)))[0].text
    inside = wheel("x-1-cp312-cp312-manylinux_2_28_aarch64.whl", {"x/a.so": elf(machine="x86_64")})
    assert {f.kind for f in faults(check_identity(context(inside)))} == {"machine", "tag"}


def test_half_a_library_is_damage():
    data = elf([Sym(name="x", defined=True)], fatbin=bytes(999))
    one = wheel(VLLM, {"vllm/a.so": data[: len(data) // 2]})
    assert [f.kind for f in faults(check_identity(context(one)))] == ["damaged"]


@pytest.mark.parametrize(
    ("path", "word"),
    [("", "current directory"), ("$ORIGIN:", "current directory"), ("/home/builder/lib", "absolute"),
     ("lib", "relative to the current directory"), ("$ORIGIN/../../..", "leaves site-packages")],
)  # fmt: skip
@pytest.mark.parametrize("tag", ["rpath", "runpath"])
def test_bad_search_paths(path, word, tag):
    one = wheel(VLLM, {"vllm/a.so": elf(**{tag: path})})
    found = faults(check_paths(context(one)))
    assert found, path
    assert word in found[0].text
    assert tag.upper() in found[0].text


@pytest.mark.parametrize("path", ["$ORIGIN", "${ORIGIN}/../torch/lib", "$ORIGIN/lib:$ORIGIN/../x"])
def test_good_search_paths(path):
    assert list(check_paths(context(wheel(VLLM, {"vllm/a.so": elf(runpath=path)})))) == []


def test_release_exceptions_do_not_cover_our_builds():
    files = {"torchvision/_C.so": elf(runpath="/__w/_temp/conda/lib")}
    theirs = wheel("torchvision-0.26.0-cp312-cp312-manylinux_2_28_aarch64.whl", files)
    ours = wheel("torchvision-0.26.0+sm121-cp312-cp312-manylinux_2_28_aarch64.whl", files)
    assert faults(check_paths(context(theirs))) == []
    assert len(faults(check_paths(context(ours)))) == 1


def test_target_is_what_the_tests_think():
    assert TARGET.machine == "aarch64"
