"""The last whole run of verify-jit over a stack's own tree and environment: what the manifest of a
wheelhouse and verify-abi's page say of it.

build/jit/<stack>/last.json; it counts for the patched source that it was made of and for no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sm121.files import write_atomic
from sm121.jit.report import SCHEMA_VERSION, FirstStart, Report

FILE = "last.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The patched source of a stack: git's ids of its commit and tree."""

    commit: str
    tree: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Last:
    """What was verified, and the report."""

    source: Source
    report: Report

    def is_of(self, *, commit: str, tree: str = "") -> bool | None:
        """Whether this is the source that was verified: by its tree where that is known (commits of
        equal content differ), else by its commit; None if neither is known."""
        if tree:
            return self.source.tree == tree
        return self.source.commit == commit if commit else None

    @property
    def first_start(self) -> tuple[FirstStart, ...] | None:
        """What a node compiles itself, by family; None if that was not seen to work."""
        return self.report.first_start if self.report.result == "pass" else None


def last_file(build: Path, stack: str) -> Path:
    return build / "jit" / stack / FILE


def keep_last(report: Report, path: Path, *, source: Source) -> None:
    """Write it in place of the run before, passed or not."""
    last = Last(source=source, report=report)
    write_atomic(path, TypeAdapter(Last).dump_json(last, indent=1).decode() + "\n")


def read_last(path: Path) -> Last | None:
    """None if there is none, or none of this version."""
    try:
        last = TypeAdapter(Last).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return last if last.report.schema_version == SCHEMA_VERSION else None
