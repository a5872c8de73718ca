"""Rules over the real pins and over locks: what `lock` refuses. Cases 8, 9, 10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sm121.errors import FamilyFault
from sm121.index import IndexFile
from sm121.lock import resolve as resolving
from sm121.lock.check import check_lock, check_pins
from sm121.lock.pylock import LockedFile, Target, make_lock
from sm121.pins.model import Stack
from sm121.rules.model import Rules, load_rules

REQUIREMENTS = {
    "requirements/cuda.txt": "-r common.txt\ntorch==2.11.0 # why\nnvidia-cutlass-dsl[cu13]==4.5.1\n",
    "requirements/common.txt": "# a comment\nnumpy\n",
}


@pytest.fixture(scope="session")
def rules(root: Path) -> Rules:
    return load_rules(root / "pins")


def altered(stack: Stack, name: str, **changes: Any) -> Stack:
    family = {**stack.family, name: stack.family[name].model_copy(update=changes)}
    return stack.model_copy(update={"family": family})


def refusal(stack: Stack, rules: Rules) -> str:
    with pytest.raises(FamilyFault) as caught:
        check_pins(stack, rules, REQUIREMENTS)
    return "\n".join([caught.value.what, *caught.value.details, caught.value.remedy])


def test_the_pins_break_no_rule(stack: Stack, rules: Rules) -> None:
    check_pins(stack, rules, REQUIREMENTS)


def test_removed_extra_names_the_lost_package(stack: Stack, rules: Rules) -> None:
    """cases.md 8."""
    said = refusal(altered(stack, "nvidia-cutlass-dsl", extras=()), rules)
    assert "nvidia-cutlass-dsl-libs-cu13" in said
    assert "nvidia-cutlass-dsl[cu13]" in said
    assert "stack.toml" in said


def test_newer_tvm_ffi_names_rule_symptom_and_symbol(stack: Stack, rules: Rules) -> None:
    """cases.md 9."""
    said = refusal(altered(stack, "apache-tvm-ffi", version="0.1.13.post3"), rules)
    assert "rule tvm-ffi-symbols" in said
    assert "0.1.13.post3 beside tilelang 0.1.9" in said
    assert "tvm::ffi::json::Stringify" in said


def test_toolkit_of_another_minor(stack: Stack, rules: Rules) -> None:
    toolkit = {**stack.cuda.toolkit, "nvidia-cuda-nvcc": "13.5.10"}
    cuda = stack.cuda.model_copy(update={"toolkit": toolkit})
    assert "rule cuda-one-minor" in refusal(stack.model_copy(update={"cuda": cuda}), rules)


def lock_of(*pairs: str):
    files = []
    for pair in pairs:
        name, version = pair.split("==")
        filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        files.append(
            LockedFile(
                distribution=name, version=version, filename=filename, sha256="a" * 64, size=1
            )
        )
    return make_lock(files, python="3.12", inputs="")


def test_lock_without_the_component_is_refused(rules: Rules) -> None:
    """cases.md 8, seen in what came out of the resolution."""
    lock = lock_of("nvidia-cutlass-dsl==4.5.1", "nvidia-cutlass-dsl-libs-base==4.5.1")
    with pytest.raises(FamilyFault) as caught:
        check_lock(lock, rules, filename="pylock.x.toml", machine="aarch64")
    assert "pylock.x.toml" in caught.value.what
    assert "nvidia-cutlass-dsl-libs-cu13" in caught.value.details[0]


def test_host_lock_may_have_the_nccl_that_torch_asks_for(rules: Rules) -> None:
    lock = lock_of("nvidia-nccl-cu13==2.28.9")
    check_lock(lock, rules, filename="host", machine="aarch64", serving=False)
    with pytest.raises(FamilyFault):
        check_lock(lock, rules, filename="family", machine="aarch64")


def test_overrides_are_written_with_their_extras(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """cases.md 8 and 10: uv takes an override for the whole requirement."""
    seen: dict[str, str] = {}

    def compile_lock(requirements: list[str], *, arguments: list[Any], **_: Any) -> list[IndexFile]:
        seen["overrides"] = Path(arguments[arguments.index("--override") + 1]).read_text()
        seen["arguments"] = " ".join(map(str, arguments))
        seen["requirements"] = "\n".join(requirements)
        return [
            IndexFile(
                distribution="x", version="1", filename="x-1-py3-none-any.whl", url="",
                sha256="a" * 64, size=1,
            )
        ]  # fmt: skip

    monkeypatch.setattr(resolving, "compile_lock", compile_lock)
    pins = stack.model_copy(
        update={
            "overrides": {**stack.overrides, "nvidia-cutlass-dsl": "another override"},
            "lock_newer": {"numpy": stack.lock_date},
        }
    )
    target = Target.make("linux-aarch64", python="3.12", glibc="2.39")
    resolving.resolve(pins, "family", target, REQUIREMENTS, log=tmp_path / "log")
    assert seen["overrides"].splitlines() == [
        f"nvidia-nccl-cu13=={stack.family['nvidia-nccl-cu13'].version}",
        f"nvidia-cutlass-dsl[cu13]=={stack.family['nvidia-cutlass-dsl'].version}",
    ]
    assert f"--exclude-newer-package numpy={stack.lock_date.isoformat()}" in seen["arguments"]
    assert f"uv=={stack.installer['uv']}" in seen["requirements"]
