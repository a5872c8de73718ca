"""GPU coverage against a profile, and the checks over a whole set."""

import pytest
from make import Sym, b64, context, elf, fatbin, wheel

from sm121.abi.context import Expected
from sm121.abi.coverage import check_coverage
from sm121.abi.patched import PatchFile, check_patches, parse
from sm121.abi.sets import (
    check_cuda_builds,
    check_nccl,
    check_overlap_groups,
    check_ownership,
    check_versions,
)  # fmt: skip

VLLM = "vllm-0.26.0+sm121.kernels.1-cp311-abi3-linux_aarch64.whl"
C = "vllm/_C_stable_libtorch.abi3.so"
KERNELS = Expected(profile="kernels", built=("spinloop", "_C_stable_libtorch"), left_out={"_vllm_fa3_C": "FA3 is for sm_90"})  # fmt: skip


def covered(*containers, path=C, expected=KERNELS, filename=VLLM, extra=None):
    files = {path: elf(fatbin=fatbin(*containers)), "vllm/spinloop.abi3.so": elf(), **(extra or {})}
    found, rows = check_coverage(context(wheel(filename, files), expected=expected))
    return [f for f in found if f.severity == "fault"], rows, found


def test_native_everywhere():
    faults, rows, _ = covered(["sm_121a"], ["sm_120f", "sm_80"], ["sm_120"])
    assert faults == []
    row = next(r for r in rows if r.component == "_C_stable_libtorch")
    assert (row.sass, row.ptx, row.none, row.verdict, row.expected) == (
        3,
        0,
        0,
        "native",
        "required",
    )
    assert row.archs == {"sm_120": 1, "sm_120f": 1, "sm_121a": 1, "sm_80": 1}


@pytest.mark.parametrize("wrong", ["sm_75", "sm_120a", "sm_90a"])  # cases.md 3
def test_one_object_for_another_gpu(wrong):
    faults, rows, _ = covered(["sm_121a"], ["sm_121a"], [wrong])
    assert len(faults) == 1
    text = faults[0].text
    assert "1 of 3 objects of _C_stable_libtorch" in text
    assert wrong in text
    assert "sm_121a" in text
    assert next(r for r in rows if r.file == C).result == "fail"


def test_nvccs_default_arch_is_no_native_code():
    """A lost arch list gives sm_75 with its PTX: it would run, by JIT, and must not pass."""
    faults, _, _ = covered(["sm_75", "compute_75"], ["sm_75", "compute_75"])
    assert "PTX JIT" in faults[0].text


RELEASE = "vllm-0.26.0-cp38-abi3-manylinux_2_28_aarch64.whl"
OVERLAY = "vllm-0.26.0+sm121.overlay.1-cp311-abi3-linux_aarch64.whl"


@pytest.mark.parametrize("filename", [RELEASE, OVERLAY])
def test_ptx_of_the_release_is_a_note_with_its_reason(filename):
    faults, rows, found = covered(["sm_121a"], ["compute_80", "sm_80"], filename=filename)
    assert faults == []
    assert found[0].severity == "note"
    assert next(r for r in rows if r.file == C).verdict == "native+ptx"


