"""`build` and its single stages: from pins to a verified wheelhouse."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from sm121.commands.check import check_context, check_series
from sm121.commands.common import add_build_options, add_source_options, context_of
from sm121.context import Context, Results
from sm121.jit.recipes import has_recipes
from sm121.jitcache.wheel import DISTRIBUTION as JIT_CACHE
from sm121.pins.model import OVERLAY
from sm121.pipeline import all_stages, run_stages
from sm121.state import State, exclusive
from sm121.ui import Ui, human_bytes, human_seconds
from sm121.wheelhouse.manifest import FirstStartEntry, SourcesLeftOutEntry

# The stages that are verbs of their own, each with everything before it.
STAGES = ("source", "patch", "compile", "wheelhouse")


def configure(parser: argparse.ArgumentParser) -> None:
    add_build_options(parser)


def configure_source(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)


def configure_patch(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="is each patch fit to be sent? headers, offsets, syntax, upstream's style, and a "
        "configure after each (prepares toolchain and toolkit)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="with --check: whose components are configured (default: the profile with most)",
    )
    parser.add_argument(
        "--edit", action="store_true",
        help="make the series a branch with a working tree, build/series/<stack>; after "
        "committing there, `nox -s export` writes it back",
    )  # fmt: skip


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Bring every stage up to date, and print what came of it."""
    context = context_of(arguments, ui)
    verb = arguments.verb
    if verb == "patch" and arguments.check:
        context = check_context(context, arguments.profile)
    stages = all_stages(context)
    if verb in STAGES:
        names = [stage.name for stage in stages]
        # What makes the wheel in profile overlay is the stage of that name.
        last = verb if verb in names else "overlay"
        stages = stages[: names.index(last) + 1]
    if arguments.dry_run:
        run_stages(context, stages, dry_run=True)
        return 0
    started = time.monotonic()
    with exclusive(context.layout.build, f"nox -s {verb}"):
        results, ran = run_stages(context, stages, force=[verb] if verb == "patch" else [])
        if verb == "patch":
            show_series(context, results)
            if arguments.check:
                check_series(context, results)
            if arguments.edit:
                edit_series(context, results)
        context.memory.save()
        if verb in ("build", "wheelhouse"):
            summary(context, results, ran=ran, seconds=time.monotonic() - started)
    return 0


def show_series(context: Context, results: Results) -> None:
    """The series as a table: patch, state, commit, upstream status."""
    patches = results["patch"]["patches"]
    context.ui.table(
        ("patch", "state", "commit", "upstream status"),
        [(p["name"], p["status"], p["commit"][:12] or "-", p["upstream_status"]) for p in patches],
    )


def edit_series(context: Context, results: Results) -> None:
    """Make the branch to edit, unless it is there; say what to do with it."""
    from sm121.gitseries import SeriesRepository
    from sm121.patches.apply import apply_series
    from sm121.patches.branch import branch_of, folder_of, open_branch
    from sm121.patches.series import load_series
    from sm121.patches.stage import series_folder
    from sm121.source.stage import REPOSITORY

    repository = SeriesRepository(context.layout.source / REPOSITORY)
    series = load_series(series_folder(context))
    applied = apply_series(repository, str(results["source"]["commit"]), series)
    folder = folder_of(context.layout, context.stack_name)
    if not open_branch(repository, context.stack_name, folder, series, applied):
        context.ui.note(f"{folder} is there already and is left as it is")
    context.ui.say(f"Branch {branch_of(context.stack_name)} in {folder}, one commit per patch.")
    context.ui.say("  next: edit and commit there, then `nox -s export`")
    repository.close()


