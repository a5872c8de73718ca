"""Fatbins and the rule of which code runs where."""

import struct

import pytest
from make import binary, elf, fatbin

from sm121.abi.fatbin import Code, read_containers
from sm121.abi.gpu import Arch, check_arch, runs, verdict
from sm121.abi.policy.load import load_policy
from sm121.abi.policy.model import compiled_here
from sm121.abi.source import BytesSource, Malformed
from sm121.errors import UsageFault


def containers(data: bytes):
    return list(read_containers(BytesSource(data), 0, len(data)))


def code(text: str) -> Code:
    kind, _, number = text.partition("_")
    return Code(kind="sass" if kind == "sm" else "ptx", arch=int(number.rstrip("af")), suffix=number.lstrip("0123456789"))  # fmt: skip


@pytest.mark.parametrize(
    ("text", "on_121"),
    [
        ("sm_121", True), ("sm_121a", True), ("sm_121f", True),
        ("sm_120", True), ("sm_120f", True), ("sm_120a", False),
        ("sm_100", False), ("sm_100f", False), ("sm_103a", False), ("sm_110f", False),
        ("sm_90", False), ("sm_90a", False), ("sm_80", False), ("sm_75", False),
        ("compute_75", True), ("compute_80", True), ("compute_120", True), ("compute_121", True),
        ("compute_121a", True), ("compute_120f", True), ("compute_120a", False),
        ("compute_90a", False), ("compute_100f", False), ("compute_130", False),
    ],
)  # fmt: skip
def test_what_runs_on_gb10(text, on_121):
    assert runs(code(text), 121) is on_121


@pytest.mark.parametrize(
    ("text", "gpu", "expected"),
    [("sm_100f", 103, True), ("sm_103f", 100, False), ("sm_86", 89, True), ("sm_89", 86, False),
     ("sm_121f", 120, False), ("sm_120", 121, True), ("compute_121", 120, False)],
)  # fmt: skip
def test_minor_versions_go_upwards_only(text, gpu, expected):
    assert runs(code(text), gpu) is expected


def test_verdicts():
    found = containers(
        fatbin(["sm_80", "sm_120f"], ["sm_80", "compute_80"], ["sm_75"], ["sm_120a"])
    )
    assert [verdict(c, 121) for c in found] == ["sass", "ptx", "none", "none"]
    assert [str(c) for c in found[1].codes] == ["compute_80", "sm_80"]


def test_padding_between_containers():
    data = fatbin(["sm_121a"]) + bytes(24) + fatbin(["sm_75"]) + bytes(40)
    assert len(containers(data)) == 2


@pytest.mark.parametrize("flag", [0x2000, 0x8000])
def test_compressed_is_seen(flag):
    data = bytearray(fatbin(["sm_121a"]))
    struct.pack_into("<Q", data, 16 + 40, 0x100000 | flag)
    assert containers(bytes(data))[0].compressed
    assert str(containers(bytes(data))[0].codes[0]) == "sm_121a"


@pytest.mark.parametrize(
    "edit", [(0, b"\1\2\3\4"), (8, b"\xff" * 8), (16 + 4, b"\x01\0\0\0"), (16 + 8, b"\xff" * 8)]
)
def test_lies_are_refused(edit):
    data = bytearray(fatbin(["sm_121a"]))
    data[edit[0] : edit[0] + len(edit[1])] = edit[1]
    with pytest.raises(Malformed):
        containers(bytes(data))


def test_a_broken_fatbin_in_a_sound_elf_is_damage():
    assert "fatbin" in binary("x.so", elf(fatbin=b"\1\2\3\4" * 8)).damage


@pytest.mark.parametrize("text", ["12.1a", "sm_121a", "121a"])
def test_arch_spellings(text):
    assert Arch.parse(text) == Arch(number=121, suffix="a")


def test_plain_arch_is_refused_with_the_reason():  # cases.md 21
    with pytest.raises(UsageFault) as caught:
        check_arch(Arch.parse("12.1"), ["12.1a"])
    assert "e2m1x2" in caught.value.cause
    assert "12.1a" in caught.value.remedy
    with pytest.raises(UsageFault, match="not one that this stack"):
        check_arch(Arch.parse("9.0a"), ["12.1a"])
    with pytest.raises(UsageFault, match="not a GPU architecture"):
        Arch.parse("blackwell")
    check_arch(Arch.parse("12.1a"), ["12.1a"])


@pytest.mark.parametrize(
    ("version", "ours"),
    [("0.26.0", False), ("0.26.0+sm121.overlay.1a2b3c4d", False), ("0.26.0+sm121.kernels.1a2b3c4d", True),
     ("0.26.0+cu130", True)],
)  # fmt: skip
def test_whose_binaries(version, ours):
    """Exceptions for a release's binaries cover our overlay of it, not what we compiled."""
    assert compiled_here(version) is ours
    policy = load_policy()
    covers = [
        r.covers("vllm/_qutlass_C.abi3.so", "vllm", version)
        for r in policy.gpu.no_code
        if r.release
    ]
    assert any(covers) is not ours
