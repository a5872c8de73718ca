"""The fatbin reader against what nvcc, ptxas and fatbinary really write.

The format is unpublished: if a newer toolkit changes it, these tests say so.
"""

import pytest

from sm121 import proc
from sm121.abi.fatbin import read_containers
from sm121.abi.gpu import runs, verdict
from sm121.abi.scan import scan_elf
from sm121.abi.source import BytesSource

pytestmark = [pytest.mark.network, pytest.mark.compiler, pytest.mark.timeout(600)]

KERNEL = "__global__ void k(float *x) { x[threadIdx.x] *= 2; }\n"
PTX = """.version 9.0
.target {target}
.address_size 64
.visible .entry k() {{ ret; }}
"""


def codes(data: bytes):
    found = list(read_containers(BytesSource(data), 0, len(data)))
    assert len(found) == 1
    return {str(c) for c in found[0].codes}, found[0]


# nvcc refuses sm_120 and sm_120f in one object, so two sets.
@pytest.mark.parametrize(
    "wanted",
    [
        ["sm_75", "sm_90a", "sm_120a", "sm_120f", "sm_121a", "compute_80"],
        ["sm_120", "sm_121", "compute_90"],
    ],
    ids=["suffixes", "plain"],
)
@pytest.mark.parametrize("mode", ["none", "speed", "balance", "size"])
def test_nvcc_object(tools, tmp_path, mode, wanted):
    """Every suffix that matters, with each of nvcc's compression modes."""
    flags = [f"-gencode=arch=compute_{w.partition('_')[2]},code={w}" for w in wanted]
    # More than one page of code, so that compression pays.
    source = "".join(KERNEL.replace("k(", f"k{n}(") for n in range(20))
    built = tools.nvcc(source, tmp_path / "k.o", *flags, f"--compress-mode={mode}")
    found = scan_elf(BytesSource(built.read_bytes()), "k.o")
    assert found.damage == ""
    assert {str(c) for k in found.containers for c in k.codes} == set(wanted)
    assert any(k.compressed for k in found.containers) is (mode != "none")


@pytest.mark.parametrize(
    "arch",
    ["75", "80", "90a", "100f", "103a", "110f", "120", "120a", "120f", "121", "121a", "121f"],
)
def test_ptxas_cubin_in_a_fatbin(tools, tmp_path, arch):
    """ptxas and fatbinary, one target each; compressed or not, the header says the same."""
    ptx = tmp_path / "k.ptx"
    ptx.write_text(PTX.format(target=f"sm_{arch}"))
    cubin = tmp_path / "k.cubin"
    proc.run([tools.root / "bin/ptxas", f"-arch=sm_{arch}", ptx, "-o", cubin])
    for flags in ([], ["--compress-all"]):
        out = tmp_path / "k.fatbin"
        proc.run(
            [
                tools.root / "bin/fatbinary", "-64", f"--create={out}", *flags,
                f"--image3=kind=elf,sm={arch},file={cubin}", f"--image3=kind=ptx,sm={arch},file={ptx}",
            ]
        )  # fmt: skip
        names, container = codes(out.read_bytes())
        assert names == {f"sm_{arch}", f"compute_{arch}"}
        on_gb10 = arch in ("120", "120f", "121", "121a", "121f")
        by_jit = arch in ("75", "80")
        expected = "sass" if on_gb10 else "ptx" if by_jit else "none"
        assert verdict(container, 121) == expected
        assert any(runs(c, 121) for c in container.codes) is (expected != "none")


def test_no_arch_at_all_is_nvccs_default(tools, tmp_path):
    """What a lost arch list gives: sm_75 and its PTX. (CUDA 13.0; facts.md §3)"""
    built = tools.nvcc(KERNEL, tmp_path / "k.o")
    found = scan_elf(BytesSource(built.read_bytes()), "k.o")
    assert [sorted(map(str, k.codes)) for k in found.containers] == [["compute_75", "sm_75"]]
    assert [verdict(k, 121) for k in found.containers] == ["ptx"]


def test_relocatable_device_code_is_not_counted(tools, tmp_path):
    """-rdc=true puts code into __nv_relfatbin as well; only the linked one is loaded."""
    built = tools.nvcc(
        KERNEL, tmp_path / "k.o", "-rdc=true", "-gencode=arch=compute_121a,code=sm_121a"
    )
    found = scan_elf(BytesSource(built.read_bytes()), "k.o")
    assert found.damage == ""
    assert found.containers == ()
