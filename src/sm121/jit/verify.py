"""All of verify-jit: find, compile what is not remembered, judge, report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sm121.files import sha256_text
from sm121.jit.discover import Kernel, discover
from sm121.jit.drive import Bench, Mode, Told, run_recipes
from sm121.jit.last import Source
from sm121.jit.readings import over_limits, read_failure
from sm121.jit.recipes import Recipe, Recipes
from sm121.jit.report import FAULTS, FirstStart, Meaning, Note, Report, Row, Variant
from sm121.jit.results import (
    Results,
    code_identity,
    key_of,
    read_cubins,
    variants_of,
    walk_identity,
)

MODES: tuple[Mode, ...] = ("triton", "cutedsl", "tilelang", "deepgemm", "flashinfer")
# Distributions whose versions and files decide what a family does.
COMPILERS: Mapping[str, tuple[str, ...]] = {
    "triton": ("triton",),
    "cutedsl": ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi"),
    "tilelang": ("tilelang", "apache-tvm-ffi", "nvidia-cuda-"),
    "flashinfer": ("flashinfer-python", "apache-tvm-ffi", "nvidia-cuda-"),
    "deepgemm": ("vllm", "nvidia-cuda-"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something wrong with the environment as a whole, and which distribution it is about."""

    distribution: str
    text: str
    symptom: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is verified. inputs: identities of tree, environment and options, by name; faults: of
    the environment; only: these recipes (None: all); source: the stack's own, None for another tree
    or environment."""

    stack: str
    target: str
    recipes: Recipes
    bench: Bench
    results: Results
    inputs: Mapping[str, str]
    versions: Mapping[str, str]
    faults: Sequence[Fault] = ()
    notes: Sequence[Note] = ()
    only: Sequence[str] | None = None
    source: Source | None = None


def verify(job: Job, progress: Callable[[str], None]) -> Report:
    """Run and judge. Never raises for a kernel that fails: that is in the report."""
    avoid = job.recipes.avoided()
    found = job.results.kernels(
        sha256_text(job.inputs["tree"], job.recipes.package, walk_identity(), *avoid),
        lambda: discover(job.bench.tree, job.recipes.package, avoid=avoid),
    )
    told = _run(job, progress)
    rows = [_row(job, kernel, told) for kernel in found]
    rows += _not_found(job, found, told)
    if job.only is not None:
        rows = [row for row in rows if row.verdict not in ("not-reached", "not-run")]
    notes = [*(Note(kind="fault", text=fault.text) for fault in job.faults), *job.notes]
    notes += _stale(job, found)
    notes += _unattributed(rows, told)
    failed = any(row.verdict in FAULTS for row in rows) or any(n.kind == "fault" for n in notes)
    return Report(
        result="fail" if failed else "pass", stack=job.stack, target=job.target,
        tree=job.inputs.get("tree", ""), versions=dict(job.versions), rows=tuple(rows),
        notes=tuple(notes), first_start=tuple(_first_start(rows)),
    )  # fmt: skip


def _run(job: Job, progress: Callable[[str], None]) -> dict[tuple[str, str], Told]:
    """What each recipe told in each mode, from memory where nothing that decides it changed."""
    inputs = {
        **job.inputs,
        "modules": repr(sorted(job.bench.modules.items())),
        "inside": code_identity(),
        "shapes": job.recipes.shapes.model_dump_json(),
    }
    told: dict[tuple[str, str], Told] = {}
    used = []
    for mode in MODES:
        wanted = [
            name
            for name, recipe in job.recipes.recipes.items()
            if recipe.wanted(mode) and (job.only is None or name in job.only)
        ]
        keys = {name: key_of(recipe=name, mode=mode, inputs=inputs) for name in wanted}
        used += list(keys.values())
        for name in wanted:
            if known := job.results.find(keys[name]):
                told[mode, name] = known
        missing = [name for name in wanted if (mode, name) not in told]
        if not missing:
            continue
        done = len(told)

        def begun(
            name: str, mode: Mode = mode, done: int = done, missing: list[str] = missing
        ) -> None:
            at = missing.index(name) + 1 if name in missing else 0
            progress(f"{mode}: {name}, {at} of {len(missing)}")

        for name, one in run_recipes(job.bench, mode, missing, begun).items():
            read_cubins(one)
            told[mode, name] = one
            job.results.put(keys[name], one)
        job.results.save(used)
    job.results.save(used)
    return told


def _row(job: Job, kernel: Kernel, told: Mapping[tuple[str, str], Told]) -> Row:
    base = Row(
        family=kernel.family, kernel=kernel.name, where=f"{kernel.file}:{kernel.line}",
        verdict="no-recipe", via=kernel.via,
    )  # fmt: skip
    records = [r for one in told.values() for r in one.records if r["kernel"] == kernel.name]
    claims = _claims(job.recipes.recipes, kernel.name)
    if records:
        fallback = any(kernel.name in job.recipes.recipes[name].fallback for _, name in claims)
        noted = replace(base, why="only with VLLM_DISABLE_CUTEDSL=1" if fallback else "")
        return _judged(job, noted, records)
    if kernel.helper:
        return replace(
            base, verdict="helper", why="called by other kernels only, and compiled inside them"
        )
    if why := job.recipes.reasons().get(kernel.name):
        return replace(base, verdict="left-out", why=why)
    if not claims:
        return replace(
            base, why="the tree has it, no recipe compiles it, and jit.toml does not say why not"
        )  # fmt: skip
    errors = [told[claim].error for claim in claims if claim in told and told[claim].error]
    if errors:
        return _failed(job, base, errors[0])
    modules = [name for mode, name in claims if mode == "flashinfer" and (mode, name) in told]
    if modules:
        first = job.recipes.recipes[modules[0]].flashinfer[0]
        same = [r for r in told["flashinfer", modules[0]].records if r["kernel"] == first]
        return replace(
            _judged(job, base, same), variants=(), seconds=0.0,
            why=f"in FlashInfer's module {modules[0]}, with {first}",
        )  # fmt: skip
    ran = any(claim in told for claim in claims)
    return replace(
        base, verdict="not-reached" if ran else "not-run",
        why=f"its recipe ({', '.join(name for _, name in claims)}) "
        + ("ended well and did not compile it" if ran else "did not run"),
    )  # fmt: skip


def _claims(recipes: Mapping[str, Recipe], kernel: str) -> list[tuple[str, str]]:
    return [
        (mode, name)
        for name, recipe in recipes.items()
        for mode in MODES
        if kernel in recipe.wanted(mode)
    ]


def _judged(job: Job, base: Row, records: Sequence[Mapping[str, Any]]) -> Row:
    seconds = round(sum(float(r["seconds"]) for r in records), 1)
    variants: dict[tuple[str, str, int], Variant] = {}
    for record in records:
        if "error" in record:
            return replace(_failed(job, base, str(record["error"])), seconds=seconds)
        for variant in variants_of(record):
            # The same compilation again, from the family's own cache, takes no time.
            variants.setdefault((variant.mode, str(variant.variant), variant.registers), variant)
    made = tuple(variants.values())
    if not made:
        return _failed(job, base, "what was compiled holds no kernel")
    if faults := over_limits(made, job.recipes.limits):
        meaning = Meaning(
            kind="over-limit", says="it compiles, and this GPU refuses to launch it",
            next="smaller tiles, fewer stages or fewer warps",
        )  # fmt: skip
        return replace(
            base, verdict="over-limit", message="; ".join(faults), reading=meaning,
            variants=made, seconds=seconds,
        )  # fmt: skip
    return replace(base, verdict="compiled", variants=made, seconds=seconds)


def _failed(job: Job, base: Row, message: str) -> Row:
    """A broken rule about the family's own distributions explains more than any message."""
    reading = read_failure(message, job.recipes.readings)
    for fault in job.faults:
        if fault.distribution.startswith(COMPILERS[base.family]):
            reading = Meaning(
                kind="pin", says=f"{fault.text}. Symptom as known: {fault.symptom}",
                next="`nox -s repair -- --env PATH`, or put the pin right and run `nox -s lock`",
            )  # fmt: skip
            break
    return replace(base, verdict="failed", message=message, reading=reading)


