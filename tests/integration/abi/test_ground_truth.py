"""The answers that are known: facts.md §3 and §4, on the real aarch64 wheels."""

import pytest
from make import TARGET

from sm121.abi.policy.load import load_policy
from sm121.abi.verify import verify

pytestmark = [pytest.mark.network, pytest.mark.timeout(1800)]

DEF = "_ZNR5torch7Library4_defEON3c1014FunctionSchemaEPNS1_12OperatorNameERKSt6vectorIN2at3TagESaIS8_EENS_17_RegisterOrVerifyE"
DATA_PTR = "_ZNK2at10TensorBase14const_data_ptrIiLi0EEEPKT_v"
FA = "vllm/vllm_flash_attn/"


@pytest.fixture(scope="session")
def family(locked):
    """The whole locked set, without torch."""
    return [p for name, p in locked("family", "aarch64", None).items() if name != "torch"]


@pytest.fixture(scope="session")
def judge(indexed, family, layout):
    """verify() of one wheel in the locked family, with another torch."""

    def run(requirement, torch="2.11.0"):
        wheel = indexed(requirement)
        name = wheel.name.split("-")[0]
        around = [p for p in family if p.name.split("-")[0] != name]
        return verify(
            [wheel], against=[indexed(f"torch=={torch}"), *around], policy=load_policy(),
            target=TARGET, arch="12.1a", cache=layout.cache, neighbours=[indexed("torch==2.11.0")],
        )  # fmt: skip

    return run


def open_symbols(report):
    found = {}
    for one in report.open_symbols:
        found.setdefault(one.needed_by, set()).add(one.name)
    return found


def test_vllm_on_its_own_torch_passes(judge):
    report = judge("vllm==0.26.0")
    assert report.faults == ()
    assert report.result == "pass"
    assert sum(row.symbols for row in report.wheels) > 2000
    assert report.wheels[0].floors["GLIBC"] == "2.28"


@pytest.mark.parametrize("torch", ["2.12.0", "2.12.1"])
def test_vllm_on_the_next_torch(judge, torch):
    report = judge("vllm==0.26.0", torch)
    assert open_symbols(report) == {
        "vllm/_qutlass_C.abi3.so": {DEF},
        f"{FA}_vllm_fa3_C.abi3.so": {DEF},
        f"{FA}_vllm_fa2_C.abi3.so": {DEF, DATA_PTR},
    }
    assert {f.kind for f in report.faults} == {"symbol"}
    assert all(
        one.found_in == ("torch 2.11.0: torch/lib/libtorch_cpu.so",) for one in report.open_symbols
    )


def test_vllm_on_a_cpu_torch(judge):
    report = judge("vllm==0.26.0", "2.10.0")
    assert {f.kind for f in report.faults} == {"library"}
    broken = {f.file for f in report.faults}
    loadable = {b.file for b in report.binaries if b.loadable}
    assert loadable - broken == {"vllm/_rust_tool_parser.abi3.so", "vllm/vllm-rs"}
    missing = {name for f in report.faults for name in f.names}
    assert missing == {"libtorch_cuda.so", "libc10_cuda.so", "libcudart.so.13", "libnvrtc.so.13"}


def test_component_coverage(judge):
    report = judge("vllm==0.26.0")
    table = {c.component: (c.sass, c.ptx, c.none) for c in report.components}
    assert {name: counts for name, counts in table.items() if any(counts)} == {
        "_C_stable_libtorch": (75, 6, 19),
        "_moe_C_stable_libtorch": (29, 1, 0),
        "_vllm_fa2_C": (0, 76, 0),
        "_vllm_fa3_C": (0, 0, 192),
        "_qutlass_C": (0, 0, 6),
        "_flashmla_C": (0, 0, 22),
        "_flashmla_extension_C": (0, 0, 2),
    }
    sizes = {c.component: c.bytes for c in report.components}
    assert sizes["_vllm_fa2_C"] > 250_000_000


def test_torchvision_cuda_and_cpu(judge):
    cuda = judge("torchvision==0.26.0")
    assert cuda.result == "pass"
    assert [(r.name, r.result) for r in cuda.family if r.name == "torchvision"] == [
        ("torchvision", "pass")
    ]
    cpu = judge("torchvision==0.24.1")
    texts = " / ".join(f.text for f in cpu.faults if f.kind == "cuda-build")
    assert "torchvision 0.24.1 is a CPU build" in texts
    assert "built for torch 2.9.1" in texts


def test_tilelang_and_a_newer_tvm_ffi(indexed, family, layout):  # cases.md 9
    def run(version):
        around = [p for p in family if not p.name.startswith(("tilelang-", "apache_tvm_ffi-"))]
        return verify(
            [indexed("tilelang==0.1.9")], policy=load_policy(), target=TARGET, arch="12.1a",
            cache=layout.cache, against=[indexed(f"apache-tvm-ffi=={version}"), indexed("torch==2.11.0"), *around],
            neighbours=[indexed("apache-tvm-ffi==0.1.9")],
        )  # fmt: skip

    assert run("0.1.9").result == "pass"
    broken = run("0.1.14.post1")
    assert [s.demangled.partition("(")[0] for s in broken.open_symbols] == [
        "tvm::ffi::json::Stringify"
    ]
    assert broken.open_symbols[0].found_in == ("apache-tvm-ffi 0.1.9: tvm_ffi/lib/libtvm_ffi.so",)


def test_the_whole_family_passes(locked, indexed, layout):
    wheels = [*locked("family", "aarch64", None).values(), indexed("vllm==0.26.0")]
    report = verify(wheels, policy=load_policy(), target=TARGET, arch="12.1a", cache=layout.cache)
    assert report.faults == ()
    assert len(report.wheels) > 190
    nccl = next(r for r in report.family if r.name.startswith("NCCL"))
    assert nccl.found.startswith("2.30.4+cuda")
    assert len(nccl.found.split("build id ")[1]) == 40
