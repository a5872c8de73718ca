"""What nvcc's host code launches, seen through the runtime's stand-in: names as in the cubin."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sm121.jit.cubin import read_cubin
from sm121.jit.drive import Bench, environment

# The three ways in which FlashInfer launches, and the questions that it asks first; optimised as there,
# since without nvcc calls more of the runtime.
SOURCE = """
#include <cuda_runtime_api.h>
namespace {
template <int N> __global__ void scale(float *x) { extern __shared__ float s[]; x[N] = s[0]; }
}
static __global__ void never(float *x) { *x = 1; }
extern "C" int launch(void) {
  float *x = nullptr;
  int optin = 0, major = 0, unknown = 0;
  if (cudaDeviceGetAttribute(&optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0)) return 1;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0)) return 2;
  if (optin != 101376 || major != 12) return 3;
  if (!cudaDeviceGetAttribute(&unknown, cudaDevAttrMaxTexture1DWidth, 0)) return 4;
  if (cudaFuncSetAttribute(scale<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, 90000)) return 5;
  scale<1><<<dim3(3), dim3(32, 2), 90000>>>(x);
  void *arguments[] = {&x};
  if (cudaLaunchKernel((void *)scale<2>, dim3(1), dim3(128), arguments, 2048, nullptr)) return 6;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1), config.blockDim = dim3(96), config.dynamicSmemBytes = 4096;
  if (cudaLaunchKernelExC(&config, (const void *)scale<3>, arguments)) return 7;
  if (never == nullptr) never<<<1, 1>>>(x);
  return 0;
}
extern "C" int unregistered(void) {
  return cudaLaunchKernel((void *)&launch, dim3(1), dim3(1), nullptr, 0, nullptr);
}
"""


@pytest.fixture
def bench(torch_python: Path, tmp_path: Path) -> Bench:
    (toolkit,) = torch_python.parent.parent.glob("lib/python3*/site-packages/nvidia/cu13")
    return Bench(
        tree=tmp_path, python=Path(sys.executable), toolkit=toolkit, work=tmp_path / "work",
        log=tmp_path / "log.txt", seconds=60, shapes={}, modules={},
    )  # fmt: skip


def called(
    bench: Bench, folder: Path, function: str, told: Path
) -> subprocess.CompletedProcess[str]:
    """Compile SOURCE in `folder` and call one of its functions with the stand-ins; what it prints."""
    (folder / "k.cu").write_text(SOURCE)
    given = environment(bench, "flashinfer")
    for command in (
        [bench.toolkit / "bin/nvcc", "-gencode=arch=compute_121a,code=sm_121a", "-O3", "--keep", "-c",
         "--compiler-options=-fPIC", "k.cu", "-o", "k.o"],
        ["c++", "-shared", "-o", "k.so", "k.o"],
    ):  # fmt: skip
        subprocess.run(command, cwd=folder, check=True, env=given)
    return subprocess.run(
        [bench.python, "-c", f"import ctypes; print(ctypes.CDLL('./k.so').{function}())"],
        cwd=folder, env={**given, "GB10_LAUNCHES": str(told)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("function", "told", "why"),
    [
        ("unregistered", "launches", "is no kernel that registered itself"),
        ("launch", "no/such/folder", "can't be noted in GB10_LAUNCHES"),
        ("launch", "/dev/full", "No space left on device"),
    ],
)
def test_no_launch_is_lost_in_silence(
    bench: Bench, tmp_path: Path, function: str, told: str, why: str
) -> None:
    done = called(bench, tmp_path, function, tmp_path / told)
    assert done.returncode == -signal.SIGABRT
    assert why in done.stderr


def test_each_launch_is_noted_with_its_kernel_threads_and_bytes(
    bench: Bench, tmp_path: Path
) -> None:
    told = tmp_path / "launches"
    done = called(bench, tmp_path, "launch", told)
    assert done.stdout == "0\n"
    assert "device attribute 21 is not answered" in done.stderr
    lines = [line.split() for line in told.read_text().splitlines()]
    assert [line[:2] for line in lines] == [["64", "90000"], ["128", "2048"], ["96", "4096"]]
    kernels = {code.name for code in read_cubin((tmp_path / "k.cubin").read_bytes()).kernels}
    launched = {line[2] for line in lines}
    assert launched < kernels
    assert len(kernels - launched) == 1  # never
