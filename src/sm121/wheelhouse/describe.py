"""The manifest of a gathered wheelhouse, from what the stages found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from packaging.utils import parse_wheel_filename

from sm121.context import Context, Results
from sm121.files import HashMemory
from sm121.jit.last import last_file, read_last
from sm121.jitcache.stage import left_to_compile
from sm121.lock.pylock import lock_path
from sm121.patches.series import load_series
from sm121.patches.stage import series_folder
from sm121.pins.model import FLASHINFER, OVERLAY
from sm121.repair.wheels import NOTICE
from sm121.source.stage import built_components, left_out_groups
from sm121.wheelhouse.gpu import judge_gpu
from sm121.wheelhouse.manifest import (
    Base,
    Check,
    ComponentEntry,
    FirstStartEntry,
    JitCacheEntry,
    JitModuleEntry,
    LibraryEntry,
    Manifest,
    OriginalEntry,
    PatchEntry,
    SourceEntry,
    SourcesLeftOutEntry,
    WheelEntry,
)

# A build for deployment; anything less says so (sync refuses it unless told otherwise).
# An overlay is all that upstream built; what of it sm_121 can't use is in its notices.
_WHOLE_PROFILES = ("full", OVERLAY)


def wheel_entry(
    path: Path,
    memory: HashMemory,
    *,
    origin: Literal["built", "index", "repaired", "overlay"],
    libraries: Mapping[str, Mapping[str, Any]] | None = None,
    original: OriginalEntry | None = None,
    changes: tuple[str, ...] = (),
) -> WheelEntry:
    """One wheel of the folder as the manifest has it."""
    distribution, version, _, _ = parse_wheel_filename(path.name)
    return WheelEntry(
        filename=path.name,
        distribution=distribution,
        version=str(version),
        size=path.stat().st_size,
        sha256=memory.sha256(path),
        origin=origin,
        libraries={
            name: LibraryEntry(machine=lib["machine"], needed=tuple(lib["needed"]))
            for name, lib in (libraries or {}).items()
        },
        original=original,
        changes=changes,
    )


def tools(results: Results) -> dict[str, str]:
    """What made the wheel: versions of the build's tools, compiler, native or cross."""
    if "overlay" in results:
        return {"build": "overlay", "release wheel": results["overlay"]["original"]["filename"]}
    return {
        **results["environment"]["tools"],
        "python": results["environment"]["python"],
        "compiler": results["toolkit"]["compiler"],
        "build": "native" if results["toolkit"]["native"] else "cross",
    }


def patch_entries(context: Context, results: Results) -> tuple[PatchEntry, ...]:
    """The series and what became of it; in an overlay, file by file."""
    sums = {p.name: p.sha256 for p in load_series(series_folder(context))}
    fates = results["overlay"]["patches"] if "overlay" in results else {}
    return tuple(
        PatchEntry(
            **{k: v for k, v in p.items() if k != "offset"} | fates.get(p["name"], {}),
            sha256=sums[p["name"]],
        )
        for p in results["patch"]["patches"]
    )


def first_start(context: Context, results: Results) -> tuple[FirstStartEntry, ...] | None:
    """What verify-jit said, but for what this wheelhouse's JIT cache holds."""
    last = read_last(last_file(context.layout.build, context.stack_name))
    tree = results["patch"].get("tree", "")
    if last is None or not last.is_of(commit="", tree=tree) or last.first_start is None:
        return None
    return tuple(
        FirstStartEntry(
            family=one.family, kernels=one.kernels, compilations=one.compilations,
            seconds=one.seconds, kept_in=one.cache,
        )
        for one in last.first_start
        if not (one.shipped and "jit-cache" in results)
    )  # fmt: skip


def jit_cache_entry(context: Context, results: Results) -> JitCacheEntry | None:
    """FlashInfer's modules ahead of time: those that are here, and those that are not."""
    if context.stack.jit_cache is None:
        return None
    made = results.get("jit-cache", {"wheel": None, "modules": {}})
    return JitCacheEntry(
        wheel=made["wheel"],
        flashinfer=context.stack.family[FLASHINFER].version,
        modules={
            name: JitModuleEntry(
                **facts, reason=context.jit_modules[name].reason,
                source=context.jit_modules[name].source,
            )
            for name, facts in made["modules"].items()
        },
        at_first_use=left_to_compile(context),
    )  # fmt: skip


