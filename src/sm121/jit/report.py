"""The report of verify-jit, and its schema (report.schema.json beside this file)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sm121.published import report_text, schema_text_of

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

Family = Literal["triton", "cutedsl", "tilelang", "flashinfer", "deepgemm"]
# compiled; failed; over-limit: compiles and can't be launched; not-reached: its recipe ran and did
# not compile it; no-recipe: found in the tree and nothing compiles it; not-run: see reading.
Verdict = Literal[
    "compiled", "failed", "over-limit", "not-reached", "no-recipe", "not-run", "left-out", "helper"
]
FAULTS: tuple[Verdict, ...] = ("failed", "over-limit", "not-reached", "no-recipe", "not-run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One compilation. mode: the process it was made in; target: as PTX or the command line says it; registers per thread; shared:
    static and dynamic bytes per block, the latter -1 if no launch was seen; stack: bytes of local memory
    per thread; spills: bytes of spill stores and loads, -1 if the assembler was not asked."""

    variant: dict[str, str]
    mode: str
    target: str
    registers: int
    threads: int
    shared_static: int
    shared_dynamic: int
    stack: int
    spills: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """Our reading of a failure. next: what to do."""

    kind: str
    says: str
    next: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One kernel. where: file:line in the tree. via: who names it, back to the model. message:
    the family's own. why: reason of a verdict that is no failure."""

    family: Family
    kernel: str
    where: str
    verdict: Verdict
    via: tuple[str, ...] = ()
    why: str = ""
    message: str = ""
    reading: Meaning | None = None
    variants: tuple[Variant, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something that holds for the whole run: a broken rule of the environment, shapes that drift."""

    kind: Literal["fault", "note"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstStart:
    """What a node compiles itself at its first start. seconds: sum of what it took here, one
    after another; shipped: compiled results are in the wheelhouse."""

    family: Family
    kernels: int
    compilations: int
    seconds: float
    shipped: bool
    cache: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A whole run. versions: the distributions whose compilers and kernels were used."""

    result: Literal["pass", "fail"]
    stack: str
    target: str
    tree: str
    versions: dict[str, str]
    rows: tuple[Row, ...]
    notes: tuple[Note, ...] = ()
    first_start: tuple[FirstStart, ...] = ()
    schema_version: int = field(default=SCHEMA_VERSION)


def to_json(report: Report) -> str:
    return report_text(report)


def schema_text() -> str:
    return schema_text_of(Report)
