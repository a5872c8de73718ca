"""What a build of each profile takes here from nothing: by what was measured, else by figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from sm121.compile.jobs import Jobs, choose_jobs, usable_cores
from sm121.compile.measured import Measured, measured_of
from sm121.compile.memory import available_memory
from sm121.compile.records import Cost, component_of, known_costs, read_records
from sm121.compile.schedule import Job, longest_first, wall_seconds
from sm121.compile.stage import CompileStage
from sm121.context import Context
from sm121.doctor.model import Plan
from sm121.doctor.reference import Profile, load_references, reference_of
from sm121.jitcache.prepare import jit_cost_folder
from sm121.jitcache.stage import JitCacheStage
from sm121.pins.model import OVERLAY
from sm121.source.stage import rust_components
from sm121.state import Record, State
from sm121.toolkit.deepgemm import COMPONENT as DEEPGEMM
from sm121.ui import human_seconds

Basis = Literal["recorded", "estimate", "unknown"]
Found = tuple[float, Basis, str]


def plans(context: Context, *, default: str) -> list[Plan]:
    """One for each profile of the stack. default: the one that a plain `build` makes."""
    return [
        _plan(replace(context, options=replace(context.options, profile=name)), default=default)
        for name in context.stack.profiles
    ]


def _plan(context: Context, *, default: str) -> Plan:
    name = context.options.profile
    jobs = choose_jobs(
        asked=context.options.jobs, cores=usable_cores(), available=available_memory()
    )
    if name == OVERLAY:
        jobs = replace(jobs, count=1, reason="nothing is compiled")
    seconds, basis, text = _duration(context, jobs)
    return Plan(
        profile=name, default=name == default, components=context.profile.components,
        jobs=jobs.count, jobs_reason=jobs.reason, seconds=round(seconds, 1), basis=basis, text=text,
    )  # fmt: skip


def _duration(context: Context, jobs: Jobs) -> Found:
    name = context.options.profile
    figures = load_references().profiles.get(name)
    rust = "; Rust is not counted" if rust_components(context) else ""
    if name != OVERLAY and not (measured := measured_of(context)).lacking:
        seconds, basis, text = _of_objects(context, jobs, measured, figures or reference_of(name))
        return seconds, basis, text + rust
    if figures:
        text = (
            f"{figures.task_minutes:g} task minutes on {jobs.count} job(s), {figures.source}; and "
            f"{figures.download_gb:g} GB to download, as far as they are not in the cache{rust}"
        )
        return figures.seconds(jobs.count), "estimate", text
    return 0.0, "unknown", "no figures of this profile, neither of here nor of elsewhere"


def _of_objects(context: Context, jobs: Jobs, measured: Measured, figures: Profile) -> Found:
    """By the objects, all of which were measured. What the other stages took here says little: it
    has their downloads in it."""
    records = State.load(context.layout.state).records
    record = records.get(CompileStage().key(context))
    basis: Basis
    if record and _made_everything(record, measured, jobs):
        seconds, basis = record.seconds, "recorded"
        text = (
            f"{len(measured.costs)} objects, all compiled in a run here: {human_seconds(seconds)}"
        )
    else:
        seconds, basis = _scheduled(measured.costs, jobs), "estimate"
        here = len(measured.here)
        where = [f"{here} measured here"] if here else []
        if elsewhere := len(measured.costs) - here:
            where.append(f"{elsewhere} elsewhere (pins/{context.stack_name}/costs.json)")
        cpu = human_seconds(sum(cost.cpu for cost in measured.costs.values()))
        text = (
            f"{len(measured.costs)} objects, {' and '.join(where)}, {cpu} of CPU, the longest first on "
            f"{jobs.count} job(s): {human_seconds(seconds)}"
        )
    if context.jit_modules:
        modules, whose = _modules(context, jobs, records)
        seconds += modules
        text += f"; FlashInfer's modules, measured {whose}: {human_seconds(modules)}"
    other = 60 * figures.other_minutes
    return seconds + other, basis, f"{text}; all else, measured elsewhere: {human_seconds(other)}"


def _made_everything(record: Record, measured: Measured, jobs: Jobs) -> bool:
    """Did the last compile, on as many jobs, make every object and have none out of a cache? ninja's
    count, which it recorded, is without DeepGEMM's one (sm121.compile.deepgemm)."""
    counted = sum(component_of(name) != DEEPGEMM for name in measured.costs)
    result = record.result
    return (
        result.get("objects", 0) >= counted
        and result.get("cost", {}).get("hits") == 0
        and result.get("jobs") == jobs.count
    )


def _modules(context: Context, jobs: Jobs, records: Mapping[str, Record]) -> tuple[float, str]:
    """Seconds of stage jit-cache, and where they were measured: here only if each object was, and
    not a few that a killed run left or the compiler cache lacked."""
    costs = known_costs(read_records(jit_cost_folder(context).records))
    record = records.get(JitCacheStage().key(context))
    modules = record.result["modules"].values() if record else ()
    # Each object has one container of GPU code (docs/jit-cache.md).
    objects = sum(sum(module["codes"].values()) for module in modules)
    if 0 < objects <= len(costs):
        return _scheduled(costs, jobs), "here"
    return 60 * load_references().jit_cache_minutes / jobs.count, "elsewhere"


def _scheduled(costs: Mapping[str, Cost], jobs: Jobs) -> float:
    objects: Iterable[Job] = (
        Job(name=name, seconds=cost.cpu, memory=cost.rss) for name, cost in costs.items()
    )
    return wall_seconds(longest_first(objects), cores=jobs.count, memory=jobs.memory)
