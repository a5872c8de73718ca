"""`lock`: resolve the pins to hashed files for every target."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from sm121.commands.common import add_stack_option, context_of
from sm121.context import Context
from sm121.errors import LockStale, UsageFault
from sm121.files import write_atomic
from sm121.gitrepo import Repository
from sm121.lock.check import check_lock, check_pins
from sm121.lock.diff import difference, moves
from sm121.lock.pylock import lock_path, write_lock
from sm121.lock.resolve import REQUIREMENT_FILES, Resolved, lock_targets, resolve_all
from sm121.lock.upgrade import edit_pin, moving, newest, parse_wish
from sm121.pins.load import parse_stack
from sm121.pins.model import Stack
from sm121.pipeline import all_stages, run_stages
from sm121.rules.model import load_rules
from sm121.source.stage import REPOSITORY
from sm121.state import exclusive
from sm121.ui import Ui, human_bytes


def configure(parser: argparse.ArgumentParser) -> None:
    add_stack_option(parser)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 with a diff if a lock is stale"
    )
    parser.add_argument(
        "--upgrade", metavar="NAME", help="move one package (NAME or NAME==VERSION) in stack.toml, "
        "and show what moved with it; nothing is written if that breaks a rule",
    )  # fmt: skip


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Resolve every lock, check the family, and write or compare it.

    Raises LockStale (--check) with the diff, FamilyFault if pins or a lock break a rule.
    """
    if arguments.check and arguments.upgrade:
        raise UsageFault("--check writes nothing, --upgrade does: use one of them.")
    context = context_of(arguments, ui)
    with exclusive(context.layout.build, "lock"):
        results, _ = run_stages(context, all_stages(context)[:2])
        context.memory.save()
        repository = Repository(context.layout.source / REPOSITORY)
        commit = str(results["patch"]["commit"])
        files = {name: repository.read(commit, name) or "" for name in REQUIREMENT_FILES}
        pins, stack, text = wanted_pins(context, arguments.upgrade, files)
        rules = load_rules(context.layout.pins)
        check_pins(stack, rules, files)
        resolved = resolve_all(stack, files, logs=context.layout.log, ui=ui)
        for one in resolved:
            check_lock(
                one.lock, rules, filename=one.filename, machine=one.target.machine,
                serving=one.kind == "family",
            )  # fmt: skip
        folder = pins.parent
        stale = {one.filename: difference(folder / one.filename, one.lock) for one in resolved}
        if arguments.upgrade and not show_moves(
            ui, folder, resolved, parse_wish(arguments.upgrade)[0]
        ):
            return 0
        if not arguments.check:
            if text:
                write_atomic(pins, text)
            for one in resolved:
                write_lock(one.lock, folder / one.filename)
    ui.table(
        ("lock", "packages", "size", "against before"),
        [
            (
                one.filename,
                str(len(one.lock.packages)),
                human_bytes(sum(w.size or 0 for p in one.lock.packages for w in p.wheels or ())),
                "changed" if stale[one.filename] else "same",
            )
            for one in resolved
        ],
    )
    changes = [line for lines in stale.values() for line in lines]
    if changes and arguments.check:
        raise LockStale(
            "A lock is not what the pins resolve to.",
            details=changes[:80],
            remedy="Run `nox -s lock`, look at the diff, and commit it.",
        )
    for line in [] if arguments.check or arguments.upgrade else changes:
        ui.say(f"    {line}")
    return 0


def wanted_pins(
    context: Context, upgrade: str | None, files: Mapping[str, str]
) -> tuple[Path, Stack, str]:
    """stack.toml's path, the stack to resolve, and its new text ('' if it stays)."""
    path = context.layout.pins / context.stack_name / "stack.toml"
    if not upgrade:
        return path, context.stack, ""
    name, version = parse_wish(upgrade)
    stack, now = context.stack, datetime.now(UTC).replace(microsecond=0)
    target, log = lock_targets(stack)[0], context.log("lock.upgrade")
    pinned = name in {**stack.family, **stack.cuda.toolkit, **stack.installer}
    names = [name]
    if not version and pinned:
        version = newest(name, target, log=log)
    elif not pinned:
        lock = lock_path(context.layout.pins, context.stack_name, "family", target)
        names += moving(stack, name, target, files, lock, now=now, log=log)
    text = path.read_text(encoding="utf-8")
    for one in dict.fromkeys(names):
        text = edit_pin(text, stack, one, version, now=now)
        stack = parse_stack(text, path)
    return path, stack, text


def show_moves(ui: Ui, folder: Path, resolved: list[Resolved], asked: str) -> bool:
    """A table of every distribution that changes its version; False if the asked one stays."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for one in resolved:
        for name, (old, new) in moves(folder / one.filename, one.lock).items():
            where.setdefault((name, old, new), []).append(one.filename)
    if not any(name == asked for name, _, _ in where):
        ui.note(f"{asked} did not move: nothing newer fits the other pins; nothing was written")
        return False
    ui.table(
        ("package", "from", "to", "why", "locks"),
        [
            (name, old, new, "asked for" if name == asked else "moved with it", str(len(files)))
            for (name, old, new), files in sorted(where.items())
        ],
    )
    return True
