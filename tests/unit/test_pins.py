"""stack.toml: what is accepted, and what a fault says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sm121.context import Options, validate_options
from sm121.errors import PinsFault, UsageFault
from sm121.pins.load import default_stack, load_stack, stack_names
from sm121.pins.model import Stack
from support.stacks import COMMIT, minimal, write_stack

Data = dict[str, Any]


def load(tmp_path: Path, data: Data) -> Stack:
    write_stack(tmp_path, data)
    return load_stack(tmp_path, "1.2.3")


def faults(tmp_path: Path, data: Data) -> tuple[str, ...]:
    with pytest.raises(PinsFault) as raised:
        load(tmp_path, data)
    assert raised.value.exit_code == 2
    assert str(tmp_path / "1.2.3/stack.toml") in raised.value.what
    return raised.value.details


def test_real_stacks_load(root: Path) -> None:
    names = stack_names(root / "pins")
    assert "0.26.0" in names
    for name in names:
        assert load_stack(root / "pins", name).vllm.version == name


def test_default_names_a_stack_that_exists(root: Path) -> None:
    assert default_stack(root / "pins") in stack_names(root / "pins")


def test_minimal_stack_loads_and_keeps_its_values(tmp_path: Path) -> None:
    stack = load(tmp_path, minimal())
    assert stack.vllm.commit == COMMIT
    assert stack.targets["linux-aarch64"].pythons == ("3.12", "3.11")
    assert stack.family["nvidia-cutlass-dsl"].extras == ("cu13",)
    assert stack.sources["cutlass"].wheels[0].subtrees == {
        "include": "flashinfer/data/cutlass/include"
    }


def test_pins_are_frozen(tmp_path: Path) -> None:
    stack = load(tmp_path, minimal())
    with pytest.raises(ValidationError, match="frozen"):
        stack.vllm.version = "9"


def put(*path: str | int, value: object) -> Callable[[Data], None]:
    """An edit: set the value at a path."""

    def edit(data: Data) -> None:
        here: Any = data
        for part in path[:-1]:
            here = here[part]
        here[path[-1]] = value

    return edit


def less(**other: object) -> Data:
    """An entry of [[sources-left-out]]."""
    return {"patch": "p", "component": "spinloop", "sources": ["csrc/a.cu"], "reason": "r"} | other


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (put("vllm", "comit", value="x"), "vllm.comit: unknown key; did you mean 'commit'?"),
        (put("cuda", "archs", value="x"), "cuda.archs: unknown key; did you mean 'arch'?"),
        (put("profile", value={}), "profile: unknown key; did you mean 'profiles'?"),
        (
            put("family", "torch", "verison", value="1"),
            "family.torch.verison: unknown key; did you mean 'version'?",
        ),
        (
            put("targets", "linux-aarch64", "python", value=[]),
            "targets.linux-aarch64.python: unknown key; did you mean 'pythons'?",
        ),
        (
            put("sources", "cutlass", "upstream-files", value="x"),
            "sources.cutlass.upstream-files: unknown key; did you mean 'upstream-file'?",
        ),
        (
            put("sources", "cutlass", "wheels", 0, "subtree", value={}),
            "sources.cutlass.wheels.0.subtree: unknown key; did you mean 'subtrees'?",
        ),
        (
            put("profiles", "smoke", "componets", value=[]),
            "profiles.smoke.componets: unknown key; did you mean 'components'?",
        ),
        (
            put("sources-left-out", value=[less(kernel="x")]),
            "sources-left-out.0.kernel: unknown key; did you mean 'kernels'?",
        ),
        (
            put("host", "zzz", value=1),
            "host.zzz: unknown key; known here: programs, requirements",
        ),
    ],
)
def test_unknown_key_has_its_dotted_path_and_a_suggestion(
    tmp_path: Path, edit: Callable[[Data], None], expected: str
) -> None:
    data = minimal()
    edit(data)
    assert faults(tmp_path, data) == (expected,)


@pytest.mark.parametrize(
    ("edit", "path", "says"),
    [
        (put("vllm", "sdist-sha256", value="A" * 64), "vllm.sdist-sha256", "lower-case hex"),
        (put("vllm", "sdist-sha256", value="a" * 63), "vllm.sdist-sha256", "64"),
        (put("vllm", "commit", value="f2654939"), "vllm.commit", "40"),
        (put("vllm", "version", value="one"), "vllm.version", "PEP 440"),
        (put("vllm", "version", value=1.2), "vllm.version", "string"),
        (put("vllm", "date", value="yesterday"), "vllm.date", "date"),
        (put("vllm", "tag", value="--upload-pack=x"), "vllm.tag", "git tag"),
        (put("vllm", "tag", value="a..b"), "vllm.tag", "git tag"),
        (put("cuda", "version", value="13"), "cuda.version", "pattern"),
        (put("cuda", "arch", value="sm_121a"), "cuda.arch", "pattern"),
        (put("cuda", "arch", value="12.0"), "cuda", "accepted-archs"),
        (put("cuda", "toolkit", value={"Nvidia_NVCC": "1"}), "cuda.toolkit", "nvidia-nvcc"),
        (put("targets", "linux-aarch64", "pythons", value="3.12"), "targets.linux-aarch64.pythons", "tuple"),
        (put("targets", "linux-aarch64", "pythons", value=[]), "targets.linux-aarch64.pythons", "at least 1"),
        (put("targets", "linux-aarch64", "glibc", value="3.0"), "targets.linux-aarch64.glibc", "pattern"),
        (put("targets", "windows", value={"glibc": "2.39", "pythons": ["3.12"]}), "targets.windows", "linux-x86_64"),
        (put("host", "requirements", value=["cmake >= "]), "host.requirements.0", "PEP 508"),
        (put("sources", "cutlass", "env", value="cutlass dir"), "sources.cutlass.env", "pattern"),
        (put("sources", "cutlass", "upstream-file", value="/etc/x"), "sources.cutlass.upstream-file", "stays inside"),
        (put("sources", "cutlass", "subdirectory", value="../x"), "sources.cutlass.subdirectory", "stays inside"),
        (put("sources", "cutlass", "submodules", value={"x": "v1"}), "sources.cutlass.submodules.x", "40"),
        (put("sources", "cutlass", "digest", value={".": "abc"}), "sources.cutlass.digest", "pattern"),
        (put("profiles", "smoke", "components", value=[]), "profiles.smoke.components", "at least 1"),
        (put("profiles", "smoke", "memory-per-job-gib", value=0), "profiles.smoke.memory-per-job-gib", "greater than 0"),
        (put("profiles", "smoke", "memory-per-job-gib", value="much"), "profiles.smoke.memory-per-job-gib", "number"),
        (put("sources-left-out", value=[less(sources=[])]), "sources-left-out.0.sources", "at least 1"),
        (put("sources-left-out", value=[less(sources=["b.cu", "../a.cu"])]), "sources-left-out.0.sources.1", "stays inside"),
        (put("sources-left-out", value=[less(sources=["b.cu", "csrc/{x}.cu"])]), "sources-left-out.0.sources.1", "pattern"),
        (put("sources-left-out", value=[less(sources=["csrc/*.cu"])]), "sources-left-out.0", "name each source"),
        (put("sources-left-out", value=[less(reason="")]), "sources-left-out.0.reason", "at least 1"),
        (put("schema", value=2), "schema", "1"),
        (put("schema", value="1"), "schema", "1"),
    ],
)  # fmt: skip
def test_wrong_value_names_the_key_and_what_was_expected(
    tmp_path: Path, edit: Callable[[Data], None], path: str, says: str
) -> None:
    data = minimal()
    edit(data)
    (fault,) = faults(tmp_path, data)
    assert fault.startswith(path)
    assert says in fault


def test_wrong_value_is_shown(tmp_path: Path) -> None:
    data = minimal()
    data["vllm"]["commit"] = "f2654939"
    assert "'f2654939'" in faults(tmp_path, data)[0]


def test_a_time_without_zone_is_refused(tmp_path: Path) -> None:
    """It would mean another SOURCE_DATE_EPOCH and other commit ids on each machine."""
    data = minimal()
    data["vllm"]["date"] = datetime(2026, 1, 2, 3, 4, 5)
    (fault,) = faults(tmp_path, data)
    assert fault.startswith("vllm.date")


def test_a_key_spelt_with_an_underscore_is_not_ignored(tmp_path: Path) -> None:
    """Both spellings at once: one of the two values would be dropped in silence."""
    data = minimal()
    data["vllm"]["sdist_sha256"] = "b" * 64
    assert faults(tmp_path, data) == (
        "vllm.sdist_sha256: unknown key; did you mean 'sdist-sha256'?",
    )


@pytest.mark.parametrize(
    ("section", "key"),
    [("vllm", "commit"), ("cuda", "toolkit"), ("host", "requirements")],
)
def test_missing_key_is_named(tmp_path: Path, section: str, key: str) -> None:
    data = minimal()
    del data[section][key]
    assert faults(tmp_path, data) == (f"{section}.{key}: missing",)


def test_missing_key_in_a_table_of_tables_is_named(tmp_path: Path) -> None:
    data = minimal()
    del data["family"]["torch"]["reason"]
    del data["sources"]["cutlass"]["env"]
    assert set(faults(tmp_path, data)) == {
        "family.torch.reason: missing",
        "sources.cutlass.env: missing",
    }


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    data = minimal()
    data["vllm"]["commit"] = "short"
    data["cuda"]["arc"] = "12.1a"
    del data["lock-date"]
    data["schema"] = 7
    with pytest.raises(PinsFault) as raised:
        load(tmp_path, data)
    assert "4 fault(s)" in raised.value.what
    assert {line.split(":")[0] for line in raised.value.details} == {
        "vllm.commit", "cuda.arc", "lock-date", "schema",
    }  # fmt: skip
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            put("profiles", "smoke", "components", value=["spinlop"]),
            "profiles.smoke.components: no component is named 'spinlop'; did you mean 'spinloop'?",
        ),
        (
            put("profiles", "smoke", "components", value=["_fa3"]),
            "profiles.smoke.components: '_fa3' is also in left-out",
        ),
        (
            put("profiles", "smoke", "sources", value=["cutlas"]),
            "profiles.smoke.sources: no source is named 'cutlas'",
        ),
        (put("left-out", "fa9", value="x"), "left-out: no component is named 'fa9'"),
        (put("overrides", "numpy", value="x"), "overrides.numpy: not a member of the family"),
        (
            put("sources-left-out", value=[less(component="spinlop")]),
            "sources-left-out.0.component: no component is named 'spinlop'; did you mean 'spinloop'?",
        ),
        (
            put("sources-left-out", value=[less(), less(component="_fa3")]),
            "sources-left-out.1.component: '_fa3' is in left-out, all of it",
        ),
        (
            put("sources-left-out", value=[less(sources=["{cutlas}/a.cu"])]),
            "sources-left-out.0.sources: no source is named 'cutlas'",
        ),
        (
            put("sources-left-out", value=[less(), less(sources=["csrc/b.cu", "csrc/a.cu"])]),
            "sources-left-out.1.sources: 'csrc/a.cu' is listed twice",
        ),
    ],
)
def test_tables_must_agree_with_each_other(
    tmp_path: Path, edit: Callable[[Data], None], says: str
) -> None:
    data = minimal()
    edit(data)
    (fault,) = faults(tmp_path, data)
    assert says in fault


@pytest.mark.parametrize("content", [b"schema = ", b"[vllm\n", b"\xff\xfe\x00"])
def test_a_file_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    file = write_stack(tmp_path, minimal())
    file.write_bytes(content)
    with pytest.raises(PinsFault, match="is not TOML") as raised:
        load_stack(tmp_path, "1.2.3")
    assert raised.value.cause


def test_unknown_stack_lists_those_there_are_and_the_nearest(tmp_path: Path) -> None:
    write_stack(tmp_path, minimal(), "0.26.0")
    write_stack(tmp_path, minimal(), "1.9.9")
    with pytest.raises(PinsFault, match=r"no stack '0\.26'") as raised:
        load_stack(tmp_path, "0.26")
    assert "0.26.0, 1.9.9" in raised.value.cause
    assert "--stack 0.26.0" in raised.value.remedy


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_default_file_missing_or_empty(tmp_path: Path, content: str | None) -> None:
    write_stack(tmp_path, minimal(), "0.26.0")
    if content is not None:
        (tmp_path / "default").write_text(content)
    with pytest.raises(PinsFault, match="default"):
        default_stack(tmp_path)


@pytest.mark.parametrize(
    ("options", "says", "remedy"),
    [
        (Options(profile="full"), "no profile 'full'", "--profile smoke"),
        (Options(arch="9.0a"), "--arch 9.0a", "--arch 12.1a"),
        (Options(jobs=0), "--jobs 0", ""),
        (Options(jobs=-3), "--jobs -3", ""),
    ],
)
def test_options_that_a_stack_does_not_have(
    tmp_path: Path, options: Options, says: str, remedy: str
) -> None:
    with pytest.raises(UsageFault, match=says) as raised:
        validate_options(load(tmp_path, minimal()), options)
    assert remedy in raised.value.remedy


def test_target_that_the_stack_lacks(tmp_path: Path) -> None:
    data = minimal()
    del data["targets"]["linux-x86_64"]
    with pytest.raises(UsageFault, match="linux-x86_64") as raised:
        validate_options(load(tmp_path, data), Options(target="linux-x86_64"))
    assert "linux-aarch64" in raised.value.remedy


def test_plain_arch_is_refused_with_the_reason(stack: Stack) -> None:
    """cases.md 21: ptxas would refuse it, minutes later and less clearly."""
    with pytest.raises(UsageFault, match=r"--arch 12\.1 ") as raised:
        validate_options(stack, Options(arch="12.1"))
    assert ".e2m1x2 not supported on .target sm_121" in raised.value.cause
    assert "--arch 12.1a" in raised.value.remedy


def test_every_pin_of_the_real_stack_has_a_reason(stack: Stack) -> None:
    assert all(pin.reason for pin in stack.family.values())
    assert all(stack.overrides.values())
    assert all(stack.left_out.values())
    assert all(stack.components.values())
