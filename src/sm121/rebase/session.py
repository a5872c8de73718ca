"""An unfinished rebase on disk, so that a killed one can be continued or aborted.

build/rebase/session.json is written whole or not at all, after each patch. Objects are in the
pipeline's repository, kept by a ref. patches/ and pins/ are not touched before `accept`, which
first notes here what it is going to write.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from sm121.errors import UsageFault
from sm121.files import remove_tree, write_atomic
from sm121.gitseries import SeriesRepository
from sm121.layout import Layout
from sm121.rebase.onto import Upstream
from sm121.rebase.report import PatchRow

REF = "refs/sm121/rebase"
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """One patch that is decided. commit: in the new series, '' if it has none.

    resolutions: names of the remembered resolutions that it needed.
    """

    row: PatchRow
    commit: str
    resolutions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepting:
    """What accepting writes: new paths, relative to the root; its entry in the changelog."""

    created: tuple[str, ...]
    entry: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """series: names and sha256 of the old series, to notice edits. commit: the new series so
    far. now, before: the walk's two trees. phase 'stopped': a person works in the worktree.
    skips: what was asked to be left out, name → reason.
    """

    schema: Literal[1]
    stack: str
    base: str
    upstream: Upstream
    series: tuple[tuple[str, str], ...]
    done: tuple[Done, ...]
    commit: str
    now: str
    before: str
    left_out: tuple[str, ...]
    skips: tuple[tuple[str, str], ...] = ()
    phase: Literal["running", "stopped", "finished", "accepting"] = "running"
    accepting: Accepting | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rebase lives."""

    folder: Path

    @classmethod
    def of(cls, layout: Layout) -> Place:
        return cls(folder=layout.build / "rebase")

    @property
    def file(self) -> Path:
        return self.folder / "session.json"

    @property
    def worktree(self) -> Path:
        return self.folder / "tree"

    @property
    def memory(self) -> Path:
        return self.folder / "rerere"

    def load(self) -> Session | None:
        """The unfinished rebase, None if there is none. Raises UsageFault if it is unreadable."""
        if not self.file.is_file():
            return None
        try:
            return TypeAdapter(Session).validate_json(self.file.read_bytes())
        except ValidationError as error:
            raise UsageFault(
                f"{self.file} is not a rebase that this version of sm121 can go on with.",
                cause=str(error).splitlines()[0],
                remedy="`nox -s rebase -- --abort`, then start it again.",
            ) from error

    def require(self) -> Session:
        session = self.load()
        if session is None:
            raise UsageFault(
                "No rebase is under way.", remedy="`nox -s rebase -- --onto RELEASE` starts one."
            )
        return session

    def save(self, session: Session, repository: SeriesRepository) -> None:
        """Remember, and keep git from forgetting, how far the rebase is."""
        repository.point(f"{REF}/commit", session.commit)
        write_atomic(self.file, json.dumps(dataclasses.asdict(session), indent=1, default=_text))

    def clear(self, repository: SeriesRepository) -> None:
        """End the rebase. Resolutions and what is known of releases stay."""
        self.file.unlink(missing_ok=True)
        repository.remove_worktree(self.worktree)


def _text(value: object) -> str:
    assert isinstance(value, datetime)
    return value.isoformat()


def remove_created(root: Path, accepting: Accepting, changelog: Path) -> None:
    """Undo an acceptance that was cut short."""
    for name in accepting.created:
        path = root / name
        for leftover in (path, path.with_name(f"{path.name}.partial")):
            remove_tree(leftover)
    text = changelog.read_text(encoding="utf-8") if changelog.is_file() else ""
    if accepting.entry in text:
        write_atomic(changelog, text.replace(accepting.entry, "", 1))
