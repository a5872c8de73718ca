"""Carry a series onto a new upstream, stop where a person is needed, and go on from there.

    start ─► advance ─► stopped ─► (a person edits the worktree) ─► go_on ─► advance ─► finished
                           └──────────────── skip ────────────────────┘

Every step is saved before the next, so a killed run is continued by `--continue`, which begins
the interrupted patch again. Nothing here writes to patches/ or pins/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm121.context import Context
from sm121.errors import PatchFailed, RebaseStopped, UsageFault
from sm121.gitseries import Merged, SeriesRepository
from sm121.gitworktree import Worktree
from sm121.patches.lint import python_faults
from sm121.patches.series import Patch, load_series
from sm121.rebase.memory import Memory, has_markers
from sm121.rebase.onto import Upstream, pinned
from sm121.rebase.report import PatchRow
from sm121.rebase.session import Done, Place, Session
from sm121.rebase.verdict import Judge
from sm121.rebase.walk import Carried, Step, Walk, prepare


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What a rebase works with."""

    context: Context
    repository: SeriesRepository
    place: Place

    def series(self, stack: str) -> list[Patch]:
        return load_series(self.context.layout.patches / "vllm" / stack)

    @property
    def memory(self) -> Memory:
        shared = self.context.layout.patches / "vllm" / "rerere"
        return Memory(own=self.place.memory, shared=shared, repository=self.repository)

    def judge(self, base: str, upstream: Upstream) -> Judge:
        return Judge(
            repository=self.repository, base=base, onto=upstream.commit, history=upstream.history
        )

    def walk(self, session: Session, patches: Sequence[Carried]) -> Walk:
        """The walk where a session stands."""
        return Walk(
            judge=self.judge(session.base, session.upstream), memory=self.memory, now=session.now,
            before=session.before, left_out=[p for p in patches if p.name in session.left_out],
        )  # fmt: skip


def start(bench: Bench, upstream: Upstream, skips: Sequence[tuple[str, str]]) -> Session:
    """Begin a rebase. Raises UsageFault if one is under way, or a skip names no patch."""
    if bench.place.load() is not None:
        raise UsageFault(
            "A rebase is under way already.",
            remedy="`nox -s rebase -- --continue` goes on with it, `--abort` ends it.",
        )
    stack, repository = bench.context.stack_name, bench.repository
    series = bench.series(stack)
    for name, _ in skips:
        _known(name, [patch.name for patch in series])
    base = pinned(bench.context, repository, upstream.provider)
    session = Session(
        schema=1, stack=stack, base=base, upstream=upstream,
        series=tuple((patch.name, patch.sha256) for patch in series), done=(),
        commit=upstream.commit, now=repository.tree_of(upstream.commit),
        before=repository.tree_of(base), left_out=(), skips=tuple(skips),
    )  # fmt: skip
    bench.place.save(session, repository)
    return advance(bench, session)


def advance(bench: Bench, session: Session) -> Session:
    """Carry patches until one needs a person (phase stopped) or all are done (finished)."""
    patches = prepared(bench, session)
    walk = bench.walk(session, patches)
    session = replace(session, phase="running")
    for patch in patches[len(session.done) :]:
        step = walk.look(patch)
        why = dict(session.skips).get(patch.name)
        if why is not None:
            row = replace(step.row, became="skipped", why=why)
            session = replace(
                session, done=(*session.done, Done(row=row, commit="")),
                left_out=(*session.left_out, patch.name),
            )  # fmt: skip
            walk.left_out.append(patch)
        elif step.row.good:
            session = _carry(bench, session, step)
            walk.take(step)
        else:
            show(bench, session, step)
            session = replace(session, phase="stopped")
            bench.place.save(session, bench.repository)
            return session
        bench.place.save(session, bench.repository)
    session = replace(session, phase="finished")
    bench.place.save(session, bench.repository)
    return session


def _carry(bench: Bench, session: Session, step: Step) -> Session:
    if step.row.verdict == "upstreamed":
        row = replace(step.row, became="upstreamed")
        return replace(session, done=(*session.done, Done(row=row, commit="")), before=step.before)
    row = replace(step.row, became="remembered" if step.row.remembered else "carried")
    names = bench.memory.names(step.merged)
    return _committed(bench, session, step, row, step.now, names)


def _committed(
    bench: Bench, session: Session, step: Step, row: PatchRow, tree: str, names: tuple[str, ...]
) -> Session:
    patch = step.patch
    commit = bench.repository.commit_tree(
        tree, parents=(session.commit,), message=patch.message, author=patch.author,
        date=patch.author.date,
    )  # fmt: skip
    return replace(
        session, done=(*session.done, Done(row=row, commit=commit, resolutions=names)),
        commit=commit, now=tree, before=step.before,
    )  # fmt: skip


def prepared(bench: Bench, session: Session) -> list[Carried]:
    """The old series as commits. Raises PatchFailed if its files are not those of the start."""
    series = bench.series(session.stack)
    if tuple((patch.name, patch.sha256) for patch in series) != session.series:
        raise PatchFailed(
            f"patches/vllm/{session.stack} was changed since this rebase began.",
            remedy="Undo that, or `nox -s rebase -- --abort` and start again: resolutions are "
            "remembered.",
        )
    return prepare(bench.repository, session.base, series)


