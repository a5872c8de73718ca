"""What `verify-abi` found, as data. Published as report.schema.json; tested to be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import TypeAdapter

from sm121.published import report_text, schema_text_of

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

Kind = Literal[
    "archive", "damaged", "machine", "tag", "abi3",  # the file and its name
    "symbol", "library", "symbol-version", "floor", "search-path",  # the loader
    "gpu-code", "component",  # the GPU
    "ownership", "cuda-build", "nccl", "family", "mixture", "patch",  # the set
    "import",  # what was run
]  # fmt: skip
KINDS: tuple[str, ...] = get_args(Kind)
Passed = Literal["pass", "fail"]
Driver = Literal["stub", "real", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fact a person must be able to read. severity 'fault' fails the check, 'note' not.

    wheel, file: where ('' when it concerns the set). text: one sentence. why: the reason, or
    the policy's. names: symbols, libraries or files that it is about, machine-readable.
    """

    kind: Kind
    severity: Literal["fault", "note"]
    wheel: str
    file: str
    text: str
    why: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSymbol:
    """A symbol that nobody has. needed_by: the file; loaded_for: the root it was loaded with.

    expected_in: the library that should have it. found_in: neighbours of the lock that do
    have it, as 'WHEEL: FILE'; empty when none is known.
    """

    name: str
    demangled: str
    version: str
    wheel: str
    needed_by: str
    loaded_for: str
    expected_in: str
    found_in: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentRow:
    """GPU code of one file. sass, ptx, none: containers by what the target's GPU gets.

    archs: all that occur, with counts, e.g. {'sm_120f': 33}. bytes: of the containers.
    expected: 'required' (the profile lists it), 'left out', or 'present'.
    """

    component: str
    wheel: str
    file: str
    sass: int
    ptx: int
    none: int
    bytes: int
    archs: dict[str, int]
    expected: Literal["required", "left out", "present"]
    verdict: Literal["native", "native+ptx", "ptx", "none", "no gpu code", "missing", "mixed"]
    result: Passed
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelRow:
    """One judged wheel. symbols: strong references looked up. floors: e.g. GLIBC → '2.17'."""

    filename: str
    sha256: str
    binaries: int
    symbols: int
    floors: dict[str, str]
    faults: int
    notes: int
    result: Passed


@dataclass(frozen=True, kw_only=True, slots=True)
class BinaryRow:
    """Symbol verdict of one file. symbols: strong references looked up; open: of them found
    nowhere; libraries: NEEDED entries found nowhere. allowed: policy says why that is right.
    loadable: False for device code, debug files and other interpreters' modules.
    """

    wheel: str
    file: str
    symbols: int
    open: int
    libraries: tuple[str, ...]
    allowed: bool
    loadable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow:
    """One line of the family table: who, which version or build, and what of it."""

    name: str
    found: str
    wanted: str
    result: Passed
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRun:
    """A check that could not be made, and why."""

    check: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportRow:
    """One module (or 'torch.ops.NAME') that was imported; with its file, if Python takes another one
    for that name. text: what went wrong, why it was not run, or how it was imported, if not by its
    own name."""

    module: str
    result: Literal["pass", "fail", "not run"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """The dynamic part: how the target's Python was run, and what came of each import.

    driver: 'stub' answers every call with an error; it only lets libraries load. complete:
    everything came from the judged set; else what the lock puts around it, from the cache.
    bare: packages whose own __init__ was not run, since the set lacks what it imports.
    """

    how: Literal["native", "emulated"]
    python: str
    driver: Driver
    complete: bool
    bare: tuple[str, ...]
    seconds: float
    imports: tuple[ImportRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The whole answer. against: wheels that were only used as surroundings."""

    schema_version: Literal[1]
    target: str
    machine: str
    python: str
    arch: str
    profile: str
    result: Passed
    wheels: tuple[WheelRow, ...]
    binaries: tuple[BinaryRow, ...]
    against: tuple[str, ...]
    components: tuple[ComponentRow, ...]
    open_symbols: tuple[OpenSymbol, ...]
    findings: tuple[Finding, ...]
    family: tuple[FamilyRow, ...]
    not_run: tuple[NotRun, ...]
    ran: Ran | None = None

    @property
    def gpu_gaps(self) -> str:
        """See the function of that name; '' if the GPU has native code of all of vLLM."""
        ours = [row for row in self.components if row.wheel.startswith("vllm-")]
        return gpu_gaps(ours, arch=self.arch)

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "fault")


def gpu_gaps(rows: Sequence[ComponentRow], *, arch: str) -> str:
    """What the GPU has no native code for, as a sentence: 'sm_121 has nothing of …; only by
    the driver's JIT: …'. Whether policy allows it or not. '' if there is nothing to say."""

    def listed(kind: str) -> str:
        return ", ".join(
            f"{row.component} {getattr(row, kind)} of {row.sass + row.ptx + row.none}"
            for row in rows if getattr(row, kind)
        )  # fmt: skip

    parts = [
        f"{text} ({listed(kind)})"
        for kind, text in (("none", "no code that it can use"), ("ptx", "only PTX for the driver's JIT"))
        if listed(kind)
    ]  # fmt: skip
    sm = f"sm_{arch.replace('.', '').rstrip('af')}"
    return f"objects without native code for {sm}: {'; '.join(parts)}" if parts else ""


def to_json(report: Report) -> str:
    """The report as JSON text, per report.schema.json."""
    return report_text(report)


def from_json(text: str | bytes) -> Report:
    """Raises ValueError (pydantic's) for anything else than a report of this version."""
    return _adapter().validate_json(text)


def schema_text() -> str:
    """The JSON schema (2020-12) of a report."""
    return schema_text_of(Report)


def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Report)
