"""The cubin reader against ptxas, which says the same in words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sm121.jit.cubin import read_cubin

# 3,000 bytes of shared memory, 96 threads, and an array that must lie in local memory.
PTX = """
.version 9.0
.target {target}
.address_size 64
.visible .entry small(.param .u64 to) .reqntid 96, 1, 1
{{
  .reg .u32 %r<4>; .reg .u64 %rd<4>;
  .shared .align 4 .b8 pool[3000];
  .local .align 4 .b8 own[400];
  ld.param.u64 %rd1, [to];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  mov.u64 %rd3, own;
  add.u64 %rd3, %rd3, %rd2;
  st.local.u32 [%rd3], %r1;
  mov.u32 %r2, pool;
  st.shared.u32 [%r2], %r1;
  ld.local.u32 %r3, [%rd3];
  st.global.u32 [%rd1], %r3;
  ret;
}}
.visible .entry plain() {{ ret; }}
"""


@pytest.mark.parametrize("target", ["sm_121a", "sm_120f", "sm_90", "sm_80"])
def test_it_says_what_ptxas_says(torch_python: Path, tmp_path: Path, target: str) -> None:
    ptxas = next(
        torch_python.parent.parent.glob("lib/python3*/site-packages/nvidia/cu13/bin/ptxas")
    )
    (tmp_path / "k.ptx").write_text(PTX.format(target=target))
    done = subprocess.run(
        [ptxas, "-v", f"-arch={target}", "k.ptx", "-o", "k.cubin"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    cubin = read_cubin((tmp_path / "k.cubin").read_bytes())
    assert str(cubin.sm) in target
    kernels = {code.name: code for code in cubin.kernels}
    assert set(kernels) == {"small", "plain"}
    for name, text in re.findall(
        r"Compiling entry function '(\w+)'.*?\n(.*?Used[^\n]*)", done.stderr, re.DOTALL
    ):
        code = kernels[name]
        assert f"Used {code.registers} registers" in text
        assert f"{code.stack} bytes stack frame" in text
    assert (kernels["small"].shared, kernels["plain"].shared) == (3000, 0)
    assert "3000 bytes smem" in done.stderr
    assert (kernels["small"].threads, kernels["plain"].threads) == (96, 0)
