"""`rebase`: move the patch series to another upstream, or see whether it could be."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sm121.commands.common import add_json_option, add_stack_option, context_of, give_json
from sm121.errors import RebaseStopped, UsageFault
from sm121.gitseries import SeriesRepository
from sm121.rebase import accept, render
from sm121.rebase.drift import asked_for, family_rows, source_rows
from sm121.rebase.onto import Upstream, find, pinned
from sm121.rebase.releases import Releases
from sm121.rebase.report import OntoRow, PatchRow, Report, to_json
from sm121.rebase.resolve import Bench, advance, go_on, rest, skip, start
from sm121.rebase.session import Place, Session, remove_created
from sm121.rebase.walk import Carried, Walk, prepare
from sm121.rules.model import load_rules
from sm121.source.drift import components_in, declared_in
from sm121.source.stage import EMPTY_TREE, REPOSITORY
from sm121.state import exclusive
from sm121.ui import Ui


def configure(parser: argparse.ArgumentParser) -> None:
    add_stack_option(parser)
    parser.add_argument(
        "--onto", action="append", default=[], metavar="REF|RELEASE",
        help="the new upstream: a release on the index (0.28.0), or a ref of the git remote "
        "(v0.28.0, main); with --check several",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true",
        help="change nothing: a table patch by release, of --onto or of all newer releases; "
        "exit 1 if one no longer applies",
    )  # fmt: skip
    parser.add_argument(
        "--continue", dest="go_on", action="store_true", help="after `git add` in the worktree"
    )
    parser.add_argument("--abort", action="store_true", help="end it; patches/ and pins/ stay")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="NAME", help="leave a patch out"
    )
    parser.add_argument(
        "--why", action="append", default=[], metavar="TEXT", help="the reason, for each --skip"
    )
    parser.add_argument(
        "--accept", action="store_true",
        help="write the finished series and the pins; without it they are only shown",
    )  # fmt: skip
    parser.add_argument(
        "--commit", metavar="HEX", help="the release's commit, where only its sdist is known"
    )
    add_json_option(parser)
    parser.add_argument(
        "--offline", action="store_true", help="fetch nothing; stop if something is missing"
    )


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """One of: check, start, continue, skip, abort, accept, or show where a rebase stands."""
    skips = _skips(arguments)
    _one_of(arguments)
    context = context_of(arguments, ui)
    with exclusive(context.layout.build, "nox -s rebase"):
        repository = SeriesRepository(context.layout.source / REPOSITORY)
        place = Place.of(context.layout)
        bench = Bench(context=context, repository=repository, place=place)
        try:
            if arguments.abort:
                return _abort(bench)
            if arguments.check:
                return _check(bench, arguments)
            if arguments.onto:
                upstream = find(arguments.onto[0], context, repository, Releases(context))
                if upstream.provider == "sdist":
                    ui.note(
                        f"vLLM {upstream.version} out of its sdist ({upstream.reason}): no history"
                    )
                session = start(bench, upstream, skips)
            else:
                session = place.require()
                bench = _of_stack(bench, session, arguments)
                if skips:
                    session = skip(bench, session, skips)
                elif arguments.go_on:
                    session = go_on(bench, session)
                elif session.phase == "running":
                    session = advance(bench, session)
            return _outcome(bench, session, arguments)
        finally:
            context.memory.save()
            repository.close()


def _one_of(arguments: argparse.Namespace) -> None:
    """Raise UsageFault for options that don't go together."""
    ways = [
        f"--{name}" for name, given in (
            ("check", arguments.check), ("continue", arguments.go_on), ("abort", arguments.abort),
        ) if given
    ]  # fmt: skip
    if len(ways) > 1 or (ways and ways != ["--check"] and arguments.onto):
        both = ways if len(ways) > 1 else [*ways, "--onto"]
        raise UsageFault(f"{' and '.join(both)} are two different things: use one.")
    if ways and arguments.skip:
        raise UsageFault(f"--skip goes on by itself: leave {ways[0]} out.")
    if arguments.accept and ways in (["--check"], ["--abort"]):
        raise UsageFault(f"{ways[0]} writes nothing, --accept does: use one of them.")
    if len(arguments.onto) > 1 and not arguments.check:
        raise UsageFault("Only --check takes several --onto.")
    if arguments.commit and not arguments.accept:
        raise UsageFault("--commit belongs to --accept.")