@pytest.mark.parametrize(
    ("component", "path"),
    [
        ("_C_stable_libtorch", C),
        ("_moe_C_stable_libtorch", "vllm/_moe_C_stable_libtorch.abi3.so"),
        ("_vllm_fa2_C", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"),
    ],
)
def test_ptx_in_what_we_compile_is_a_fault(component, path):
    """As a build without gb10-native has it; the release's exceptions must not hide it."""
    expected = Expected(profile="full", built=(component,))
    faults, rows, _ = covered(["sm_121a"], ["compute_80", "sm_80"], path=path, expected=expected)
    assert ["1 of 2 objects" in fault.text for fault in faults] == [True]
    assert next(r for r in rows if r.file == path).result == "fail"


def test_missing_component():  # cases.md 4
    one = wheel(VLLM, {"vllm/spinloop.abi3.so": elf()})
    found, rows = check_coverage(context(one, expected=KERNELS))
    assert [f.kind for f in found] == ["component"]
    assert "_C_stable_libtorch is missing" in found[0].text
    assert [r.verdict for r in rows if r.component == "_C_stable_libtorch"] == ["missing"]


def test_component_without_any_gpu_code():
    faults, _, _ = covered(path="vllm/other.so", extra={C: elf()})
    assert any("holds no GPU code at all" in f.text for f in faults)


def test_component_unknown_to_policy():
    expected = Expected(profile="x", built=("new_thing",))
    faults, _, _ = covered(["sm_121a"], expected=expected)
    assert "policy does not say" in faults[0].text


def test_left_out_and_yet_there():
    faults, _, _ = covered(["sm_121a"], extra={"vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": elf(fatbin=fatbin(["sm_121a"]))})  # fmt: skip
    assert "although the manifest leaves it out" in faults[0].text


def test_the_releases_own_gaps_are_allowed_only_there():
    path = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
    none = Expected()
    assert covered(["sm_90a"], path=path, expected=none, filename=RELEASE)[0] == []
    assert len(covered(["sm_90a"], path=path, expected=none)[0]) == 1


def test_more_gaps_than_policy_counts():
    for count, faults in ((19, 0), (20, 1)):
        got = covered(*[["sm_90a"]] * count, expected=Expected(), filename=RELEASE)[0]
        assert len(got) == faults


def ours(name):
    return f"{name}-1-cp312-cp312-manylinux_2_28_aarch64.whl"


def test_two_owners():
    one, two = wheel(ours("a"), {"s/x.py": b"1"}), wheel(ours("b"), {"s/x.py": b"2"})
    found = list(check_ownership(context(one, two)))
    assert [f.severity for f in found] == ["fault"]
    assert found[0].names == ("s/x.py",)
    same = wheel(ours("b"), {"s/x.py": b"1"})
    assert list(check_ownership(context(one, same))) == []


def test_two_wheels_of_one_distribution():
    found = list(
        check_ownership(context(wheel("a-1-py3-none-any.whl"), wheel("a-2-py3-none-any.whl")))
    )
    assert "second wheel of a" in found[0].text


BASE, CU13, DSL = (
    "nvidia_cutlass_dsl_libs_base",
    "nvidia_cutlass_dsl_libs_cu13",
    "nvidia_cutlass_dsl",
)


def cute(name, version="4.5.1", content=b"1"):
    return wheel(
        f"{name}-{version}-cp312-cp312-manylinux_2_28_aarch64.whl", {"cutlass/_ir.so": content}
    )


def test_cutedsl_overlap_is_known():
    found = list(check_ownership(context(cute(BASE), cute(CU13, content=b"2"))))
    assert [f.severity for f in found] == ["note"]
    assert "cu13 must be installed last" in found[0].text
    assert list(check_overlap_groups(context(cute(BASE), cute(CU13)))) == []


def test_cutedsl_mixed_versions_and_lost_extra():  # cases.md 7, 8
    found = list(check_overlap_groups(context(cute(BASE), cute(CU13, "4.5.2"))))
    assert "mixed versions" in found[0].text
    assert "4.5.2" in found[0].text
    lost = list(check_overlap_groups(context(cute(BASE))))
    assert "cu13 is not in the set" in lost[0].text


def test_cutedsl_mixed_files_in_an_environment():
    record = f"cutlass/_ir.so,{b64(b'cu13')},4\ncutlass/b.py,{b64(b'same')},4\n"
    base = wheel(f"{BASE}-4.5.1-py3-none-any.whl")
    for content, count in ((b"cu13", 0), (b"base", 1)):
        winner = wheel(
            f"{CU13}-4.5.1-py3-none-any.whl", {"cutlass/_ir.so": content, "cutlass/b.py": b"same"},
            texts={"RECORD": record},
        )  # fmt: skip
        found = list(check_overlap_groups(context(base, winner, installed=True)))
        assert len(found) == count
    assert found[0].names == ("cutlass/_ir.so",)
    assert "mixed" in found[0].text


def torch(version="2.11.0", local="+cu130", cuda="'13.0'", needed=("libtorch_cuda.so",)):
    return wheel(
        f"torch-{version}-cp312-cp312-manylinux_2_28_aarch64.whl",
        {"torch/lib/libtorch.so": elf(soname="libtorch.so", needed=needed)},
        texts={
            "torch/version.py": f"__version__ = '{version}{local}'\ncuda: Optional[str] = {cuda}\n"
        },
    )


def vision(version="0.26.0", local="+cu130", needed=("libcudart.so.13",), torch="2.11.0"):
    return wheel(
        f"torchvision-{version}-cp312-cp312-manylinux_2_28_aarch64.whl",
        {"torchvision/_C.so": elf([Sym(name="nms", defined=True)], needed=needed)},
        texts={"torchvision/version.py": f"__version__ = '{version}{local}'\n", "Requires-Dist": f"torch (=={torch})"},
    )  # fmt: skip


def verdicts(*wheels):
    found, rows = check_cuda_builds(context(*wheels))
    return [f.text for f in found], rows


def test_torchvision_three_kinds_three_verdicts():  # cases.md 6
    good, rows = verdicts(torch(), vision())
    assert good == []
    assert [r.result for r in rows] == ["pass", "pass"]
    cpu, _ = verdicts(torch(), vision(local="", needed=("libtorch_cpu.so",)))
    assert len(cpu) == 1
    assert "is a CPU build" in cpu[0]
    other, _ = verdicts(torch(), vision(local="+cu128"))
    assert len(other) == 1
    assert "CUDA 12.8 build" in other[0]
    elder, _ = verdicts(torch(), vision(torch="2.9.1"))
    assert "built for torch 2.9.1" in elder[0]


def test_cpu_torch_is_named():  # cases.md 1
    found, _ = verdicts(torch(local="", cuda="None", needed=("libtorch_cpu.so",)))
    assert "torch 2.11.0 is a CPU build" in found[0]
    faults, rows = check_versions(context(torch("2.14.0")), {"torch": "2.11.0", "absent": "1"})
    assert "torch 2.14.0 is here; the stack wants 2.11.0" in faults[0].text
    assert len(rows) == 1


def nccl(build, text=b"NCCL version 2.30.4+cuda13.2", name="nvidia_nccl_cu13-2.30.4"):
    data = elf(soname="libnccl.so.2", build_id=build) + text
    path = f"{'nvidia' if name.startswith('nvidia_nccl') else name}/nccl/lib/libnccl.so.2"
    return wheel(f"{name}-py3-none-manylinux_2_18_aarch64.whl", {path: data})


def test_nccl_identity_is_version_and_build_id():  # cases.md 11
    found, rows = check_nccl(context(nccl(b"\x01\x02")))
    assert found == []
    assert rows[0].found == "2.30.4+cuda13.2, build id 0102"
    found, rows = check_nccl(context(nccl(b"\x01\x02"), nccl(b"\x03\x04", name="other-1")))
    assert len(rows) == 2
    assert "2 different builds of NCCL" in found[0].text
    assert "0102" in found[0].text
    assert "0304" in found[0].text


def test_nccl_that_is_not_what_its_package_says():
    found, _ = check_nccl(context(nccl(b"\1", b"NCCL version 2.28.9+cuda13.0")))
    assert "says it is NCCL 2.28.9" in found[0].text


PATCH = """From 1 Mon Sep 17 00:00:00 2001
Subject: x

---
diff --git a/vllm/a.py b/vllm/a.py
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,3 +1,4 @@
 one
-two
+TWO
+more
 three
diff --git a/csrc/k.cu b/csrc/k.cu
--- a/csrc/k.cu
+++ b/csrc/k.cu
@@ -1 +1 @@
-a
+b
--
2.39.5
"""
LATER = """diff --git a/vllm/a.py b/vllm/a.py
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -2,2 +2,2 @@
 TWO
-more
+MORE
"""


def patch_faults(content, promised, patches):
    one = wheel(VLLM, {"vllm/a.py": b""})
    ctx = context(one, expected=Expected(patches=promised))
    found = check_patches(ctx, one, patches, {"vllm/a.py": content}.get)
    return [f.text for f in found if f.severity == "fault"]


def test_patches_are_undone_from_the_last_one():
    series = [PatchFile(name="p", text=PATCH, patch_id="1" * 40), PatchFile(name="q", text=LATER, patch_id="2" * 40)]  # fmt: skip
    promised = {"p": "1" * 40, "q": "2" * 40}
    assert parse(PATCH)["vllm/a.py"][0].old == ("one", "two", "three")
    assert patch_faults("one\nTWO\nMORE\nthree\n", promised, series) == []
    unpatched = patch_faults("one\ntwo\nthree\n", promised, series)
    assert len(unpatched) == 2
    assert "patch q is not in the wheel" in unpatched[0]
    half = patch_faults("one\nTWO\nmore\nthree\n", promised, series)
    assert half == ["patch q is not in the wheel: hunk 1 of 1 was not found in vllm/a.py"]


def test_patch_ids():
    series = [PatchFile(name="p", text=PATCH, patch_id="1" * 40)]
    good = "one\nTWO\nmore\nthree\n"
    assert "another text" in patch_faults(good, {"p": "9" * 40}, series)[0]
    assert "does not have" in patch_faults(good, {"p": "1" * 40, "z": "1"}, series)[0]
