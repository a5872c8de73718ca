"""Damaged environments: what is found, why it matters, and what a repair would remove."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sm121.errors import UsageFault
from sm121.repair.compare import Comparison, compare
from sm121.repair.installed import Environment, open_environment
from sm121.repair.restore import files_to_remove, remove
from sm121.repair.wheel import rewrite_wheel
from sm121.rules.model import load_rules
from support.environments import fake_environment, family, read_all, snapshot, unpack
from support.wheels import make_wheel

RULES = load_rules(Path(__file__).parents[3] / "pins")


class Node:
    """An environment with the small family installed, and what it should be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = family(folder / "wheelhouse")
        self.site = fake_environment(folder / "env")
        for wheel in self.wheels.values():
            unpack(wheel, self.site)

    @property
    def environment(self) -> Environment:
        return open_environment(self.folder / "env")

    def compare(self) -> Comparison:
        return compare(self.environment, read_all(self.wheels), RULES, machine="aarch64")

    def deviating(self) -> list[str]:
        return [d.distribution for d in self.compare().deviations]

    def doomed(self) -> set[str]:
        files = files_to_remove(self.environment, self.compare(), read_all(self.wheels))
        return {str(f.relative_to(self.site)) for f in files}

    def put(self, name: str, version: str, files: dict[str, bytes]) -> None:
        """Another wheel over it, as pip would: the old dist-info goes, RECORD'd files too."""
        for old in self.site.glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        unpack(make_wheel(self.folder / "other", files, name=name, version=version), self.site)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_whole_environment_does_not_deviate(node: Node) -> None:
    found = node.compare()
    assert found.deviations == ()
    assert found.extras == ()
    assert found.files == sum(len(w.installed()) for w in read_all(node.wheels).values())


def test_torch_of_another_build_is_found_by_its_files(node: Node) -> None:
    """cases.md 1: same name, same version."""
    node.put(
        "torch", "2.11.0",
        {"torch/version.py": b"__version__ = '2.11.0+cpu'\n", "torch/lib/libtorch.so": b"cpu"},
    )  # fmt: skip
    (found,) = node.compare().deviations
    assert (found.distribution, found.kind) == ("torch", "files")
    assert "rule torch-cpu" in found.why
    assert "undefined symbols" in found.why
    assert set(found.files) >= {"torch/version.py", "torch/lib/libtorch.so"}


def test_torch_of_another_version(node: Node) -> None:
    """cases.md 1: torch 2.13 beside torchvision for 2.11."""
    node.put("torch", "2.13.0", {"torch/lib/libtorch.so": b"213", "torch/lib/new.so": b"x"})
    (found,) = node.compare().deviations
    assert (found.kind, found.found) == ("version", "2.13.0")
    assert found.wanted == "2.11.0 (torch-2.11.0-py3-none-any.whl)"
    assert "torch/lib/new.so" in node.doomed()


def test_cpu_only_torchvision(node: Node) -> None:
    """cases.md 6: it imports cleanly."""
    node.put("torchvision", "0.26.0", {"torchvision/version.py": b"__version__ = '0.26.0+cpu'\n"})
    (found,) = node.compare().deviations
    assert found.distribution == "torchvision"
    assert "nms" in found.why


def test_old_nccl_names_the_deadlock(node: Node) -> None:
    """cases.md 10: what a pip install of torch brings back."""
    node.put("nvidia_nccl_cu13", "2.28.9", {"nvidia/nccl/lib/libnccl.so.2": b"2.28.9"})
    (found,) = node.compare().deviations
    assert found.found == "2.28.9"
    assert "rule nccl-graph-replay" in found.why


def test_cutedsl_component_of_another_version(node: Node) -> None:
    """cases.md 7."""
    node.put("nvidia_cutlass_dsl_libs_cu13", "4.5.2", {"cutlass/cute.py": b"cu13 = 2\n"})
    found = {d.distribution: d for d in node.compare().deviations}
    assert found["nvidia-cutlass-dsl-libs-cu13"].found == "4.5.2"


def test_mixed_files_of_equal_versions_are_named(node: Node) -> None:
    """cases.md 7: the vendor's base over cu13; both claim 4.5.1."""
    node.put(
        "nvidia_cutlass_dsl_libs_base", "4.5.1",
        {"cutlass/LICENSE": b"base", "cutlass/_mlir.so": b"\x7fELF12", "cutlass/cute.py": b"cu12\n"},
    )  # fmt: skip
    found = {d.distribution: d for d in node.compare().deviations}
    assert set(found) == {"nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13"}
    assert set(found["nvidia-cutlass-dsl-libs-cu13"].files) == {
        "cutlass/_mlir.so", "cutlass/cute.py",
    }  # fmt: skip
    assert {"cutlass/_mlir.so", "cutlass/cute.py"} <= node.doomed()


def test_uninstalled_component(node: Node) -> None:
    for path in ("cutlass/_mlir.so", "cutlass/cute.py"):
        (node.site / path).unlink()
    shutil.rmtree(node.site / "nvidia_cutlass_dsl_libs_cu13-4.5.1.dist-info")
    (found,) = node.compare().deviations
    assert (found.kind, found.found) == ("not installed", "nothing")
    assert node.doomed() == set()