def _not_found(
    job: Job, found: Iterable[Kernel], told: Mapping[tuple[str, str], Told]
) -> list[Row]:
    """Kernels that launch code compiled and the walk did not see: shown all the same."""
    names = {kernel.name for kernel in found}
    by_name = defaultdict(list)
    for one in told.values():
        for record in one.records:
            if record["kernel"] not in names:
                by_name[record["kernel"]].append(record)
    return [
        _judged(
            job, Row(family=records[0]["family"], kernel=name, where="", verdict="compiled", why="met when launch code ran; the walk does not see it"), records,
        )
        for name, records in sorted(by_name.items())
    ]  # fmt: skip


def _unattributed(rows: Iterable[Row], told: Mapping[tuple[str, str], Told]) -> list[Note]:
    """Recipes that failed although all their kernels compiled: shown by no row."""
    shown = {row.message for row in rows}
    return [
        Note(kind="fault", text=f"recipe {name} ({mode}) failed: {one.error.splitlines()[0]}")
        for (mode, name), one in told.items()
        if one.error and one.error not in shown
    ]


def _stale(job: Job, found: Iterable[Kernel]) -> list[Note]:
    """Entries of jit.toml about kernels that are not there any more."""
    names = {kernel.name for kernel in found}
    named = set(job.recipes.reasons()) | {
        kernel
        for recipe in job.recipes.recipes.values()
        # A FlashInfer module may be no part of the model (the sampler's).
        for mode in MODES
        if mode != "flashinfer"
        for kernel in recipe.wanted(mode)
    }
    return [
        Note(kind="note", text=f"jit.toml names {name}, which the walk does not reach (any more)")
        for name in sorted(named - names)
    ]