def current(bench: Bench, session: Session) -> Step:
    """The patch that a stopped session waits for, looked at again: the same answer."""
    patches = prepared(bench, session)
    return bench.walk(session, patches).look(patches[len(session.done)])


def rest(bench: Bench, session: Session) -> list[PatchRow]:
    """The verdicts on the patch that a session waits for and all after it."""
    patches = prepared(bench, session)
    return bench.walk(session, patches).rest(patches[len(session.done) :])


def show(bench: Bench, session: Session, step: Step) -> None:
    """The worktree, ready for a person: what merged is there, what did not has markers."""
    tree, paths = step.merged.tree, step.merged.paths
    if not step.merged.clean:
        known, paths = bench.memory.recall(step.merged)
        contents = known | bench.memory.markers(step.merged, paths)
        tree = bench.repository.with_files(tree, contents)
    shown = Merged(
        tree=tree, clean=not paths, messages=(),
        conflicts=tuple(e for e in step.merged.conflicts if e.path in paths),
    )  # fmt: skip
    # Made anew: a kill may have left half of one.
    bench.repository.add_worktree(bench.place.worktree, session.commit)
    Worktree(bench.place.worktree).show_conflict(session.commit, shown)


def go_on(bench: Bench, session: Session) -> Session:
    """`--continue`: take what the person made of the stopped patch, and go on.

    Raises RebaseStopped, losing nothing, if it is not finished: unmerged or unadded files,
    conflict markers, Python that does not parse, or nothing left of the patch.
    """
    if session.phase in ("finished", "accepting"):
        return session
    if session.phase == "running" or not bench.place.worktree.is_dir():
        return advance(bench, session)
    step = current(bench, session)
    tree = _resolved_tree(bench, session, step)
    row = replace(step.row, became="resolved")
    if not step.merged.clean:
        bench.memory.learn(step.merged, tree, patch=step.patch.name, onto=session.upstream.label)
    names = bench.memory.names(step.merged)
    session = _committed(bench, session, step, row, tree, names)
    session = replace(session, phase="running")
    bench.place.save(session, bench.repository)
    return advance(bench, session)


def _resolved_tree(bench: Bench, session: Session, step: Step) -> str:
    repository, name = bench.repository, step.patch.name
    worktree = Worktree(bench.place.worktree)
    if unmerged := worktree.unmerged():
        raise _unfinished(name, f"{len(unmerged)} file(s) are still in conflict.", unmerged,
                          f"Edit them in {worktree.folder}, `git add` them")  # fmt: skip
    if unstaged := worktree.unstaged():
        raise _unfinished(name, f"{len(unstaged)} file(s) were edited and not added.", unstaged,
                          f"In {worktree.folder}: `git add` them, or drop them")  # fmt: skip
    head = worktree.head()
    if head == session.commit:
        tree = worktree.index_tree()
    elif repository.parents(head) == [session.commit] and not worktree.staged():
        tree = repository.tree_of(head)  # the person has committed it: as good
    else:
        raise _unfinished(name, "The worktree is on another commit.", [head],
                          f"In {worktree.folder}: `git reset --soft {session.commit[:12]}`")  # fmt: skip
    changed = [c for c in repository.changes(session.now, tree) if c.new.mode.startswith("100")]
    if marked := [c.path for c in changed if has_markers(repository.blob(c.new.blob))]:
        raise _unfinished(name, "Conflict markers are left.", marked,
                          f"Edit these in {worktree.folder}, `git add` them")  # fmt: skip
    _, broken = python_faults(repository, session.now, tree)
    if broken:
        raise _unfinished(name, "What was added is not Python.", broken,
                          f"Correct it in {worktree.folder}, `git add`")  # fmt: skip
    if tree == session.now:
        raise RebaseStopped(
            f"{name}: nothing is left of it.",
            cause="a patch is never dropped without a word",
            remedy=f'If it is not needed: `nox -s rebase -- --skip {name} --why "…"`.',
        )
    return tree


def _unfinished(name: str, what: str, details: Sequence[str], remedy: str) -> RebaseStopped:
    return RebaseStopped(
        f"{name}: {what}", details=list(details)[:20],
        remedy=f"{remedy}, then `nox -s rebase -- --continue`.",
    )  # fmt: skip


def skip(bench: Bench, session: Session, skips: Sequence[tuple[str, str]]) -> Session:
    """Leave patches out, each with a reason; goes on if the one that it waits for is among them.

    Raises UsageFault for a name that is no patch of the series or is already carried.
    """
    names = [name for name, _ in session.series]
    done = [one.row.name for one in session.done]
    for name, _ in skips:
        _known(name, names)
        if name in done:
            raise UsageFault(
                f"{name} is decided already.",
                remedy="`--abort`, then start again with `--onto … --skip … --why …`: resolutions "
                "are remembered.",
            )
    session = replace(session, skips=(*session.skips, *skips))
    waiting = names[len(done)] if len(done) < len(names) else ""
    if session.phase == "running" or waiting in dict(skips):
        return advance(bench, session)
    bench.place.save(session, bench.repository)
    return session


def _known(name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise UsageFault(
            f"There is no patch {name!r} in the series.", cause=f"patches: {', '.join(names)}"
        )
