"""stack.toml for another release: what changes, and that all else stays."""

from __future__ import annotations

import difflib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sm121.pins.load import parse_stack
from sm121.pins.model import Stack
from sm121.rebase.onto import Upstream
from sm121.rebase.propose import UNKNOWN_COMMIT, propose
from sm121.rebase.report import FamilyRow, SourceRow
from sm121.source.drift import Fetched

UPSTREAM = Upstream(
    label="9.9.0", version="9.9.0", commit="d" * 40, provider="sdist", reason="", date=datetime(2027, 1, 2, tzinfo=UTC),
    sdist_sha256="b" * 64,
)  # fmt: skip
DECLARED = [
    Fetched(file="cmake/external_projects/new.cmake", repository="owner/newkernels", ref="v7")
]


@pytest.fixture
def proposed(root: Path, stack_name: str, stack: Stack):
    """Propose from the real pins; returns the old text, the new one and the new stack."""
    text = (root / "pins" / stack_name / "stack.toml").read_text()

    def make(**changes):
        usual = {"family": [], "sources": [], "declared": DECLARED, "cmake": {},
                 "new_components": [], "gone_components": []}  # fmt: skip
        new = propose(text, stack, UPSTREAM, **{**usual, **changes})
        return text, new, parse_stack(new, Path("stack.toml"))

    return make


def changed(old: str, new: str) -> list[str]:
    return [
        line for line in difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]  # fmt: skip


def test_release_is_moved_and_nothing_else(proposed) -> None:
    old, new, stack = proposed()
    assert (stack.vllm.version, stack.vllm.tag, stack.vllm.sdist_sha256) == (
        "9.9.0",
        "v9.9.0",
        "b" * 64,
    )
    assert stack.vllm.commit == UNKNOWN_COMMIT
    assert "date = 2027-01-02T00:00:00Z" in new
    assert len(changed(old, new)) == 10


def test_family_moves_with_its_history(proposed, stack: Stack) -> None:
    row = FamilyRow(name="torch", before="", now="", pinned="2.11.0", proposed="2.13.0")
    stay = FamilyRow(name="tilelang", before="", now="==9", pinned="0.1.9", proposed="0.1.9")
    other = FamilyRow(name="numpy", before="", now="==9", pinned="", proposed="")
    _, _, new = proposed(family=[row, stay, other])
    assert new.family["torch"].version == "2.13.0"
    assert new.family["torch"].reason.endswith(stack.family["torch"].reason)
    assert new.family["tilelang"] == stack.family["tilelang"]


def test_source_moves_and_what_is_not_known_is_marked(proposed) -> None:
    row = SourceRow(name="cutlass", file="", pinned="v4.4.2", wanted="v4.5.0")
    plain = SourceRow(name="msa", file="", pinned="x", wanted="v2", repository="other/MSA")
    _, text, new = proposed(sources=[row, plain])
    assert new.sources["cutlass"].ref == "v4.5.0"
    assert "# To be checked: commit, digest, wheels still of v4.4.2.\n[sources.cutlass]\n" in text
    assert new.sources["msa"].git == "https://github.com/other/MSA.git"
    assert new.sources["msa"].upstream_repository == "other/MSA"
    assert text.count("# To be checked") == 1


def test_source_that_is_new_is_added_and_one_that_is_gone_is_removed(proposed) -> None:
    sources = [
        SourceRow(name="owner/newkernels", file=DECLARED[0].file, pinned="", wanted="v7"),
        SourceRow(name="cutlass", file="CMakeLists.txt", pinned="v4.4.2", wanted=""),
    ]
    cmake = {DECLARED[0].file: "if(DEFINED ENV{NEW_KERNELS_SRC_DIR})"}
    _, text, new = proposed(sources=sources, cmake=cmake)
    assert "cutlass" not in new.sources
    assert all("cutlass" not in profile.sources for profile in new.profiles.values())
    assert "[[sources.cutlass.wheels]]" not in text
    added = new.sources["newkernels"]
    assert (added.ref, added.env) == ("v7", "NEW_KERNELS_SRC_DIR")


def test_components_come_and_go(proposed) -> None:
    _, _, new = proposed(new_components=["_new_C"], gone_components=["fmha_sm100", "spinloop"])
    assert "_new_C" in new.components
    assert not {"fmha_sm100", "spinloop"} & {*new.components, *new.left_out}
    assert new.profiles["smoke"].components == ("fs_io_C", "cumem_allocator")
