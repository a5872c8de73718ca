"""Stage `jit-env`: an environment for this machine with the stack's own wheels, as a node has
them, from the wheelhouse's lock (repaired where wheels would overwrite each other)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.context import Context, Results
from sm121.fetch import Cache, fetch_locked
from sm121.files import fresh_directory, write_atomic
from sm121.lock.pylock import LockedFile, Target, lock_path, locked_files
from sm121.lock.resolve import lock_of
from sm121.repair.wheel import read_wheel
from sm121.repair.wheels import plan_repairs, write_repair
from sm121.state import fingerprint
from sm121.toolkit.python import make_environment
from sm121.toolkit.stage import COMPLETE, host_interpreter, is_complete


class JitEnvironmentStage:
    name = "jit-env"

    def key(self, context: Context) -> str:
        return f"jit-env/{context.stack_name}"

    def folder(self, context: Context) -> Path:
        return context.layout.build / "jit" / context.stack_name / "env"

    def _files(self, context: Context, results: Results, target: Target) -> list[LockedFile]:
        lock = lock_of(context, "family", target, results["patch"]["requirement_files"])
        return list(locked_files(lock, target))

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        interpreter, target = host_interpreter(context)
        self._files(context, results, target)
        lock = lock_path(context.layout.pins, context.stack_name, "family", target)
        return {
            f"lock {target.tag}": context.memory.sha256(lock),
            "yields": " ".join(f"{n}>{pin.to}" for n, pin in sorted(context.stack.yields.items())),
            "Python": f"{interpreter.full} {interpreter.executable}",
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        return is_complete(self.folder(context), result)

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        interpreter, target = host_interpreter(context)
        files = {f.distribution: f for f in self._files(context, results, target)}
        paths = fetch_locked(
            list(files.values()), target=target,
            cache=Cache(context.layout.cache, context.memory),
            offline=context.options.offline, ui=context.ui, beside=context.layout.wheelhouse,
        )  # fmt: skip
        folder = self.folder(context)
        wheels = {name: paths[file.sha256] for name, file in files.items()}
        # Only who yields, and to whom: the others' METADATA is not looked at here.
        pairs = {n for name, pin in context.stack.yields.items() for n in (name, pin.to)} & set(
            files
        )
        with fresh_directory(folder.with_name("repaired")) as fresh:
            plans = plan_repairs(
                context.stack, {n: files[n] for n in pairs},
                {n: read_wheel(wheels[n]) for n in pairs},
            )  # fmt: skip
            for plan in plans:
                write_repair(plan, wheels[plan.original.distribution], fresh / plan.filename)
        for plan in plans:
            wheels[plan.original.distribution] = folder.with_name("repaired") / plan.filename
        make_environment(folder, interpreter, list(wheels.values()), log=context.log(self.name))
        content = fingerprint(self.inputs(context, results))
        write_atomic(folder / COMPLETE, content)
        return {"content": content, "python": interpreter.full}