def test_deleted_dist_info(node: Node) -> None:
    """cases.md 19."""
    shutil.rmtree(node.site / "torch-2.11.0.dist-info")
    (found,) = node.compare().deviations
    assert (found.distribution, found.kind) == ("torch", "no dist-info")
    assert "2 of its files" in found.found


@pytest.mark.parametrize("missing", ["RECORD", "METADATA"])
def test_damaged_dist_info(node: Node, missing: str) -> None:
    (node.site / "torch-2.11.0.dist-info" / missing).unlink()
    (found,) = node.compare().deviations
    assert (found.kind, found.found) == ("damaged dist-info", f"{missing} is missing")


def test_two_dist_infos_of_one_distribution(node: Node) -> None:
    unpack(make_wheel(node.folder / "other", {}, name="torch", version="2.9.1"), node.site)
    (found,) = node.compare().deviations
    assert (found.kind, found.found) == ("twice", "2.11.0 and 2.9.1")


def test_truncated_library(node: Node) -> None:
    library = node.site / "torch/lib/libtorch.so"
    library.write_bytes(library.read_bytes()[:-1])
    (found,) = node.compare().deviations
    assert found.files == {"torch/lib/libtorch.so": "cut short"}


def test_unrelated_package_is_mentioned_and_left_alone(node: Node) -> None:
    unpack(make_wheel(node.folder / "other", {"extra.py": "x"}, name="extra"), node.site)
    (node.site / "torch/version.py").unlink()
    found = node.compare()
    assert [e.distribution for e in found.extras] == ["extra"]
    assert [d.distribution for d in found.deviations] == ["torch"]
    assert not any(path.startswith("extra") for path in node.doomed())


def test_record_that_is_wrong_in_the_wheel_itself_is_no_deviation(node: Node) -> None:
    """PyNvVideoCodec 2.0.4's RECORD has other sizes than its files."""
    good = node.wheels["torchvision"]
    info = "torchvision-0.26.0.dist-info"
    wrong = make_wheel(node.folder / "wrong", {"torchvision/_C.so": b"before auditwheel"},
                       name="torchvision", version="0.26.0")  # fmt: skip
    del good
    import zipfile

    broken = node.folder / "wheelhouse2" / wrong.name
    broken.parent.mkdir()
    with zipfile.ZipFile(wrong) as old, zipfile.ZipFile(broken, "w") as new:
        for name in old.namelist():
            data = b"after, and longer" * 3 if name.endswith("_C.so") else old.read(name)
            new.writestr(name, data)
    shutil.rmtree(node.site / "torchvision")
    shutil.rmtree(node.site / info)
    node.wheels["torchvision"] = broken
    unpack(broken, node.site)
    assert node.deviating() == []
    (node.site / "torchvision/_C.so").write_bytes(b"something else")
    assert node.deviating() == ["torchvision"]


def test_hostile_record_reaches_nothing_outside(node: Node, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.write_text("keep")
    record = node.site / "torch-2.11.0.dist-info/RECORD"
    up = "/".join([".."] * 4)
    record.write_text(record.read_text() + f"{up}/precious,,\n/{outside},,\n")
    (node.site / "torch/version.py").unlink()
    assert node.deviating() == ["torch"]
    remove(node.environment, files_to_remove(
        node.environment, node.compare(), read_all(node.wheels)
    ))  # fmt: skip
    assert outside.read_text() == "keep"


def test_removing_touches_only_what_deviates(node: Node) -> None:
    (node.site / "torch/__pycache__").mkdir()
    (node.site / "torch/__pycache__/version.cpython-312.pyc").write_bytes(b"old")
    (node.site / "torch/version.py").write_text("wrong")
    before = snapshot(node.site)
    remove(node.environment, files_to_remove(
        node.environment, node.compare(), read_all(node.wheels)
    ))  # fmt: skip
    after = snapshot(node.site)
    gone = before.keys() - after.keys()
    assert {path.split("/")[0] for path in gone} == {"torch", "torch-2.11.0.dist-info"}
    assert all(before[path] == after[path] for path in after)
    assert not (node.site / "torch").exists()


def test_leftovers_of_an_unknown_version_are_removed_with_it(node: Node) -> None:
    """A half-deleted torch: files of another build that no RECORD names any more."""
    shutil.rmtree(node.site / "torch-2.11.0.dist-info")
    (node.site / "torch/lib/libold.so").write_bytes(b"old")
    (found,) = node.compare().deviations
    assert found.leftovers == ("torch/lib/libold.so",)
    assert "torch/lib/libold.so" in node.doomed()


def test_repaired_wheels_note_is_compared_too(node: Node, tmp_path: Path) -> None:
    """The vendor's torch in place of the repaired one differs only in its dist-info."""
    repaired = tmp_path / "repaired" / "torch-2.11.0-1sm121-py3-none-any.whl"
    repaired.parent.mkdir()
    rewrite_wheel(
        node.wheels["torch"], repaired, edits={"torch-2.11.0.dist-info/sm121-repair.json": b"{}"}
    )
    node.wheels["torch"] = repaired
    (found,) = node.compare().deviations
    assert set(found.files) == {"torch-2.11.0.dist-info/sm121-repair.json"}


def test_folder_that_is_no_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="not a virtual environment"):
        open_environment(tmp_path)
