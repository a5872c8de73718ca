"""What the tree takes out of the release's wheel, and what is known to be wrong with an environment."""

from __future__ import annotations

import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from sm121.errors import PinsFault, UsageFault
from sm121.jit.base.tree import add_release, release_wheel, write_metadata
from sm121.jit.examine import environment_faults, versions
from sm121.jit.session import prepare
from sm121.repair.installed import open_environment


def test_only_what_the_tree_lacks_is_added(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "vllm/vllm_flash_attn/cute/utils.py", "vllm/vllm_flash_attn/interface.py",
            "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/third_party/deep_gemm/_C.so",
            "vllm/_C.abi3.so", "vllm/envs.py",
        ):  # fmt: skip
            archive.writestr(name, "released")
    tree = tmp_path / "tree"
    (tree / "vllm/vllm_flash_attn").mkdir(parents=True)
    (tree / "vllm/vllm_flash_attn/interface.py").write_text("patched")
    assert add_release(wheel, tree, ("vllm/vllm_flash_attn", "vllm/third_party/deep_gemm")) == 2
    files = {str(p.relative_to(tree)): p.read_text() for p in tree.rglob("*") if p.is_file()}
    assert files == {
        "vllm/vllm_flash_attn/interface.py": "patched",
        "vllm/vllm_flash_attn/cute/utils.py": "released",
        "vllm/third_party/deep_gemm/_C.so": "released",
    }


def test_vllm_finds_its_own_version(tmp_path: Path) -> None:
    write_metadata(tmp_path, "1.2.3")
    (found,) = Distribution.discover(name="vllm", path=[str(tmp_path)])
    assert found.version == "1.2.3"


def test_a_stack_without_the_releases_wheel_or_jit_toml_is_told(small) -> None:
    with pytest.raises(UsageFault, match="pins no release wheel"):
        release_wheel(small)
    with pytest.raises(UsageFault, match=r"no jit\.toml"):
        prepare(small, env=None, tree=None, only=None, seconds=1)


def environment(root: Path, **installed: str) -> Path:
    site = root / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (root / "pyvenv.cfg").write_text("")
    for name, version in installed.items():
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
        (folder / "RECORD").write_text("")
    return root


def test_mixed_components_are_a_fault_although_all_may_compile(root: Path, tmp_path: Path) -> None:
    env = open_environment(
        environment(
            tmp_path / "env", nvidia_cutlass_dsl="4.5.1", nvidia_cutlass_dsl_libs_base="4.5.1",
            nvidia_cutlass_dsl_libs_cu13="4.5.2", tilelang="0.1.9", numpy="1.0",
        )
    )  # fmt: skip
    (fault,) = environment_faults(root / "pins", env)
    assert fault.distribution == "nvidia-cutlass-dsl-libs-cu13"
    assert "4.5.2" in fault.text
    assert "ICE" in fault.symptom
    assert versions(env)["tilelang"] == "0.1.9"
    assert "numpy" not in versions(env)


def test_files_of_another_wheel_over_cu13s_are_a_fault(root: Path, tmp_path: Path) -> None:
    place = environment(
        tmp_path / "env", nvidia_cutlass_dsl="4.5.1", nvidia_cutlass_dsl_libs_base="4.5.1",
        nvidia_cutlass_dsl_libs_cu13="4.5.1",
    )  # fmt: skip
    site = place / "lib/python3.11/site-packages"
    (site / "lib.so").write_text("base's")
    record = site / "nvidia_cutlass_dsl_libs_cu13-4.5.1.dist-info/RECORD"
    record.write_text("lib.so,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n")
    (fault,) = environment_faults(root / "pins", open_environment(place))
    assert "1 files are not its wheel's, e.g. lib.so" in fault.text


def test_a_known_bad_pair_names_what_is_beside(root: Path, tmp_path: Path) -> None:
    env = environment(tmp_path / "env", apache_tvm_ffi="0.1.13.post3", tilelang="0.1.9")
    (fault,) = environment_faults(root / "pins", open_environment(env))
    assert "beside tilelang 0.1.9" in fault.text


def test_a_module_that_stack_toml_lacks_is_told(small, root: Path) -> None:
    folder = small.layout.pins / "1.2.3"
    (folder / "jit.toml").write_text((root / "pins/0.26.0/jit.toml").read_text())
    from sm121.jit.recipes import load_recipes
    from sm121.jit.session import _modules

    with pytest.raises(PinsFault, match="lists no such FlashInfer module"):
        _modules(small, load_recipes(small.layout.pins, "1.2.3"))
