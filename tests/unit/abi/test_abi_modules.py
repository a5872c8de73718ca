"""Under which name an extension module is imported."""

from make import Sym, context, elf, wheel

from sm121.abi.modules import Extension, extension_modules, import_roots


def module(*inits):
    return elf([Sym(name=f"PyInit_{name}", defined=True) for name in inits])


def names(files, roots=()):
    one = wheel("pkg-1-cp312-cp312-linux_aarch64.whl", files)
    return {e.file: (e.name, e.inits) for e in extension_modules(context(one), roots)}


def test_name_and_init():
    files = {
        "pkg/own.abi3.so": module("own"),
        "pkg/several.cpython-312-aarch64-linux-gnu.so": module("several", "inner"),
        "pkg/libops.so": module("core_ops"),
        "pkg/other.cpython-313-aarch64-linux-gnu.so": module("other"),
        "pkg/libplain.so": elf(),
    }
    assert names(files) == {
        "pkg/own.abi3.so": ("pkg.own", ()),
        "pkg/several.cpython-312-aarch64-linux-gnu.so": ("pkg.several", ()),
        "pkg/libops.so": ("pkg.libops", ("core_ops",)),
    }


def test_a_folder_that_is_on_the_path():
    files = {"a/b/pkg/x.so": module("x"), "a/y.so": module("y"), "ab/z.so": module("z")}
    found = {path: name for path, (name, _) in names(files, ["a", "a/b"]).items()}
    assert found == {"a/b/pkg/x.so": "pkg.x", "a/y.so": "y", "ab/z.so": "ab.z"}


def test_two_files_of_one_name():
    """Python takes the one whose suffix it tries first; the other keeps a row of its own."""
    files = {
        "pkg/x.so": module("x"), "pkg/x.abi3.so": module("x"), "pkg/x-1.so": module("x-1"),
        "pkg/x.cpython-312-aarch64-linux-gnu.so": module("x"), "pkg/y.so": module("y"),
        "pkg/z.so.1": module("z"),
    }  # fmt: skip
    one = wheel("pkg-1-cp312-cp312-linux_aarch64.whl", files)
    found = extension_modules(context(one))
    first = "pkg/x.cpython-312-aarch64-linux-gnu.so"
    assert [(e.label, e.behind) for e in found] == [
        ("pkg.x", ""), ("pkg.x (pkg/x.abi3.so)", first), ("pkg.x (pkg/x.so)", first),
        ("pkg.x-1", ""), ("pkg.y", ""), ("pkg.z.so.1", ""),
    ]  # fmt: skip
    assert found[0].file == first


def test_one_name_in_two_folders_of_the_path():
    files = {"b/x.cpython-312-aarch64-linux-gnu.so": module("x"), "a/x.so": module("x")}
    one = wheel("pkg-1-cp312-cp312-linux_aarch64.whl", files)
    for roots in (["a", "b"], ["b", "a"]):
        first, second = extension_modules(context(one), roots)
        assert (first.file[0], second.file[0]) == tuple(roots)
        assert second.behind == first.file


def test_a_path_of_two_wheels_is_one_module():
    wheels = [
        wheel(f"{name}-1-py3-none-any.whl", {"pkg/x.abi3.so": module("x")}) for name in ("a", "b")
    ]
    assert [e.label for e in extension_modules(context(*wheels))] == ["pkg.x"]


def test_packages_and_their_folders():
    one = Extension(name="pkg.sub.x", file="a/b/pkg/sub/x.so")
    assert list(one.parents()) == [("pkg", "a/b/pkg"), ("pkg.sub", "a/b/pkg/sub")]
    assert list(Extension(name="x", file="x.so").parents()) == []


def test_roots_are_folders_that_pth_files_name(tmp_path):
    (tmp_path / "in/side").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    lines = ["# x", "import os", "", "in/side/", "gone", "/usr", "../outside", "./in"]
    (tmp_path / "x.pth").write_text("\n".join(lines))
    assert import_roots(tmp_path) == ["in/side"]
