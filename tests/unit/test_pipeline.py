"""Stages in order: what runs, what is skipped, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sm121.compile.launching import source_places
from sm121.compile.stage import CompileStage, lasting, wheel_version
from sm121.context import Context, Options
from sm121.errors import CheckFailed, NetworkFault
from sm121.pins.load import load_stack
from sm121.pins.model import Stack
from sm121.pipeline import all_stages, code_digest, run_stages
from sm121.state import State, exclusive
from support.stacks import minimal


@dataclass
class Step:
    """A stage that writes a file; `log` keeps what ran."""

    name: str
    log: list[str]
    given: dict[str, str] = field(default_factory=dict)
    before: str = ""
    failure: BaseException | None = None

    def key(self, context: Context) -> str:
        return f"{self.name}/{context.key}"

    def output(self, context: Context) -> Path:
        return context.layout.build / self.name

    def inputs(self, context: Context, results: Mapping[str, Any]) -> dict[str, str]:
        earlier = {self.before: results[self.before]["value"]} if self.before else {}
        return {**self.given, **earlier}

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        return self.output(context).is_file()

    def run(self, context: Context, results: Mapping[str, Any]) -> dict[str, str]:
        self.log.append(self.name)
        if self.failure:
            raise self.failure
        self.output(context).parent.mkdir(parents=True, exist_ok=True)
        self.output(context).write_text("x")
        return {"value": "-".join(self.given.values())}


@pytest.fixture
def ran() -> list[str]:
    return []


@pytest.fixture
def steps(ran: list[str]) -> list[Step]:
    return [
        Step("one", ran, {"pin a": "1", "pin b": "1"}),
        Step("two", ran, {"option": "x"}, before="one"),
    ]


def test_first_run_runs_all_and_the_second_nothing(
    small: Context, steps: list[Step], ran: list[str], screen
) -> None:
    results, any_ran = run_stages(small, steps)
    assert (ran, any_ran) == (["one", "two"], True)
    assert screen.text.count("first run") == 2
    again, any_ran = run_stages(small, steps)
    assert (ran, any_ran) == (["one", "two"], False)
    assert again == results
    assert screen.text.count("up to date") == 2


def test_changed_input_is_the_reason_and_the_next_stage_follows(
    small: Context, steps: list[Step], ran: list[str], screen
) -> None:
    run_stages(small, steps)
    steps[0].given["pin b"] = "2"
    run_stages(small, steps)
    assert ran == ["one", "two"] * 2
    assert "one         pin b changed" in screen.text
    assert "two         one changed" in screen.text


def test_same_result_of_an_earlier_stage_stops_the_avalanche(
    small: Context, steps: list[Step], ran: list[str]
) -> None:
    run_stages(small, steps)
    steps[0].output(small).unlink()
    run_stages(small, steps)
    assert ran == ["one", "two", "one"]


def test_lost_output_is_the_reason(
    small: Context, steps: list[Step], ran: list[str], screen
) -> None:
    run_stages(small, steps)
    steps[1].output(small).unlink()
    run_stages(small, steps)
    assert ran == ["one", "two", "two"]
    assert "two         its output is gone or was changed" in screen.text


def test_forced_stage_runs_and_says_so(
    small: Context, steps: list[Step], ran: list[str], screen
) -> None:
    run_stages(small, steps)
    run_stages(small, steps, force=["two"])
    assert ran == ["one", "two", "two"]
    assert "asked for" in screen.text


@pytest.mark.parametrize("failure", [NetworkFault("x"), KeyboardInterrupt()])
def test_failed_stage_keeps_those_before_and_runs_again(
    small: Context, steps: list[Step], ran: list[str], failure: BaseException
) -> None:
    steps[1].failure = failure
    with pytest.raises(type(failure)):
        run_stages(small, steps)
    assert set(State.load(small.layout.state).records) == {"one/1.2.3-linux-aarch64"}
    steps[1].failure = None
    run_stages(small, steps)
    assert ran == ["one", "two", "two"]


def test_damaged_state_makes_everything_again(
    small: Context, steps: list[Step], ran: list[str]
) -> None:
    run_stages(small, steps)
    small.layout.state.write_text("{")
    run_stages(small, steps)
    assert ran == ["one", "two"] * 2


def test_dry_run_changes_nothing_and_says_why(
    small: Context, steps: list[Step], ran: list[str], screen
) -> None:
    run_stages(small, steps)
    before = {p: p.read_bytes() for p in small.layout.build.rglob("*") if p.is_file()}
    steps[0].given["pin a"] = "2"
    _, any_ran = run_stages(small, steps, dry_run=True)
    assert not any_ran
    assert ran == ["one", "two"]
    assert "would run: pin a changed" in screen.text
    assert "would run: depends on one" in screen.text
    assert {p: p.read_bytes() for p in small.layout.build.rglob("*") if p.is_file()} == before


class Refusing(Step):
    def guard(self, context: Context) -> None:
        raise CheckFailed("somebody's files are in the way")


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_would_stop_a_later_stage_is_found_before_the_first_runs(
    small: Context, steps: list[Step], ran: list[str], dry_run: bool
) -> None:
    """After hours of compiling is too late; with nothing to do it is nobody's concern."""
    last = Refusing(**vars(steps[-1]))
    with pytest.raises(CheckFailed, match="in the way"):
        run_stages(small, [*steps[:-1], last], dry_run=dry_run)
    assert ran == []
    run_stages(small, steps)
    assert run_stages(small, [*steps[:-1], last], dry_run=dry_run)[1] is False


