"""What is measured of the objects that a profile compiles, here and where the pins' costs were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sm121.compile.build import configured_objects
from sm121.compile.launching import cost_folder, costs_elsewhere, source_places
from sm121.compile.records import Cost, component_of, known_costs, read_records
from sm121.compile.stage import CompileStage
from sm121.compile.wheel import component_paths
from sm121.context import Context
from sm121.source.stage import rust_components
from sm121.state import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """costs: of the profile's objects that were measured; here: those measured in this build folder.
    lacking: components of which not every object was measured."""

    costs: Mapping[str, Cost]
    here: frozenset[str]
    lacking: tuple[str, ...]


def compiled_components(context: Context) -> tuple[str, ...]:
    """The profile's components whose libraries are made of measured objects: not Python alone, not
    what cargo builds."""
    runtime, cargo = context.runtime, rust_components(context)

    def is_library(component: str) -> bool:
        paths = component_paths(component, python=runtime.python, machine=runtime.machine)
        return any(path.endswith(".so") for path in paths)

    return tuple(c for c in context.profile.components if c not in cargo and is_library(c))


def measured_of(context: Context) -> Measured:
    """By builds in this folder, else by the stack's costs.json; of the profile's components only.

    What is configured here says which objects there are: earlier builds had others. Of a component
    that isn't, a build that was killed has measured some; what it left counts as all only if
    costs.json has the component, or a build with it has ended here.
    """
    wanted = compiled_components(context)
    rules = _configured(context)

    def is_of_this_build(name: str) -> bool:
        component = component_of(name)
        return component in wanted and name in rules.get(component, {name})

    records = [
        record
        for record in read_records(cost_folder(context).records)
        if is_of_this_build(record.object) and not _left_behind(context, record.object)
    ]
    here = known_costs(records)
    elsewhere = {n: cost for n, cost in costs_elsewhere(context).items() if is_of_this_build(n)}
    costs = {**elsewhere, **here}
    # Of what the compiler cache answered nothing was measured.
    unmeasured = {r.component for r in records if r.exit == 0 and r.object not in costs}
    known = set(map(component_of, elsewhere)) | _finished(context) & set(map(component_of, here))

    def is_lacking(component: str) -> bool:
        if component in rules:
            return not rules[component] <= costs.keys()
        return component not in known or component in unmeasured

    return Measured(
        costs=costs, here=frozenset(here), lacking=tuple(filter(is_lacking, wanted))
    )  # fmt: skip


def largest_need(context: Context) -> float:
    """Bytes that the largest object of the profile takes, measured; no less than the pins' guess if a
    component is not measured."""
    measured = measured_of(context)
    sizes = [float(cost.rss) for cost in measured.costs.values()]
    if measured.lacking:
        sizes.append(context.profile.memory_per_job_gib * (1 << 30))
    return max(sizes, default=0.0)


def _configured(context: Context) -> dict[str, set[str]]:
    """Component → its objects, as far as CMake has configured them here."""
    found: dict[str, set[str]] = defaultdict(set)
    for output in CompileStage().work(context).glob("ninja-*"):
        for name in configured_objects(output):
            found[component_of(name)].add(name)
    return dict(found)


def _finished(context: Context) -> set[str]:
    """Components of all profiles whose compile has ended here."""
    records = State.load(context.layout.state).records
    prefix = CompileStage().key(context).removesuffix(context.options.profile)
    return {
        component
        for name, pin in context.stack.profiles.items()
        if f"{prefix}{name}" in records
        for component in pin.components
    }


def _left_behind(context: Context, name: str) -> bool:
    """Is it an object of a third-party source that the pins no longer name?"""
    folder = f".dir{context.layout.third_party}/"
    places = source_places(context).values()
    return folder in name and not any(f".dir{place}/" in name for place in places)
