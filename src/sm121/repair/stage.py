"""Stage `repair`: the lock's wheels fetched, and those that need it repaired."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.context import Context, Results
from sm121.fetch import Cache, fetch_locked
from sm121.files import fresh_directory, sha256_text
from sm121.lock.pylock import LockedFile, lock_path, locked_files
from sm121.lock.resolve import lock_of
from sm121.repair.wheel import read_wheel
from sm121.repair.wheels import plan_repairs, write_repair


def family_files(context: Context, results: Results) -> list[LockedFile]:
    """Files of the checked lock of what runs."""
    lock = lock_of(context, "family", context.runtime, results["patch"]["requirement_files"])
    return list(locked_files(lock, context.runtime))


def fetch_family(context: Context, results: Results) -> dict[str, Path]:
    """All wheels of the lock in the cache, taken from the earlier wheelhouse where it has them;
    path by sha256."""
    return fetch_locked(
        family_files(context, results),
        target=context.runtime,
        cache=Cache(context.layout.cache, context.memory),
        offline=context.options.offline,
        ui=context.ui,
        beside=context.layout.wheelhouse,
    )


class RepairStage:
    name = "repair"

    def key(self, context: Context) -> str:
        return f"repair/{context.key}"

    def folder(self, context: Context) -> Path:
        return context.layout.build / "repair" / context.key

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        stack = context.stack
        family_files(context, results)
        lock = lock_path(context.layout.pins, context.stack_name, "family", context.runtime)
        return {
            f"lock {context.runtime.tag}": context.memory.sha256(lock),
            "overrides": " ".join(stack.overrides),
            "yields": sha256_text(*(f"{n}>{pin.to}" for n, pin in sorted(stack.yields.items()))),
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        return all(
            (wheel := self.folder(context) / repaired["filename"]).is_file()
            and context.memory.sha256(wheel) == repaired["sha256"]
            for repaired in result["repaired"].values()
        )

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        files = {f.distribution: f for f in family_files(context, results)}
        paths = fetch_family(context, results)
        wheels = {name: read_wheel(paths[f.sha256]) for name, f in files.items()}
        repaired = {}
        final = self.folder(context)
        with fresh_directory(final) as fresh:
            for repair in plan_repairs(context.stack, files, wheels):
                original = repair.original
                output = fresh / repair.filename
                write_repair(repair, paths[original.sha256], output)
                for change in repair.changes:
                    context.ui.say(f"       repaired    {original.distribution}: {change}")
                repaired[original.distribution] = {
                    "filename": repair.filename,
                    "changes": list(repair.changes),
                }
        for facts in repaired.values():
            facts["sha256"] = context.memory.sha256(final / str(facts["filename"]))
        return {"repaired": repaired}
