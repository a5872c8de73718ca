"""What a new upstream asks of the family, against pins and rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sm121.pins.model import Stack
from sm121.rebase.drift import exact, family_rows, source_rows
from sm121.rules.model import load_rules
from sm121.source.drift import Fetched


def asked(*lines: str) -> dict[str, Requirement]:
    return {r.name: r for r in map(Requirement, lines)}


@pytest.fixture
def rows(root: Path, stack: Stack):
    def make(before, now):
        return {r.name: r for r in family_rows(before, now, stack, load_rules(root / "pins"))}

    return make


def test_pin_that_followed_upstream_follows_it_and_one_of_our_own_stays(rows) -> None:
    found = rows(
        asked("torch==2.11.0", "flashinfer-python==0.6.14"),
        asked("torch==2.13.0", "flashinfer-python==0.6.16"),
    )
    assert (found["torch"].pinned, found["torch"].proposed) == ("2.11.0", "2.13.0")
    assert (found["flashinfer-python"].pinned, found["flashinfer-python"].proposed) == (
        "0.6.17",
        "0.6.17",
    )


def test_rules_that_speak_against_it_are_named(rows) -> None:
    found = rows(
        asked("apache-tvm-ffi==0.1.10"), asked("apache-tvm-ffi==0.1.13", "tilelang==0.1.9")
    )
    (against,) = found["apache-tvm-ffi"].against
    assert against.startswith("tvm-ffi-symbols: 0.1.13 beside tilelang 0.1.9")


def test_rule_about_a_member_that_upstream_does_not_name(rows) -> None:
    found = rows(asked("torch==2.10.0"), asked("torch==2.11.0", "torchvision==0.25.0"))
    assert any("torch-torchvision" in line for line in found["torchvision"].against)


def test_other_requirements_are_listed_where_they_changed(rows) -> None:
    found = rows(asked("numpy", "scipy==1"), asked("numpy", "scipy==2", "new>=1"))
    assert "numpy" not in found
    assert (found["scipy"].before, found["scipy"].now, found["scipy"].pinned) == ("==1", "==2", "")
    assert (found["new"].before, found["new"].now) == ("", ">=1")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("a==1", "1"),
        ("a==1.*", ""),
        ("a>=1", ""),
        ("a", ""),
        ("a==1,!=2", ""),
        ("a[x]==1.post2", "1.post2"),
    ],
)
def test_exact_version_of_a_requirement(text: str, version: str) -> None:
    assert exact(Requirement(text)) == version


def test_source_of_another_owner_is_the_same_source(stack: Stack) -> None:
    declared = [
        Fetched(file=p.upstream_file, repository=p.upstream_repository.lower(), ref=p.ref)
        for p in stack.sources.values()
    ]
    assert source_rows(declared, stack) == []
    moved = [
        d
        if "deepgemm" not in d.repository
        else Fetched(file=d.file, repository="other/deepgemm", ref="v9")
        for d in declared
    ]
    (row,) = source_rows(moved, stack)
    assert (row.name, row.wanted, row.repository) == ("deepgemm", "v9", "other/deepgemm")
    (gone,) = source_rows(declared[1:], stack)
    assert (gone.name, gone.wanted) == ("cutlass", "")