def _first_start(rows: Iterable[Row]) -> list[FirstStart]:
    grouped = defaultdict(list)
    for row in rows:
        if row.verdict == "compiled":
            grouped[row.family].append(row)
    caches = {
        "triton": "TRITON_CACHE_DIR (~/.triton/cache)", "cutedsl": "none: each process compiles",
        "tilelang": "TILELANG_CACHE_DIR (~/.tilelang/cache)", "deepgemm": "DG_JIT_CACHE_DIR (~/.deep_gemm)",
        "flashinfer": "FLASHINFER_WORKSPACE_BASE (~/.cache/flashinfer)",
    }  # fmt: skip
    return [
        FirstStart(
            family=family, kernels=len(some), compilations=sum(_compilations(r) for r in some),
            seconds=round(sum(r.seconds for r in some), 1), cache=caches[family],
            # Its recipes are the modules of the JIT cache (stack.toml, [jit-cache]).
            shipped=family == "flashinfer",
        )
        for family, some in sorted(grouped.items())
    ]  # fmt: skip


def _compilations(row: Row) -> int:
    """How often a compiler ran: the entries of one source are one."""
    return len(
        {str({k: v for k, v in one.variant.items() if k != "entry"}) for one in row.variants}
    )


def shapes_fault(shapes: Mapping[str, Any], published: Mapping[str, Any]) -> list[Note]:
    """Where jit.toml and the model's published config differ; names as in jit.toml."""
    if not published:
        return [
            Note(
                kind="note",
                text="this environment can't say the model's config: shapes not compared",
            )
        ]
    spelt = {"rope_dim": "qk_rope_head_dim", "window": "sliding_window"}
    return [
        Note(kind="fault", text=f"jit.toml has {name} = {value}, the model's config {published[spelt.get(name, name)]}")
        for name, value in shapes.items()
        if spelt.get(name, name) in published and published[spelt.get(name, name)] != value
    ]  # fmt: skip