def test_old_log_of_a_stage_is_gone_when_it_runs(small: Context, steps: list[Step]) -> None:
    small.layout.log.mkdir(parents=True)
    small.log("one").write_text("of an earlier run")
    run_stages(small, steps)
    log = small.log("one").read_text()
    assert "of an earlier run" not in log
    assert log.splitlines()[:3] == ["# stage one: first run", "#   pin a: 1", "#   pin b: 1"]


def test_two_targets_do_not_overwrite_each_others_record(
    small: Context, steps: list[Step], ran: list[str]
) -> None:
    other = replace(small, options=replace(small.options, target="linux-x86_64"))
    run_stages(small, steps)
    run_stages(other, steps)
    run_stages(small, steps)
    assert ran == ["one", "two"] * 2


def test_stages_are_in_the_order_of_the_design(small: Context) -> None:
    assert [s.name for s in all_stages(small)] == [
        "source", "patch", "sources", "environment", "toolkit", "compile", "wheelhouse",
        "verify",
    ]  # fmt: skip


def test_profile_without_third_party_sources_has_no_such_stage(small: Context) -> None:
    data = minimal()
    data["profiles"]["smoke"]["sources"] = []
    bare = replace(small, stack=Stack.model_validate(data))
    assert "sources" not in [s.name for s in all_stages(bare)]


def test_code_of_each_stage_has_a_digest(small: Context) -> None:
    packages = {type(s).__module__.rpartition(".")[0] for s in all_stages(small)}
    assert len({code_digest(p) for p in packages}) == len(packages) == 6


# --- the version --------------------------------------------------------------------


def results_of(*patch_ids: str) -> dict[str, Any]:
    return {
        "patch": {"patches": [{"name": f"p{i}", "patch_id": p} for i, p in enumerate(patch_ids)]}
    }


@pytest.fixture
def locked(small: Context) -> Context:
    (small.layout.pins / "1.2.3/pylock.linux-aarch64-cp312.toml").write_text("lock")
    return small


def test_version_is_the_pins_whatever_tags_git_has(locked: Context) -> None:
    """cases.md 13."""
    version = wheel_version(locked, results_of("a"))
    release, local = version.split("+")
    assert release == "1.2.3"
    assert local.startswith("sm121.smoke.")
    assert len(local.split(".")[2]) == 8


def test_version_changes_with_series_lock_and_profile(locked: Context) -> None:
    versions = [
        wheel_version(locked, results_of("a")),
        wheel_version(locked, results_of("b")),
        wheel_version(locked, results_of("a", "b")),
        wheel_version(locked, results_of("b", "a")),
    ]
    (locked.layout.pins / "1.2.3/pylock.linux-aarch64-cp312.toml").write_text("another lock")
    versions.append(wheel_version(locked, results_of("a")))
    assert len(set(versions)) == len(versions)