def summary(context: Context, results: Results, *, ran: bool, seconds: float) -> None:
    """The table at the end: wheel, size, seconds, sha256; what was left out; where it lies."""
    from sm121.wheelhouse.manifest import load_manifest

    ui, layout = context.ui, context.layout
    if not ran:
        ui.say(f"Nothing to do: {layout.wheelhouse} is up to date ({human_seconds(seconds)}).")
        return
    manifest = load_manifest(layout.wheelhouse)
    assert manifest is not None
    records = State.load(layout.state).records
    stage = (
        f"overlay/{context.key}"
        if context.options.profile == OVERLAY
        else f"compile/{context.key}-{context.options.profile}"
    )
    made = {"vllm": records.get(stage), JIT_CACHE: records.get(f"jit-cache/{context.key}")}
    ui.say()
    ui.table(
        ("wheel", "size", "made in", "sha256"),
        [
            (
                wheel.filename,
                human_bytes(wheel.size),
                human_seconds(record.seconds)
                if (record := made.get(wheel.distribution)) and wheel.origin in ("built", "overlay")
                else "-",
                wheel.sha256,
            )
            for wheel in manifest.wheels
            if wheel.origin != "index"
        ],
    )
    fetched = [wheel for wheel in manifest.wheels if wheel.origin == "index"]
    if fetched:
        total = sum(wheel.size for wheel in manifest.wheels)
        ui.say(
            f"  and {len(fetched)} wheels as the index has them; {human_bytes(total)} in all, "
            "listed in manifest.json"
        )
    what = "upstream's: " if context.options.profile == OVERLAY else "built:    "
    ui.say(f"  {what}{', '.join(manifest.components.built)}")
    ui.say(f"  left out: {', '.join(manifest.components.left_out)} (reasons in manifest.json)")
    if inside := manifest.components.sources_left_out:
        ui.say(f"  {sources_line(inside)} (components.sources_left_out in manifest.json)")
    if (jit := manifest.jit_cache) and jit.at_first_use:
        ui.say(f"  FlashInfer compiles on the node, if used: {', '.join(jit.at_first_use)}")
    if has_recipes(context.layout.pins, context.stack_name):
        ui.say(f"  first start: {first_start_line(manifest.first_start)}")
    for name, why in manifest.components.without.items():
        ui.note(f"without {name}: {why} (lost with it: {_lost(context, name)})")
    for check in manifest.checks:
        if check.verdict != "passed":
            ui.note(f"check {check.name}: {check.verdict}: {check.detail}")
    if "verify" in results:
        from sm121.abi.stage import VerifyStage

        ui.say(f"  verified: {results['verify']['summary']}")
        ui.say(f"            {VerifyStage().report(context, 'html')}")
    if manifest.partial:
        ui.note(
            f"profile {manifest.profile} is not a whole vLLM: for trying the pipeline, not for serving"
        )
    ui.say(f"Done in {human_seconds(seconds)}: {layout.wheelhouse}")
    ui.say(f"  next: {_next(context, complete=manifest.complete, partial=manifest.partial)}")


def sources_line(entries: Sequence[SourcesLeftOutEntry]) -> str:
    """How much is left out of what is built, as the manifest has it."""
    gone = sum(len(entry.sources) for entry in entries if not entry.kernels)
    thinned = dict.fromkeys(entry.component for entry in entries if entry.kernels)
    parts = [f"{gone} source{'s' if gone > 1 else ''}"] if gone else []
    parts += [f"some kernels of {', '.join(thinned)}"] if thinned else []
    return f"left out of what is built: {' and '.join(parts)}"


def first_start_line(families: Sequence[FirstStartEntry] | None) -> str:
    """What a node compiles itself, as the manifest has it."""
    if families is None:
        return "not known: `nox -s verify-jit` has not passed on this source here"
    if not families:
        return "a node compiles nothing itself"
    each = ", ".join(f"{f.compilations} of {f.family}" for f in families)
    took = human_seconds(sum(f.seconds for f in families))
    return f"a node compiles {each}; one after another {took} where verify-jit ran"


def _lost(context: Context, name: str) -> str:
    return context.stack.profiles[context.options.profile].optional[name].reason


def _next(context: Context, *, complete: bool, partial: bool) -> str:
    """What to do with the result."""
    if complete:
        option = " --allow-partial" if partial else ""
        return (
            f"`nox -s sync -- here HOST{option}` brings it to the nodes; or copy "
            f"{context.layout.wheelhouse} to one and run its install.py there"
        )
    return (
        f"the same with --with-deps adds all that vllm needs and install.py; "
        f"what is in it: {context.layout.wheelhouse / 'manifest.json'}"
    )