def _skips(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    reasons = [" ".join(why.split()) for why in arguments.why]
    if len(reasons) != len(arguments.skip) or not all(reasons):
        raise UsageFault(
            "Each --skip needs a --why, and each --why a --skip.",
            cause="a dropped patch is recorded with its reason",
            remedy='--skip NAME --why "upstream solved it in …"',
        )
    return list(zip(arguments.skip, reasons, strict=True))


def _of_stack(bench: Bench, session: Session, arguments: argparse.Namespace) -> Bench:
    """The bench for the stack that the rebase was begun with."""
    if session.stack == bench.context.stack_name:
        return bench
    if arguments.stack:
        raise UsageFault(
            f"The rebase under way is of {session.stack}, not of {arguments.stack}.",
            remedy="`nox -s rebase -- --abort` ends it.",
        )
    arguments.stack = session.stack
    context = context_of(arguments, bench.context.ui)
    return Bench(context=context, repository=bench.repository, place=bench.place)


def _abort(bench: Bench) -> int:
    layout, ui, place = bench.context.layout, bench.context.ui, bench.place
    if not place.file.is_file():
        place.require()
    try:
        session = place.load()
    except UsageFault as fault:
        ui.note(f"{fault.what} It is removed.")
        session = None
    if session and session.accepting:
        remove_created(layout.root, session.accepting, layout.root / "CHANGELOG.md")
    place.clear(bench.repository)
    ui.say("The rebase is ended; patches/ and pins/ are as before. Resolutions are remembered.")
    return 0


def _check(bench: Bench, arguments: argparse.Namespace) -> int:
    context, ui = bench.context, bench.context.ui
    releases = Releases(context)
    labels = arguments.onto or releases.newer(context.stack.vllm.version)
    if not labels:
        ui.say(f"There is no release newer than {context.stack.vllm.version}.")
        return 0
    rows = []
    base, patches = "", list[Carried]()
    with ui.progress("rebase") as progress:
        for count, label in enumerate(labels, start=1):
            progress.update(f"{label}, {count} of {len(labels)}")
            upstream = find(label, context, bench.repository, releases)
            before, base = base, pinned(context, bench.repository, upstream.provider)
            if base != before:
                patches = prepare(bench.repository, base, bench.series(context.stack_name))
            rows.append(_look(bench, base, upstream, patches))
    render.matrix(ui, rows)
    if len(rows) == 1:
        for patch in rows[0].patches:
            render.details(ui, patch)
        render.drift(ui, rows[0], context.stack_name)
    _json(
        arguments, ui,
        Report(
            schema_version=1, stack=context.stack_name, version=context.stack.vllm.version,
            commit=base, state="checked", onto=tuple(rows),
        ),
    )  # fmt: skip
    if bad := [row.label for row in rows if not row.good]:
        raise RebaseStopped(
            f"The series does not go onto {', '.join(bad)} by itself.",
            remedy=f"`nox -s rebase -- --onto {bad[0]}` starts carrying it; docs/rebasing.md.",
        )
    return 0


def _look(bench: Bench, base: str, upstream: Upstream, patches: Sequence[Carried]) -> OntoRow:
    repository = bench.repository
    walk = Walk(
        judge=bench.judge(base, upstream), memory=bench.memory,
        now=repository.tree_of(upstream.commit), before=repository.tree_of(base),
    )  # fmt: skip
    return onto_row(bench, base, upstream, walk.rest(patches))


def onto_row(bench: Bench, base: str, upstream: Upstream, patches: Sequence[PatchRow]) -> OntoRow:
    """The verdicts, and what else differs in the new upstream."""
    repository, stack, commit = bench.repository, bench.context.stack, upstream.commit
    declared = declared_in(repository, commit, repository.changed_paths(EMPTY_TREE, commit))
    components = components_in(repository, commit)
    return OntoRow(
        label=upstream.label, version=upstream.version, commit=commit, provider=upstream.provider,
        reason=upstream.reason, sdist_sha256=upstream.sdist_sha256, history=upstream.history,
        patches=tuple(patches), sources=tuple(source_rows(declared, stack)),
        family=tuple(
            family_rows(
                asked_for(repository, base), asked_for(repository, commit), stack,
                load_rules(bench.context.layout.pins),
            )
        ),
        components_new=tuple(sorted(components - set(stack.components))),
        components_gone=tuple(sorted(set(stack.components) - components)),
    )  # fmt: skip


def _outcome(bench: Bench, session: Session, arguments: argparse.Namespace) -> int:
    """Say where the session stands now; accept it if asked to."""
    ui, upstream = bench.context.ui, session.upstream
    done = [one.row for one in session.done]
    if session.phase == "stopped":
        waiting = rest(bench, session)
        row = onto_row(bench, session.base, upstream, [*done, *waiting])
        render.patches(ui, row.patches)
        render.details(ui, waiting[0])
        tree = bench.place.worktree
        _json(arguments, ui, _report(session, row, state="stopped", at=waiting[0].name, tree=tree))
        raise _stopped(waiting[0], tree)
    row = onto_row(bench, session.base, upstream, done)
    render.patches(ui, row.patches)
    if arguments.commit:
        session = accept.with_commit(bench, session, arguments.commit)
    session = accept.with_sdist(session, Releases(bench.context))
    proposal = accept.build(bench, session, row)
    old_tip = prepare(bench.repository, session.base, bench.series(session.stack))[-1:]
    compared = (
        bench.repository.range_diff(session.base, old_tip[0].commit, upstream.commit, session.commit)
        if old_tip else ""
    )  # fmt: skip
    diff = proposal.diff(bench.context.layout.root, session.stack)
    if not arguments.accept or arguments.onto or arguments.go_on or arguments.skip:
        ui.say()
        for line in [*compared.splitlines(), "", *diff.splitlines()]:
            ui.say(f"  {line}".rstrip())
        render.drift(ui, row, session.stack)
    if arguments.accept:
        accept.refuse(bench, session, proposal)
        accept.write(bench, session, proposal)
    _json(
        arguments, ui,
        _report(
            session, row, state="accepted" if arguments.accept else "finished",
            compared=compared, proposal=diff,
        ),
    )  # fmt: skip
    if arguments.accept:
        name = upstream.version
        ui.say(f"Written: patches/vllm/{name}, pins/{name}.")
        ui.say(
            f"  next: nox -s lock -- --stack {name}; nox -s build -- --stack {name} --profile smoke"
        )
    else:
        ui.say("The whole series is carried; nothing is written yet.")
        ui.say("  next: nox -s rebase -- --accept   (or --abort)")
    return 0


def _stopped(patch: PatchRow, tree: Path) -> RebaseStopped:
    files = sorted(
        {h.file_now or h.file for h in patch.hunks if h.state in ("conflict", "superseded")}
    )
    return RebaseStopped(
        f"Stopped at {patch.name}: {patch.verdict}.",
        details=files,
        cause=patch.why,
        remedy=f"Edit the files in {tree}, `git add` them there, then `nox -s rebase -- --continue`; "
        f'or `--skip {patch.name} --why "…"`; or `--abort`.',
    )


def _report(
    session: Session, row: OntoRow, *, state: str, at: str = "", tree: Path | None = None,
    compared: str = "", proposal: str = "",
) -> Report:  # fmt: skip
    return Report(
        schema_version=1, stack=session.stack, version=session.stack, commit=session.base,
        state=state, onto=(row,), stopped_at=at, worktree=str(tree or ""),  # type: ignore[arg-type]
        range_diff=compared, proposal=proposal,
    )  # fmt: skip


def _json(arguments: argparse.Namespace, ui: Ui, report: Report) -> None:
    give_json(arguments, ui, to_json(report))
