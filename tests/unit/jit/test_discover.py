"""Every way in which the path names a kernel; a kernel that is added is seen."""

from __future__ import annotations

from pathlib import Path

from sm121.jit.discover import Kernel, discover
from support.jit import AVOID, write_tree


def found(root: Path, avoid: tuple[str, ...] = AVOID) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in discover(root, "vllm.models.net", avoid=avoid)}


def test_each_family_is_found_and_what_nobody_names_is_not(tmp_path: Path) -> None:
    kernels = found(write_tree(tmp_path))
    assert {name: kernel.family for name, kernel in kernels.items()} == {
        "vllm.models.net.model:norm": "triton",
        "vllm.models.net.model:helper": "triton",
        "vllm.ops.cute:Gather": "cutedsl",
        "vllm.ops.tl:mix": "tilelang",
        "vllm.utils.deep_gemm:gemm": "deepgemm",
        "flashinfer.mla:decode": "flashinfer",
    }


def test_what_only_kernels_call_is_a_helper(tmp_path: Path) -> None:
    kernels = found(write_tree(tmp_path))
    assert [name for name, kernel in kernels.items() if kernel.helper] == [
        "vllm.models.net.model:helper"
    ]


def test_where_and_how_it_is_reached(tmp_path: Path) -> None:
    mix = found(write_tree(tmp_path))["vllm.ops.tl:mix"]
    assert mix.file == "vllm/ops/tl.py"
    assert mix.via == ("vllm.ops.tl:_mix_op", "vllm.models.net.model:Model")


def test_other_platforms_are_avoided_by_pattern_only(tmp_path: Path) -> None:
    write_tree(tmp_path)
    assert "vllm.models.net.amd.model:other_platform" in found(tmp_path, avoid=())
    assert "vllm.models.net.amd.model:other_platform" not in found(tmp_path)


def test_a_single_definition_can_be_avoided(tmp_path: Path) -> None:
    kernels = found(write_tree(tmp_path), (*AVOID, "vllm.models.net.lazy:launch"))
    # lazy.py belongs to the package, so only naming it in the pattern keeps the walk out.
    assert "vllm.ops.cute:Gather" not in kernels


def test_a_new_kernel_is_seen_wherever_it_is_added(tmp_path: Path) -> None:
    more = {
        # Inside launch(), which Model.forward calls.
        "vllm/models/net/lazy.py": """
            def launch():
                from vllm.ops.far import unreached
                unreached[(1,)]()
            """,
        "vllm/models/net/added.py": """
            import triton
            @triton.autotune(configs=[])
            @triton.jit
            def fresh(x): ...
            """,
    }
    kernels = found(write_tree(tmp_path, more))
    assert {"vllm.ops.far:unreached", "vllm.models.net.added:fresh"} <= set(kernels)


def test_a_name_in_a_string_counts_as_a_registry_does(tmp_path: Path) -> None:
    more = {"vllm/models/net/lazy.py": 'def launch():\n    return "vllm.ops.far.unreached"\n'}
    assert "vllm.ops.far:unreached" in found(write_tree(tmp_path, more))


def test_a_library_by_its_own_name(tmp_path: Path) -> None:
    text = """
        def launch():
            import flashinfer
            from flashinfer.rope import rotate
            flashinfer.sampling.top_k(rotate)
            module = _import_deep_gemm()
            module.mega()
        """
    kernels = found(write_tree(tmp_path, {"vllm/models/net/lazy.py": text}))
    assert {"flashinfer.rope:rotate", "flashinfer.sampling:top_k", "deep_gemm:mega"} <= set(kernels)
