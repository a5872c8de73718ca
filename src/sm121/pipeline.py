"""Run stages in order; skip what stands, say why the others run, remember what was made."""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sm121.context import Context, Guarded, Results, Stage
from sm121.pins.model import OVERLAY
from sm121.state import Record, State, fingerprint, why_changed
from sm121.ui import human_seconds


def all_stages(context: Context) -> list[Stage]:
    """The stages of a build, in the order in which data flows; only those with work to do."""
    from sm121.abi.stage import VerifyStage
    from sm121.compile.stage import CompileStage
    from sm121.jitcache.stage import JitCacheStage
    from sm121.overlay.stage import OverlayStage
    from sm121.patches.stage import PatchStage
    from sm121.repair.stage import RepairStage
    from sm121.source.stage import SourceStage, ThirdPartyStage
    from sm121.toolkit.stage import EnvironmentStage, ToolkitStage
    from sm121.wheelhouse.stage import WheelhouseStage

    tools: list[Stage] = [EnvironmentStage(), ToolkitStage()]
    modules: list[Stage] = [JitCacheStage()] if context.jit_modules else []
    making: list[Stage] = [*tools, CompileStage(), *modules]
    if context.options.profile == OVERLAY:
        making = [OverlayStage(), *(tools if modules else []), *modules]
    return [
        SourceStage(),
        PatchStage(),
        *([ThirdPartyStage()] if ThirdPartyStage.wanted(context) else []),
        *making,
        *([RepairStage()] if context.options.with_deps else []),
        WheelhouseStage(),
        VerifyStage(),
    ]


# What the overlay has no need of, by stage, and why; said in every run of it.
NOT_FOR_OVERLAY = {
    "environment": "not needed: nothing is compiled",
    "toolkit": "not needed: nothing is compiled",
    "compile": "not needed: the binaries are the release's own (stage overlay)",
}


@cache
def code_digest(package: str) -> str:
    """Digest of the stage's own code: a changed recipe is a changed input."""
    folder = Path(str(importlib.import_module(package).__file__)).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def run_stages(
    context: Context,
    stages: Sequence[Stage],
    *,
    dry_run: bool = False,
    force: Sequence[str] = (),
) -> tuple[Results, bool]:
    """Bring all stages up to date; returns their results and whether any had to run.

    force: stages that run in any case. dry_run: only say what would run, and why; a stage
    whose inputs are not made yet is said to depend on the one that makes them.
    """
    state = State.load(context.layout.state)
    results: dict[str, Any] = {}
    ran = False
    pending = ""
    for stage in stages:
        if stage.name == "overlay":
            for name, why in NOT_FOR_OVERLAY.items():
                if name not in {other.name for other in stages}:
                    context.ui.stage(name, "skip", why)
        key = stage.key(context)
        record = state.records.get(key)
        if dry_run and pending:
            context.ui.stage(stage.name, "run", f"would run: depends on {pending}")
            continue
        inputs = {
            **stage.inputs(context, results),
            f"code of {stage.name}": code_digest(type(stage).__module__.rpartition(".")[0]),
        }
        wanted = fingerprint(inputs)
        reason = _reason(context, stage, record, wanted, inputs, forced=stage.name in force)
        if not reason:
            assert record is not None
            results[stage.name] = {**record.result, "fingerprint": wanted}
            context.ui.stage(stage.name, "skip", "up to date")
            continue
        if not ran and not pending:
            look_ahead(context, stages)
        if dry_run:
            context.ui.stage(stage.name, "run", f"would run: {reason}")
            pending = stage.name
            continue
        context.ui.stage(stage.name, "run", reason)
        ran = True
        log = context.log(stage.name)
        start_log(log, stage.name, reason, inputs)
        started = time.monotonic()
        result = stage.run(context, results)
        seconds = time.monotonic() - started
        results[stage.name] = {**result, "fingerprint": wanted}
        state.put(
            key,
            Record(fingerprint=wanted, inputs=inputs, result=result, log=str(log), seconds=seconds),
        )
        context.memory.save()
        context.ui.stage(stage.name, "done", human_seconds(seconds))
    return results, ran


def look_ahead(context: Context, stages: Sequence[Stage]) -> None:
    """Raise what would stop a later stage, before an earlier one takes hours."""
    for stage in stages:
        if isinstance(stage, Guarded):
            stage.guard(context)


def start_log(log: Path, stage: str, reason: str, inputs: Mapping[str, str]) -> None:
    """Begin a stage's log: why it runs and what from; its commands are appended."""
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# stage {stage}: {reason}", *(f"#   {name}: {v}" for name, v in inputs.items())]
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _reason(
    context: Context,
    stage: Stage,
    record: Record | None,
    wanted: str,
    inputs: dict[str, str],
    *,
    forced: bool,
) -> str:
    if record is None:
        return "first run"
    if record.fingerprint != wanted:
        return why_changed(record, inputs)
    if forced:
        return "asked for"
    if not stage.standing(context, record.result):
        return "its output is gone or was changed"
    return ""