def test_version_does_not_change_by_itself(locked: Context) -> None:
    assert len({wheel_version(locked, results_of("a")) for _ in range(3)}) == 1


def with_source(**changes: object) -> dict[str, Any]:
    source = {"provider": "git", "path": "/a", "digest": {"include": "h1:1", "tools": "h1:2"}}
    return {**results_of("a"), "sources": {"sources": {"cutlass": source | changes}}}


def repinned(context: Context, **changes: object) -> Context:
    """The same with values of the stack's tables changed: cuda__arch='12.0f'."""
    data = minimal()
    for path, value in changes.items():
        *tables, key = path.split("__")
        table = data
        for name in tables:
            table = table[name]
        table[key.replace("_", "-")] = value
    return replace(context, stack=Stack.model_validate(data))


def test_version_of_what_is_compiled_changes_with_all_that_decides_it(locked: Context) -> None:
    def of(context: Context, results: Mapping[str, Any]) -> str:
        return CompileStage().version(context, results)

    archs = repinned(locked, cuda__accepted_archs=["12.1a", "12.0f"])
    versions = [
        of(locked, with_source()),
        of(locked, with_source(digest={"include": "h1:3", "tools": "h1:2"})),
        of(locked, with_source(digest={"include": "h1:1"})),
        of(locked, results_of("a")),
        of(repinned(locked, sources__cutlass__ref="v4.4.3"), with_source()),
        of(repinned(locked, sources__cutlass__submodules={"x": "a" * 40}), with_source()),
        of(repinned(locked, sources__cutlass__cmake={"X_DIR": "include"}), with_source()),
        of(repinned(locked, cuda__toolkit={"nvidia-cuda-nvcc": "13.0.89"}), with_source()),
        of(replace(archs, options=replace(archs.options, arch="12.0f")), with_source()),
    ]
    assert len(set(versions)) == len(versions)
    default = replace(archs, options=replace(archs.options, arch="12.1a"))
    assert of(default, with_source()) == versions[0]


def test_version_is_the_same_whoever_provides_a_source_and_wherever_it_lies(
    locked: Context,
) -> None:
    digests = {"tools": "h1:2", "include": "h1:1"}
    elsewhere = repinned(
        locked,
        sources__cutlass__git="https://elsewhere.invalid/cutlass.git",
        sources__cutlass__commit="d" * 40,
        sources__cutlass__wheels=[],
    )
    versions = {
        CompileStage().version(context, with_source(**changes))
        for context in (locked, elsewhere)
        for changes in (
            {}, {"provider": "a local clone, commit 1", "path": "/b"},
            {"provider": "wheel x-1-py3-none-any.whl"}, {"digest": digests},
        )
    }  # fmt: skip
    assert len(versions) == 1


def test_version_is_always_one_that_packaging_leaves_alone(locked: Context) -> None:
    """A part of digits only would lose its leading zeros (PEP 440)."""
    from packaging.version import Version

    for n in range(300):
        version = wheel_version(locked, results_of(str(n)))
        assert str(Version(version)) == version


# --- one run at a time --------------------------------------------------------------


def test_where_sources_lie_makes_no_other_ninja_tree(small: Context, root: Path) -> None:
    """`--without`, or another profile, uses others of them: the objects that are shared stay."""
    context = replace(small, stack=load_stack(root / "pins", "0.26.0"))
    flags = 'set(CMAKE_CXX_FLAGS_INIT "-ffile-prefix-map=/b/cutlass=cutlass")\n'
    assert lasting(f"{flags}set(CUTLASS_INCLUDE_DIR /b/cutlass/include)\n", context) == flags
    places = source_places(context)
    assert places.keys() == context.stack.sources.keys()
    smoke = replace(context, options=Options(profile="smoke"))
    assert source_places(smoke) == places


def test_lock_is_free_again_after_a_failure(tmp_path: Path) -> None:
    def fail() -> None:
        with exclusive(tmp_path / "build", "build"):
            raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            fail()
    assert not (tmp_path / "build/.lock-owner.json").exists()