def _reasons(
    context: Context, built: Collection[str], without: Mapping[str, str]
) -> dict[str, str]:
    """Every component that is not built, and why. without: optional parts, and why."""
    stack, profile = context.stack, context.options.profile
    optional = stack.profiles[profile].optional
    here = {
        name: f"{why}; lost with it: {optional[group].reason}"
        for group, why in without.items()
        for name in optional[group].components
    }
    return {
        name: here.get(name) or stack.left_out.get(name, f"not in profile {profile}")
        for name in stack.components
        if name not in built
    }


def sources_left_out(
    context: Context, results: Results, built: Collection[str]
) -> tuple[SourcesLeftOutEntry, ...]:
    """What patches leave out of the components that are built."""
    if "overlay" in results:
        return ()
    # Also one that upstream has by now: the source is left out all the same.
    series = {patch["name"] for patch in results["patch"]["patches"]}
    return tuple(
        SourcesLeftOutEntry(**pin.model_dump())
        for pin in context.stack.sources_left_out
        if pin.component in built and pin.patch in series
    )


def describe(
    context: Context, results: Results, ours: Path, wheels: Sequence[WheelEntry],
    checks: Sequence[Check], files: Mapping[str, str],
) -> Manifest:  # fmt: skip
    """The manifest. ours: vLLM's wheel. checks: verdicts on the set; that wheel's are added.
    files: the scripts beside the wheels."""
    source, patch = results["source"], results["patch"]
    stack = context.stack
    overlay = results.get("overlay")
    built = built_components(context, results)
    without = left_out_groups(context, results)
    left_out = _reasons(context, built, without)
    family = lock_path(context.layout.pins, context.stack_name, "family", context.runtime)
    repaired = [w.filename for w in wheels if w.origin == "repaired"]
    gpu, gpu_check = judge_gpu(context, ours, built=built, left_out=left_out)
    notices = [
        f"without {group}: {why}; lost with it: "
        f"{stack.profiles[context.options.profile].optional[group].reason}"
        for group, why in without.items()
    ]
    notices += [f"{', '.join(repaired)}: {NOTICE}"] if repaired else []
    if overlay and gpu_check.verdict != "passed":
        notices.append(f"the binaries are upstream's own; {gpu_check.detail}")
    return Manifest(
        schema_version=1,
        stack=context.stack_name,
        target=context.options.target,
        python=context.runtime.python,
        glibc=stack.targets[context.options.target].glibc,
        profile=context.options.profile,
        partial=context.options.profile not in _WHOLE_PROFILES,
        complete=context.options.with_deps,
        notices=tuple(notices),
        arch=context.arch,
        base=Base(
            version=stack.vllm.version,
            commit=stack.vllm.commit,
            provider=source["provider"],
            provider_reason=source["reason"],
            sdist_sha256=stack.vllm.sdist_sha256,
        ),
        sources={
            name: SourceEntry(
                ref=stack.sources[name].ref, provider=source["provider"], digest=source["digest"]
            )
            for name, source in results.get("sources", {}).get("sources", {}).items()
        },
        patches=patch_entries(context, results),
        patched_commit=overlay["commit"] if overlay else patch["commit"],
        lock_sha256={family.name: context.memory.sha256(family)},
        components=ComponentEntry(
            built=built,
            left_out=left_out,
            sources_left_out=sources_left_out(context, results, built),
            without=without,
            gpu=gpu,
            contents=overlay["contents"] if overlay else {},
        ),
        tools=tools(results),
        wheels=tuple(wheels),
        jit_cache=jit_cache_entry(context, results),
        first_start=first_start(context, results),
        checks=(
            Check(
                name="wheel",
                verdict="passed",
                detail="platform, version, components, NEEDED, RUNPATH, "
                + ("METADATA" if overlay else "build paths, METADATA"),
            ),
            gpu_check,
            *checks,
        ),
        files=dict(files),
    )
