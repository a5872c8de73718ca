"""A small tree with kernels of every family, and jobs over it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.jit.drive import Bench, Told
from sm121.jit.recipes import Recipes
from sm121.jit.results import Results
from sm121.jit.verify import Job

TREE = {
    "vllm/__init__.py": "",
    "vllm/utils/__init__.py": "",
    "vllm/utils/deep_gemm.py": """
        def _lazy_init():
            global _gemm_impl
            _gemm_impl = 1
        def gemm(*args):
            _lazy_init()
            return _gemm_impl(*args)
        def align(x):
            return x
        """,
    "vllm/utils/flashinfer.py": """
        def _lazy_import_wrapper(module, name):
            return None
        attention = _lazy_import_wrapper("flashinfer.mla", "decode")
        other = _lazy_import_wrapper("flashinfer.moe", "never_named")
        """,
    "vllm/ops/__init__.py": "",
    "vllm/ops/cute.py": """
        import cutlass.cute as cute
        class Gather:
            @cute.jit
            def __call__(self): ...
            @cute.kernel
            def kernel(self): ...
        def gather(): Gather()()
        """,
    "vllm/ops/tl.py": """
        import tilelang
        @tilelang.jit(pass_configs={})
        def mix(x): ...
        def _mix_op(x): mix(x)
        direct_register_custom_op(op_name="mix", op_func=_mix_op)
        """,
    "vllm/ops/far.py": """
        from vllm.triton_utils import triton
        @triton.jit
        def unreached(x): ...
        """,
    "vllm/models/__init__.py": "",
    "vllm/models/net/__init__.py": "",
    "vllm/models/net/model.py": """
        import torch
        from vllm.triton_utils import triton
        from vllm.utils import flashinfer as fi
        from .lazy import launch
        @triton.jit
        def helper(x): return x
        @triton.jit(do_not_specialize=["n"])
        def norm(x, n): helper(x)
        class Model:
            def forward(self, x):
                norm[(1,)](x, 3)
                torch.ops.vllm.mix(x)
                fi.attention(x)
                launch()
        """,
    "vllm/models/net/lazy.py": """
        def launch():
            from vllm.ops.cute import gather
            from vllm.utils.deep_gemm import gemm
            gather(); gemm()
        """,
    "vllm/models/net/amd/__init__.py": "",
    "vllm/models/net/amd/model.py": """
        from vllm.triton_utils import triton
        @triton.jit
        def other_platform(x): ...
        """,
}
AVOID = ("*.amd:*", "*.amd.*:*")
KERNELS = {
    "triton": ("vllm.models.net.model:norm",),
    "cutedsl": ("vllm.ops.cute:Gather",),
    "tilelang": ("vllm.ops.tl:mix",),
    "deepgemm": ("vllm.utils.deep_gemm:gemm",),
    "flashinfer": ("flashinfer.mla:decode",),
}


def write_tree(root: Path, more: Mapping[str, str] | None = None) -> Path:
    """The tree below `root`; `more` adds or replaces files."""
    for name, text in {**TREE, **(more or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def make_recipes(real: Recipes, **changes: Any) -> Recipes:
    """Recipes over that tree: limits, shapes and readings of the real ones."""
    recipes = {f"{mode}_one": {mode: list(names)} for mode, names in KERNELS.items()}
    data: dict[str, Any] = {
        "schema": 1, "package": "vllm.models.net",
        "shapes": real.shapes.model_dump(), "limits": real.limits.model_dump(by_alias=True),
        "release": {"folders": []}, "recipes": recipes,
        "avoid": [{"patterns": list(AVOID), "reason": "other platforms"}],
        "readings": [r.model_dump(by_alias=True) for r in real.readings],
        **changes,
    }  # fmt: skip
    return Recipes.model_validate(data)


def record(kernel: str, family: str, **changes: Any) -> dict[str, Any]:
    """What a compilation told, after its cubin was read."""
    code = {"sm": 121, "name": "k", "registers": 40, "threads": 128, "shared": 1024, "stack": 0}
    return {
        "family": family, "kernel": kernel, "mode": family, "variant": {}, "seconds": 1.5,
        "ptxas": "", "target": "sm_121a", "codes": [code], **changes,
    }  # fmt: skip


def all_told() -> dict[tuple[str, str], Told]:
    """Every recipe ended well."""
    return {
        (mode, f"{mode}_one"): Told(records=[record(name, mode) for name in names])
        for mode, names in KERNELS.items()
    }


def make_job(tmp: Path, recipes: Recipes, **changes: Any) -> Job:
    bench = Bench(
        tree=tmp / "tree", python=tmp / "python", toolkit=tmp / "cuda", work=tmp / "work",
        log=tmp / "log", seconds=5, shapes=recipes.shapes.model_dump(), modules={},
    )  # fmt: skip
    given: dict[str, Any] = {
        "stack": "1.2.3", "target": "sm_121a", "recipes": recipes, "bench": bench,
        "results": Results(tmp / "results.json"),
        "inputs": {"tree": "t", "environment": "e"}, "versions": {}, **changes,
    }  # fmt: skip
    return Job(**given)
