"""Figures of builds elsewhere (reference.toml), and of earlier runs here (build/state.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm121.compile.jobs import choose_jobs, usable_cores
from sm121.compile.memory import available_memory
from sm121.context import Context
from sm121.doctor.model import Plan
from sm121.pins.load import read_model
from sm121.pins.model import OVERLAY, Model
from sm121.pipeline import all_stages
from sm121.state import Record, State
from sm121.ui import human_seconds

FILE = Path(__file__).with_name("reference.toml")
Figure = Annotated[float, Field(ge=0)]


class Profile(Model):
    """See reference.toml."""

    task_minutes: Figure
    longest_minutes: Figure
    other_minutes: Figure
    download_gb: Figure
    build_gb: Figure
    source: str

    def seconds(self, jobs: int) -> float:
        """Wall time of a build from a full cache: no less than the longest object's."""
        return 60 * (self.other_minutes + max(self.longest_minutes, self.task_minutes / jobs))


class References(Model):
    schema_: Annotated[Literal[1], Field(alias="schema")]
    profiles: dict[str, Profile]


def load_references() -> References:
    return read_model(FILE, References, remedy="Correct it: it is part of sm121.")


def reference_of(profile: str) -> Profile:
    """A profile's figures; those of the largest known for one that was never measured."""
    known = load_references().profiles
    return known.get(profile) or max(known.values(), key=lambda one: one.build_gb)


def plans(context: Context, *, default: str) -> list[Plan]:
    """One for each profile of the stack. default: the one that a plain `build` makes."""
    records = State.load(context.layout.state).records
    known = load_references().profiles
    made = [_plan(context, name, known.get(name), records) for name in context.stack.profiles]
    return [replace(plan, default=plan.profile == default) for plan in made]


def _plan(
    context: Context, name: str, figures: Profile | None, records: Mapping[str, Record]
) -> Plan:
    pin = context.stack.profiles[name]
    asked = replace(context, options=replace(context.options, profile=name))
    jobs = choose_jobs(
        asked=context.options.jobs, cores=usable_cores(), available=available_memory()
    )
    count, reason = (1, "nothing is compiled") if name == OVERLAY else (jobs.count, jobs.reason)
    there = {s.name: records[k] for s in all_stages(asked) if (k := s.key(asked)) in records}
    making = there.get("overlay") or there.get("compile")
    seconds, basis, text = (
        0.0,
        "unknown",
        "no figures of this profile, neither of here nor of elsewhere",
    )
    if making:
        seconds, basis = sum(record.seconds for record in there.values()), "recorded"
        objects = making.result.get("objects")
        text = f"earlier runs here, stage by stage: {human_seconds(seconds)}" + (
            f"; the last compile made {objects} object(s)" if objects is not None else ""
        )
    elif figures:
        seconds, basis = figures.seconds(count), "estimate"
        text = (
            f"{figures.task_minutes:g} task minutes on {count} job(s), {figures.source}; "
            f"and {figures.download_gb:g} GB to download, as far as they are not in the cache"
        )
    return Plan(
        profile=name, default=False, components=pin.components, jobs=count,
        jobs_reason=reason, seconds=round(seconds, 1), basis=basis, text=text,  # type: ignore[arg-type]
    )  # fmt: skip
