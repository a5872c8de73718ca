"""What each object cost: the launcher's records, and what later builds make of them.

`objects.jsonl` has one JSON object a line, in the order in which compiles ended, from all runs
in this build folder, with empty lines between. It is only ever appended to; a line that a crash cut
short is skipped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from sm121.compile.launcher import kind_of, was_killed
from sm121.files import write_atomic

_COMPONENT = re.compile(r"CMakeFiles/([^/]+)\.dir/")
# In costs.json: a third-party source, wherever it lies.
_SOURCE = re.compile(r"\{([^{}/]+)\}")
# Of a killed compile only what it had reached is known; the next time it gets this much more.
_KILLED = 1.5
# Of so many objects of a kind the largest stands for those that were not measured.
_ENOUGH = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One compile. run: which build. start, end: seconds since 1970; waited: for memory, before
    start. cpu: user and system seconds of the compiler and all it started; rss: bytes of the
    largest of these processes. cache: hit, miss, unknown, or off; exit: negative is a signal.
    killed: it, or a part of it, was killed.
    """

    run: str
    object: str
    source: str
    start: float
    end: float
    waited: float
    cpu: float
    rss: int
    cache: str
    exit: int
    killed: bool = False

    @property
    def component(self) -> str:
        return component_of(self.object)

    @property
    def compiled(self) -> bool:
        """Did a compiler make it, to the end?"""
        return self.exit == 0 and self.cache in ("miss", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What compiling an object takes: CPU seconds, and bytes of memory at the peak."""

    cpu: float
    rss: int


def component_of(name: str) -> str:
    """The CMake target that an object belongs to."""
    found = _COMPONENT.search(name)
    return found[1] if found else "(other)"


def read_records(path: Path, *, run: str | None = None) -> list[Record]:
    """All records, or those of one run; none if there is no file yet.

    Older ones have no `killed`: of these only the exit status tells.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    records: list[Record] = []
    for line in lines:
        try:
            values = json.loads(line)
            record = Record(**{"killed": was_killed(values["exit"]), **values})
        except (ValueError, TypeError, KeyError):
            continue  # cut short by a crash
        if run is None or record.run == run:
            records.append(record)
    return records


def known_costs(records: Iterable[Record]) -> dict[str, Cost]:
    """Object → what its newest compile cost. Answers of the cache say nothing of that."""
    costs: dict[str, Cost] = {}
    for record in records:
        if record.compiled:
            costs[record.object] = Cost(cpu=record.cpu, rss=record.rss)
        elif record.killed:
            least = Cost(cpu=record.cpu, rss=int(record.rss * _KILLED))
            if record.object not in costs or costs[record.object].rss < least.rss:
                costs[record.object] = least
    return costs


def shipped_costs(stack: Path, sources: Mapping[str, Path]) -> dict[str, Cost]:
    """What a stack's objects cost where they were measured: `costs.json` beside its stack.toml.

    For the first build in a folder. CPU seconds differ between machines; their order, and
    memory, hardly do. None if the stack has no such file.

    sources: folders of third-party sources by name. CMake names an object of a source outside of
    its tree by the whole path; in the file `{NAME}` stands for that folder.
    """
    try:
        data = json.loads((stack / "costs.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    folders = {name: str(folder).lstrip("/") for name, folder in sources.items()}

    def placed(name: str) -> str:
        return _SOURCE.sub(lambda found: folders.get(found[1], found[0]), name)

    return {placed(name): Cost(cpu=cpu, rss=rss) for name, (cpu, rss) in data["objects"].items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class CostFolder:
    """Where the launcher finds its settings and leaves its records."""

    folder: Path

    @property
    def records(self) -> Path:
        return self.folder / "objects.jsonl"

    @property
    def settings(self) -> Path:
        return self.folder / "launch.json"

    @property
    def timeline(self) -> Path:
        return self.folder / "timeline.json"


def new_run() -> str:
    """A name for a build: its time, UTC, and process."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}"


def read_run(place: CostFolder) -> str:
    """The run that the settings were written for."""
    return str(json.loads(place.settings.read_text(encoding="utf-8"))["run"])


def kinds_of(costs: Mapping[str, Cost]) -> dict[str, int]:
    """Bytes of the largest object of each kind (launcher.kind_of) that enough were measured of."""
    sizes: dict[str, list[int]] = {}
    for name, cost in costs.items():
        sizes.setdefault(kind_of(name), []).append(cost.rss)
    return {kind: max(some) for kind, some in sorted(sizes.items()) if len(some) >= _ENOUGH}


def write_settings(
    place: CostFolder, *, run: str, costs: Mapping[str, Cost], memory: int, default: int
) -> None:
    """What the launcher and the order of objects need: a JSON file that SM121_LAUNCH names.

    memory: bytes that all compiles may take together; default: for an object that was never
    measured, of a kind that wasn't either.
    """
    settings = {
        "run": run,
        "records": str(place.records),
        "budget": str(place.folder / "budget"),
        "memory": memory,
        "default": default,
        "kinds": kinds_of(costs),
        "objects": {name: asdict(cost) for name, cost in sorted(costs.items())},
    }
    write_atomic(place.settings, json.dumps(settings, indent=1))
