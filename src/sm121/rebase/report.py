"""What a rebase found, as data. Published as report.schema.json; tested to be equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sm121.published import report_text, schema_text_of

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

Verdict = Literal[
    "clean", "clean with offset", "upstreamed", "upstreamed in part", "superseded",
    "superseded in part", "conflict", "depends",
]  # fmt: skip
VERDICTS: tuple[str, ...] = get_args(Verdict)
# Those that go on by themselves.
CARRIED = ("clean", "clean with offset", "upstreamed", "upstreamed in part")
Became = Literal["", "carried", "resolved", "remembered", "upstreamed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HunkRow:
    """One hunk of a patch. line: 1-based in the file that the patch was made for; line_now:
    in the new upstream (with the patches before it). file_now: '' if the file is gone.

    beside: lines of its context were changed, so that only a three-way merge can place it.
    before, upstream, ours: the three texts of the place, where they meet. moved_to: line that
    has our replaced lines elsewhere now, 0 if none. recent: upstream's newest commits to these
    lines, where history is there.
    """

    file: str
    file_now: str
    line: int
    line_now: int
    state: Literal["applies", "upstreamed", "in part", "superseded", "conflict"]
    offset: int = 0
    beside: bool = False
    before: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    moved_to: int = 0
    recent: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchRow:
    """What became of one patch. offset: largest, in lines. depends_on: patches that are left
    out (they conflict or were skipped) and that it needs. became: '' while nothing was done.
    why: reason of a skip, or the proof that upstream has it.
    """

    name: str
    subject: str
    verdict: Verdict
    hunks: tuple[HunkRow, ...]
    offset: int = 0
    depends_on: tuple[str, ...] = ()
    remembered: bool = False
    became: Became = ""
    why: str = ""

    @property
    def good(self) -> bool:
        """Does it go on without a person?"""
        return self.verdict in CARRIED or self.remembered


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """One third-party source of upstream's CMake; '' where a side has none.

    repository: 'owner/name' that upstream takes it from now, '' if that is the pinned one.
    """

    name: str
    file: str
    pinned: str
    wanted: str
    repository: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow:
    """One requirement: what the old and the new upstream ask for, what we pin and propose.

    against: rules of pins/rules.toml that what the new upstream asks for would break.
    """

    name: str
    before: str
    now: str
    pinned: str
    proposed: str
    against: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OntoRow:
    """The series on one new upstream. provider: git or sdist; history: is there any?"""

    label: str
    version: str
    commit: str
    provider: Literal["git", "sdist"]
    reason: str
    sdist_sha256: str
    history: bool
    patches: tuple[PatchRow, ...]
    sources: tuple[SourceRow, ...]
    family: tuple[FamilyRow, ...]
    components_new: tuple[str, ...] = ()
    components_gone: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return all(patch.good or patch.became for patch in self.patches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The whole answer. state: 'checked' (nothing was touched), 'stopped' (at `stopped_at`, in
    `worktree`), 'finished' (not accepted yet) or 'accepted'. proposal: diff of what accepting
    writes. range_diff: git's, of the old series against the new.
    """

    schema_version: Literal[1]
    stack: str
    version: str
    commit: str
    state: Literal["checked", "stopped", "finished", "accepted"]
    onto: tuple[OntoRow, ...]
    stopped_at: str = ""
    worktree: str = ""
    range_diff: str = ""
    proposal: str = ""


def to_json(report: Report) -> str:
    """The report as JSON text, per report.schema.json."""
    return report_text(report)


def schema_text() -> str:
    """The JSON schema (2020-12) of a report."""
    return schema_text_of(Report)
