"""`lock`: resolve the pins to hashed files for every target."""

from __future__ import annotations

import argparse
import difflib

from packaging.pylock import Pylock

from sm121.commands.common import add_stack_option, context_of
from sm121.context import Context
from sm121.errors import LockStale
from sm121.gitrepo import Repository
from sm121.lock.pylock import lock_path, read_lock, render_lock, write_lock
from sm121.lock.resolve import REQUIREMENT_FILES, Kind, lock_targets, resolve
from sm121.pipeline import all_stages, run_stages
from sm121.source.stage import REPOSITORY
from sm121.state import exclusive
from sm121.ui import Ui, human_bytes

_KINDS: tuple[Kind, ...] = ("host", "family")


def configure(parser: argparse.ArgumentParser) -> None:
    add_stack_option(parser)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 with a diff if a lock is stale"
    )


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Resolve every lock, and write or compare it. Raises LockStale (--check) with the diff."""
    context = context_of(arguments, ui)
    with exclusive(context.layout.build, "lock"):
        results, _ = run_stages(context, all_stages(context)[:2])
        repository = Repository(context.layout.source / REPOSITORY)
        commit = str(results["patch"]["commit"])
        files = {name: repository.read(commit, name) or "" for name in REQUIREMENT_FILES}
        stale: list[str] = []
        rows = []
        for target in lock_targets(context.stack):
            for kind in _KINDS:
                path = lock_path(context.layout.pins, context.stack_name, kind, target)
                lock = resolve(context.stack, kind, target, files, log=context.log("lock"))
                diff = difference(context, path.name, lock)
                stale += diff
                if not arguments.check:
                    write_lock(lock, path)
                size = sum(w.size or 0 for p in lock.packages for w in p.wheels or ())
                rows.append(
                    (
                        path.name,
                        str(len(lock.packages)),
                        human_bytes(size),
                        "changed" if diff else "same",
                    )
                )
        context.memory.save()
    ui.table(("lock", "packages", "size", "against before"), rows)
    if stale and arguments.check:
        raise LockStale(
            "A lock is not what the pins resolve to.",
            details=stale[:80],
            remedy="Run `nox -s lock`, look at the diff, and commit it.",
        )
    for line in [] if arguments.check else stale:
        ui.say(f"    {line}")
    return 0


def difference(context: Context, name: str, new: Pylock) -> list[str]:
    """What changes in a lock file: '-torch 2.11.0 <file> <sha256>' lines; [] if nothing."""
    path = context.layout.pins / context.stack_name / name
    try:
        old = _lines(read_lock(path))
        same = path.read_text(encoding="utf-8") == render_lock(new)
    except LockStale:
        old, same = [], False
    if same:
        return []
    changes = [
        line
        for line in difflib.unified_diff(old, _lines(new), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    return [f"{name}:", *(f"  {line}" for line in changes or ["only its inputs changed"])]


def _lines(lock: Pylock) -> list[str]:
    return [
        f"{package.name} {package.version} {wheel.filename} {wheel.hashes['sha256'][:16]}"
        for package in lock.packages
        for wheel in package.wheels or ()
    ]
