"""What a build needs so that its compilers share memory, are recorded, and start in order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm121.compile import launcher, order
from sm121.compile.jobs import Jobs
from sm121.compile.records import (
    Cost,
    CostFolder,
    known_costs,
    new_run,
    read_records,
    shipped_costs,
    write_settings,
)
from sm121.context import Context
from sm121.files import write_atomic
from sm121.proc import pasteable
from sm121.source.places import place_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Launching:
    """command: before each compile. ninja: program that CMake builds with. settings: for both."""

    command: tuple[str | Path, ...]
    ninja: Path
    settings: Path


def cost_folder(context: Context) -> CostFolder:
    """What objects cost, in all builds of this stack and target in this build folder."""
    return CostFolder(folder=context.layout.log / context.key)


def source_places(context: Context) -> dict[str, Path]:
    """Where the stack's third-party sources lie, whether they are there yet or used at all."""
    return {
        name: place_of(name, pin, context.layout.third_party)
        for name, pin in context.stack.sources.items()
    }


def costs_elsewhere(context: Context) -> dict[str, Cost]:
    """What objects cost by the stack's costs.json, those of all profiles."""
    return shipped_costs(context.layout.pins / context.stack_name, source_places(context))


def costs_of(context: Context) -> dict[str, Cost]:
    """What objects are known to cost: by builds in this folder, else elsewhere."""
    return {
        **costs_elsewhere(context),
        **known_costs(read_records(cost_folder(context).records)),
    }


def prepare(context: Context, *, work: Path, environment: Path, jobs: Jobs) -> Launching:
    """Write the settings of one build and the program that sorts build.ninja.

    An object that nothing is known of is taken to need the profile's memory-per-job-gib.
    """
    place = cost_folder(context)
    write_settings(
        place,
        run=new_run(),
        costs=costs_of(context),
        memory=jobs.memory,
        default=int(context.profile.memory_per_job_gib * (1 << 30)),
    )
    python = (environment / "bin/python", "-IS")
    ninja = work / "sorted-ninja"
    sorting = pasteable([*python, order.__file__, environment / "bin/ninja"])
    write_atomic(ninja, f'#!/bin/sh\nexec {sorting} "$@"\n')
    ninja.chmod(0o755)
    return Launching(command=(*python, launcher.__file__), ninja=ninja, settings=place.settings)
