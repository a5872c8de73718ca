"""What `sync --compare` found, as data. Published as sync.schema.json; tested to be equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sm121.published import report_text, schema_text_of

SCHEMA_FILE = Path(__file__).with_name("sync.schema.json")

Level = Literal["fault", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """Something installed that is not as the release's wheels have it.

    kind: no environment, no dist-info, version, files, extra (not of the release), stray (code
    of no wheel). files: path relative to site-packages → how it differs.
    """

    distribution: str
    kind: str
    found: str
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """One node. release: id of what is current, '' if nothing is. altered: files of the release's
    folder that are not what its list says. digest: over all installed files; equal on two nodes
    exactly if those are. facts: as sm121.doctor.facts.gather gives them."""

    name: str
    release: str
    files: int
    digest: str
    nccl: str
    python: str
    altered: tuple[str, ...]
    deviations: tuple[Deviation, ...]
    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Something that nodes do not share, or that one lacks. values: node → what is there.

    fault: they do not run the same bytes, or can't work together; warning: slower, or a trap.
    """

    what: str
    level: Level
    values: dict[str, str]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    schema_version: Literal[1]
    result: Literal["pass", "fail"]
    nodes: tuple[NodeState, ...]
    differences: tuple[Difference, ...]


def to_json(comparison: Comparison) -> str:
    """As JSON text, per sync.schema.json."""
    return report_text(comparison)


def schema_text() -> str:
    """The JSON schema (2020-12) of a comparison."""
    return schema_text_of(Comparison)
