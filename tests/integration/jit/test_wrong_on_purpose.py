"""Seven things made wrong on purpose, each with real compilers: caught, and read rightly.

On demand, since each takes a minute or more and the first run makes an environment of 8 GB:

    python -m sm121 verify-jit                                  (makes tree and environment)
    python -m pytest tests/integration/jit --jit build/jit/0.26.0

CI has the light halves: readings of the same messages (tests/unit/jit/test_recipes.py), limits
and rules (test_verify.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm121.index import uv_binary

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def bench(request: pytest.FixtureRequest, root: Path) -> Path:
    """Folder with tree/ and env/ that verify-jit made."""
    given = request.config.getoption("--jit")
    if not given:
        pytest.skip("on demand: --jit build/jit/0.26.0 (compilers and an environment of 8 GB)")
    folder = (root / given).resolve()
    assert (folder / "tree/vllm").is_dir(), "`nox -s verify-jit` makes it"
    return folder


def linked(folder: Path, into: Path) -> Path:
    """A copy that shares its files: what is changed must be replaced, not written into."""
    shutil.copytree(folder, into, symlinks=True, copy_function=os.link)
    return into


def replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new))


def verified(
    root: Path, build: Path, *options: str | Path, tree: Path, env: Path
) -> tuple[int, dict[str, Any]]:
    report = build / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "sm121", "verify-jit", "--tree", tree, "--env", env,
         f"--json={report}", *options],
        cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "SM121_BUILD": str(build), "PYTHONPATH": str(root / "src")},
    )  # fmt: skip
    assert report.is_file(), done.stderr
    return done.returncode, json.loads(report.read_text())


def rows(report: dict[str, Any], verdict: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["verdict"] == verdict]


def installed(env: Path, requirement: str) -> None:
    subprocess.run(
        [uv_binary(), "pip", "install", "-q", "--python", env / "bin/python", "--no-deps",
         "--link-mode", "copy", requirement],
        check=True,
    )  # fmt: skip


def test_a_cutedsl_component_at_another_version(bench: Path, root: Path, tmp_path: Path) -> None:
    env = linked(bench / "env", tmp_path / "env")
    installed(env, "nvidia-cutlass-dsl-libs-base==4.5.2")
    code, report = verified(
        root, tmp_path / "build", "--only", "gather_k", tree=bench / "tree", env=env
    )
    assert code == 1
    faults = [note["text"] for note in report["notes"] if note["kind"] == "fault"]
    assert any("nvidia-cutlass-dsl-libs-base: found 4.5.2" in text for text in faults)
    # Its files lie over those of -libs-cu13, which the versions alone do not show.
    assert any("files are not its wheel's" in text for text in faults)
    for row in rows(report, "failed"):
        assert row["reading"]["kind"] == "pin"


def test_a_tvm_ffi_that_tilelang_does_not_know(bench: Path, root: Path, tmp_path: Path) -> None:
    env = linked(bench / "env", tmp_path / "env")
    installed(env, "apache-tvm-ffi==0.1.13.post3")
    code, report = verified(
        root, tmp_path / "build", "--only", "mhc_ends", tree=bench / "tree", env=env
    )
    failed = rows(report, "failed")
    assert code == 1
    assert {row["family"] for row in failed} == {"tilelang"}
    for row in failed:
        assert row["reading"]["kind"] == "pin"
        assert "apache-tvm-ffi: found 0.1.13.post3 beside tilelang" in row["reading"]["says"]


def test_a_part_of_the_toolkit_is_missing(bench: Path, root: Path, tmp_path: Path) -> None:
    env = linked(bench / "env", tmp_path / "env")
    (header,) = env.glob("lib/python3*/site-packages/nvidia/cu13/include/math_constants.h")
    header.unlink()
    code, report = verified(
        root, tmp_path / "build", "--only", "mhc_ends", tree=bench / "tree", env=env
    )
    failed = rows(report, "failed")
    assert code == 1
    assert failed
    for row in failed:
        assert "math_constants.h" in row["message"]
        assert row["reading"]["kind"] == "toolchain"
        assert "header is missing" in row["reading"]["says"]


def test_plain_sm_121_where_the_a_is_needed(bench: Path, root: Path, tmp_path: Path) -> None:
    code, report = verified(
        root, tmp_path / "build", "--arch", "12.1", "--only", "indexer_q", tree=bench / "tree",
        env=bench / "env",
    )  # fmt: skip
    (failed,) = rows(report, "failed")
    assert code == 1
    assert failed["kernel"].endswith(":IndexerQMxFp4Kernel")
    assert failed["reading"]["kind"] == "unsupported"
    # The FP8 one needs no instruction of the `a`.
    assert any(row["kernel"].endswith(":IndexerQFp8Kernel") for row in rows(report, "compiled"))


def test_a_kernel_over_the_shared_memory_limit(bench: Path, root: Path, tmp_path: Path) -> None:
    tree = linked(bench / "tree", tmp_path / "tree")
    replaced(
        tree / "vllm/model_executor/layers/quantization/utils/fp8_utils.py",
        '"num_stages": 2,', '"num_stages": 8,',
    )  # fmt: skip
    code, report = verified(
        root, tmp_path / "build", "--only", "fp8_linear_fallback", tree=tree, env=bench / "env"
    )
    (over,) = rows(report, "over-limit")
    assert code == 1
    assert over["kernel"].endswith(":_w8a8_triton_block_scaled_mm")
    assert "bytes of shared memory per block; the GPU has 101,376" in over["message"]


def test_tilelangs_dynamic_shared_memory_over_the_limit(
    bench: Path, root: Path, tmp_path: Path
) -> None:
    """Its cubin says nothing of it: static shared memory is 0."""
    tree = linked(bench / "tree", tmp_path / "tree")
    replaced(
        tree / "vllm/model_executor/kernels/mhc/tilelang_kernels.py",
        "T.Pipelined(n_h, num_stages=2)", "T.Pipelined(n_h, num_stages=14)",
    )  # fmt: skip
    code, report = verified(
        root, tmp_path / "build", "--only", "mhc_ends", tree=tree, env=bench / "env"
    )
    (over,) = rows(report, "over-limit")
    assert code == 1
    assert over["kernel"].endswith(":hc_head_fuse_tilelang")
    assert over["message"] == "115,200 bytes of shared memory per block; the GPU has 101,376"


def test_flashinfers_dynamic_shared_memory_over_the_limit(
    bench: Path, root: Path, tmp_path: Path
) -> None:
    """Only the module's host code knows it, and what it launches decides: other kernels of the same
    source are no fault."""
    env = linked(bench / "env", tmp_path / "env")
    (source,) = env.glob("lib/python3*/site-packages/flashinfer/data/csrc/*_decode_dsv4.cu")
    replaced(source, "2 * HPB * (DSV4_BI + 16);", "2 * HPB * (DSV4_BI + 16) + 16384;")
    code, report = verified(
        root, tmp_path / "build", "--only", "sparse_mla_sm120", tree=bench / "tree", env=env
    )
    (over,) = rows(report, "over-limit")
    assert code == 1
    assert over["kernel"].endswith(":trtllm_batch_decode_sparse_mla_dsv4")
    # 90,800 + 16,384 dynamic, 2,048 static
    assert over["message"] == "109,232 bytes of shared memory per block; the GPU has 101,376"
