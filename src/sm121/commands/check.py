"""`patch --check`: is each patch of the series fit to be sent upstream, and to be built?"""

from __future__ import annotations

from dataclasses import replace

from sm121.context import Context, Results
from sm121.errors import UsageFault
from sm121.pins.model import OVERLAY
from sm121.pipeline import all_stages, run_stages


def check_context(context: Context, asked: str | None) -> Context:
    """The context with the profile that is asked for, else with the one of the most components,
    which reads most of upstream's CMake, among those whose sources the package index has.

    Raises UsageFault for a profile that compiles nothing.
    """
    sources = context.stack.sources
    compiled = {n: p for n, p in context.stack.profiles.items() if n != OVERLAY}
    if asked == OVERLAY:
        raise UsageFault(
            f"Profile {OVERLAY} compiles nothing, so there is nothing to configure.",
            remedy=f"Choose one of {', '.join(compiled)}, or leave --profile out.",
        )
    on_index = [n for n, p in compiled.items() if all(sources[s].wheels for s in p.sources)]
    widest = asked or max(on_index or compiled, key=lambda name: len(compiled[name].components))
    return replace(context, options=replace(context.options, profile=widest))


def check_series(context: Context, results: Results) -> None:
    """Lint, upstream's style, a configure after each patch; one line for each that passed.

    In this order, the cheap ones first. Raises PatchFailed, or what keeps a check from being
    run: none is left out without that.
    """
    from sm121.compile.configure import ConfigureStage
    from sm121.gitrepo import Repository
    from sm121.patches.apply import apply_series
    from sm121.patches.lint import lint_series
    from sm121.patches.series import load_series
    from sm121.patches.stage import series_folder
    from sm121.patches.style import check_style
    from sm121.source.stage import REPOSITORY

    ui = context.ui
    repository = Repository(context.layout.source / REPOSITORY)
    series = load_series(series_folder(context))
    applied = apply_series(repository, str(results["source"]["commit"]), series)
    for line in lint_series(repository, series, applied):
        ui.say(f"   ok  {line}")
    style = check_style(
        repository, applied, offline=context.options.offline, log=context.log("patch")
    )
    ui.say(f"   ok  {style}")
    stages = all_stages(context)
    before = stages[: [stage.name for stage in stages].index("compile")]
    results, _ = run_stages(context, [*before, ConfigureStage()])
    objects = results["configure"]["objects"]
    components = ", ".join(context.profile.components)
    ui.say(f"   ok  {len(objects)} patches leave a tree that configures for {context.arch}:")
    for name, targets in objects.items():
        listed = ", ".join(f"{target} {count}" for target, count in targets.items())
        ui.say(f"       {name:<16} {sum(targets.values())} objects: {listed}")
    others = [patch.name for patch in series if patch.name not in objects]
    ui.say(f"       not touched there, so as the patch before: {', '.join(others) or 'none'}")
    ui.note(
        f"configured are the components of profile {context.options.profile} ({components}); "
        f"CMake does not read those of: {', '.join(left_out(context)) or 'none'}"
    )


def left_out(context: Context) -> list[str]:
    """Components whose CMake files this profile does not reach."""
    return [name for name in context.stack.components if name not in context.profile.components]
