"""The family rules as they stand in pins/rules.toml, over small sets. Cases 1, 6, 7, 8, 9, 10."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm121.errors import FamilyFault, PinsFault
from sm121.pins.load import load_stack, stack_names
from sm121.rules.engine import Finding, Member, evaluate, require
from sm121.rules.model import load_rules

PINS = Path(__file__).parents[3] / "pins"
RULES = load_rules(PINS)


def members(*texts: str) -> list[Member]:
    """'torch 2.11.0 cpu' → Member(distribution, version, build)."""
    found = []
    for text in texts:
        name, version, *build = text.split()
        found.append(Member(distribution=name, version=version, build="".join(build)))
    return found


def broken(*texts: str, machine: str = "aarch64") -> list[Finding]:
    return evaluate(RULES, members(*texts), machine=machine)


GOOD = (
    "torch 2.11.0 cu130", "torchvision 0.26.0 cu130", "torchaudio 2.11.0", "triton 3.6.0",
    "flashinfer-python 0.6.17", "nvidia-cutlass-dsl 4.5.1", "nvidia-cutlass-dsl-libs-base 4.5.1",
    "nvidia-cutlass-dsl-libs-cu13 4.5.1", "apache-tvm-ffi 0.1.9", "tilelang 0.1.9",
    "nvidia-nccl-cu13 2.30.4", "nvidia-cuda-runtime 13.0.96", "nvidia-cuda-cccl 13.0.85",
)  # fmt: skip


def test_the_stack_breaks_no_rule() -> None:
    assert broken(*GOOD) == []


@pytest.mark.parametrize(
    ("change", "rule", "distribution", "word"),
    [
        ("nvidia-cutlass-dsl-libs-cu13 4.5.2", "cutedsl-equal", "nvidia-cutlass-dsl-libs-cu13", "ICE"),
        ("apache-tvm-ffi 0.1.13.post3", "tvm-ffi-symbols", "apache-tvm-ffi", "Stringify"),
        ("apache-tvm-ffi 0.1.12", "tvm-ffi-repr", "apache-tvm-ffi", "__ffi_repr__"),
        ("nvidia-nccl-cu13 2.28.9", "nccl-graph-replay", "nvidia-nccl-cu13", "hangs"),
        ("torch 2.11.0 cpu", "torch-cpu", "torch", "undefined symbols"),
        ("torch 2.11.0+cpu", "torch-cpu", "torch", "undefined symbols"),
        ("torchvision 0.26.0 cpu", "torch-cpu", "torchvision", "nms"),
        ("nvidia-cuda-cccl 13.3.1", "cuda-one-minor", "nvidia-cuda-cccl", "driver"),
        ("torchvision 0.27.0", "torch-torchvision", "torchvision", "nms"),
    ],
)  # fmt: skip
def test_each_fault_names_rule_and_symptom(
    change: str, rule: str, distribution: str, word: str
) -> None:
    name = change.split()[0]
    found = broken(*(g for g in GOOD if g.split()[0] != name), change)
    assert [f.rule for f in found] == [rule]
    assert found[0].distribution == distribution
    assert word in found[0].symptom
    assert found[0].source


GOOD_0_28 = (
    "torch 2.13.0 cu130", "torchvision 0.28.0 cu130", "torchaudio 2.11.0 cu130", "triton 3.7.1",
    "flashinfer-python 0.6.18.post1", "nvidia-cutlass-dsl 4.6.2", "nvidia-cutlass-dsl-libs-base 4.6.2",
    "nvidia-cutlass-dsl-libs-cu13 4.6.2", "apache-tvm-ffi 0.1.11", "tilelang 0.1.12",
    "nvidia-nccl-cu13 2.30.4", "nvidia-cuda-runtime 13.0.96", "nvidia-nvjitlink 13.0.88",
    "vllm 0.28.0+sm121.smoke.1a2b3c4d",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ("numpy 2.3.5", []),
        ("torchvision 0.26.0 cu130", ["torch-torchvision-2-13"]),
        ("triton 3.6.0", ["torch-torchvision-2-13"]),
        ("nvidia-nvjitlink 13.5.37", ["cuda-one-minor"]),
        ("flashinfer-python 0.6.16.post3", ["flashinfer-dspark-vllm"]),
        ("flashinfer-python 0.6.17", ["flashinfer-dspark-vllm"]),
        ("vllm 0.26.0+sm121.smoke.1a2b3c4d", []),
    ],
)
def test_the_family_of_torch_2_13(change: str, rules: list[str]) -> None:
    name = change.split()[0]
    found = broken(*(g for g in GOOD_0_28 if g.split()[0] != name), change)
    assert [f.rule for f in found] == rules


def test_older_cutedsl_beside_a_newer_flashinfer() -> None:
    older = [g.replace("4.6.2", "4.6.0") if "cutlass" in g else g for g in GOOD_0_28]
    assert [f.rule for f in broken(*older)] == ["flashinfer-cutedsl-0-6-18"]


@pytest.mark.parametrize("name", stack_names(PINS))
def test_the_pins_of_each_stack_break_no_rule(name: str) -> None:
    stack = load_stack(PINS, name)
    pinned = {n: pin.version for n, pin in stack.family.items()} | stack.cuda.toolkit
    pinned["nvidia-cutlass-dsl-libs-cu13"] = pinned["nvidia-cutlass-dsl"]  # by its extra
    pinned["vllm"] = stack.vllm.version
    assert broken(*(f"{n} {version}" for n, version in pinned.items())) == []


def test_lost_extra_names_the_lost_component() -> None:
    found = broken(*(g for g in GOOD if "libs-cu13" not in g))
    assert [(f.rule, f.distribution) for f in found] == [
        ("cutedsl-cu13", "nvidia-cutlass-dsl-libs-cu13")
    ]


@pytest.mark.parametrize("version", ["0.6.17", "0.6.17+cu130"])
def test_local_part_of_a_jit_cache_is_no_mismatch(version: str) -> None:
    assert broken(*GOOD, f"flashinfer-jit-cache {version}") == []


def test_jit_cache_of_another_release_is_one() -> None:
    found = broken(*GOOD, "flashinfer-jit-cache 0.6.14+cu130")
    assert [f.rule for f in found] == ["flashinfer-cubin"]


def test_known_bad_beside_needs_the_neighbour() -> None:
    assert broken("apache-tvm-ffi 0.1.13.post3") == []
    assert broken("apache-tvm-ffi 0.1.13.post3", "tilelang 0.2.0") == []


def test_rules_for_one_machine() -> None:
    assert [f.rule for f in broken("torch 2.10.0")] == ["torch-cpu-aarch64"]
    assert broken("torch 2.10.0", machine="x86_64") == []


def test_two_owners_of_one_path_with_other_content() -> None:
    one = Member(distribution="a", version="1", files={"x.py": "1", "same.py": "2"})
    two = Member(distribution="b", version="1", files={"x.py": "3", "same.py": "2"})
    (found,) = evaluate(RULES, [one, two])
    assert (found.rule, found.distribution) == ("one-owner", "a and b")
    assert "1 path(s)" in found.found
    assert "x.py" in found.found


def test_two_versions_of_one_distribution() -> None:
    pair = [
        Member(distribution="a", version=v, place=f"a-{v}-py3-none-any.whl") for v in ("1", "2")
    ]
    (found,) = evaluate(RULES, pair)
    assert found.rule == "one-version"
    assert "a-1-py3" in found.found
    assert "a-2-py3" in found.found


def test_require_raises_with_everything_a_person_needs() -> None:
    with pytest.raises(FamilyFault) as caught:
        require(broken("nvidia-nccl-cu13 2.28.9"), "The lock", remedy="do this")
    text = "\n".join(caught.value.details)
    assert "nccl-graph-replay" in text
    assert "2.28.9" in text
    assert "issues/52504" in text
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schema = 2", "schema"),
        ('schema = 1\n[rules.a]\nkind = "equal"\nmember = ["x"]', "rules.a"),
        ('schema = 1\n[rules.a]\nkind = "equals"', "rules.a"),
        ("schema = ", "is not TOML"),
    ],
)
def test_wrong_rules_are_refused_with_their_place(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(PinsFault) as caught:
        load_rules(tmp_path)
    assert says in "\n".join([caught.value.what, *caught.value.details])
