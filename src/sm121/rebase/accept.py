"""What accepting a finished rebase writes: a second stack beside the first, and the record.

patches/vllm/<new>/      the series, and CHANGES.md: what became of each patch, and why
pins/<new>/stack.toml    the pins, moved
patches/vllm/rerere/     the resolutions that were needed
CHANGELOG.md             one entry, naming what was dropped, the reason and the release
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm121.errors import NetworkFault, PatchFailed, PinsFault, UsageFault
from sm121.files import fresh_directory, write_atomic
from sm121.patches.apply import apply_series
from sm121.patches.export import Exported, export_commit
from sm121.patches.lint import lint_series
from sm121.patches.series import Patch, listing
from sm121.pins.load import parse_stack
from sm121.rebase.propose import UNKNOWN_COMMIT, propose
from sm121.rebase.releases import Releases
from sm121.rebase.report import OntoRow
from sm121.rebase.resolve import Bench
from sm121.rebase.session import Accepting, Session
from sm121.source.drift import declared_in
from sm121.source.stage import EMPTY_TREE

_DROPPED = ("upstreamed", "skipped")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Everything that accepting writes, by path relative to the root of the project."""

    series: dict[str, bytes]
    resolutions: dict[str, bytes]
    pins: str
    changelog: str
    release: str

    def diff(self, root: Path, stack: str) -> str:
        """The small files as one diff; the patches themselves are in the range-diff."""
        new = self.release
        return "".join(
            [
                _diff(root / f"pins/{stack}/stack.toml", f"pins/{new}/stack.toml", self.pins, root),
                _diff(root / f"patches/vllm/{stack}/series", f"patches/vllm/{new}/series",
                      self.series["series"].decode(), root),
                _diff(None, f"patches/vllm/{new}/CHANGES.md", self.series["CHANGES.md"].decode(), root),
                _diff(root / "CHANGELOG.md", "CHANGELOG.md", self.changelog, root),
            ]
        )  # fmt: skip


def _diff(old: Path | None, new: str, text: str, root: Path) -> str:
    there = old.read_text(encoding="utf-8") if old and old.is_file() else ""
    return "".join(
        difflib.unified_diff(
            there.splitlines(keepends=True), text.splitlines(keepends=True),
            old.relative_to(root).as_posix() if old and there else "/dev/null", new,
        )
    )  # fmt: skip


def build(bench: Bench, session: Session, row: OntoRow) -> Proposal:
    """Make the proposal of a finished session, and check the new series as `patch --check` does.

    Raises PatchFailed if it fails that, or if a patch of the old series is unaccounted for.
    """
    layout, stack, release = bench.context.layout, session.stack, session.upstream.version
    exported = [
        export_commit(bench.repository, done.commit, name=done.row.name)
        for done in session.done
        if done.commit
    ]
    _account(session)
    _check(bench, session, exported)
    old = layout.patches / "vllm" / stack / "series"
    names = [patch.filename for patch in exported]
    series = {patch.filename: patch.data for patch in exported}
    series["series"] = listing(old.read_text(encoding="utf-8"), names).encode()
    series["CHANGES.md"] = record(session).encode()
    pins = layout.pins / stack / "stack.toml"
    changelog = layout.root / "CHANGELOG.md"
    before = changelog.read_text(encoding="utf-8") if changelog.is_file() else ""
    resolutions: dict[str, bytes] = {}
    for name in sorted({name for done in session.done for name in done.resolutions}):
        for folder in (bench.place.memory, bench.memory.shared):
            if (folder / name).is_file():
                resolutions.setdefault(name, (folder / name).read_bytes())
    return Proposal(
        series=series, resolutions=resolutions, release=release,
        pins=_pins(bench, session, row, pins.read_text(encoding="utf-8")),
        changelog=before if entry(session) in before else with_entry(before, entry(session)),
    )  # fmt: skip


def _account(session: Session) -> None:
    """Each patch of the old series is in the new one or is recorded as dropped, with a reason."""
    decided = {done.row.name: done for done in session.done}
    for name, _ in session.series:
        done = decided.get(name)
        if done is None or not (done.commit or (done.row.became in _DROPPED and done.row.why)):
            raise PatchFailed(
                f"{name} is neither in the new series nor recorded as dropped.",
                remedy="`nox -s rebase -- --abort`, and report this: it must not happen.",
            )


def _check(bench: Bench, session: Session, exported: Sequence[Exported]) -> None:
    folder = bench.place.folder / "result"
    with fresh_directory(folder) as fresh:
        for patch in exported:
            (fresh / patch.filename).write_bytes(patch.data)
    series = [Patch(name=p.name, path=folder / p.filename, sha256="") for p in exported]
    applied = apply_series(bench.repository, session.upstream.commit, series)
    lint_series(bench.repository, series, applied)
    if bench.repository.tree_of(applied.commit) != session.now:
        raise PatchFailed(
            "The exported series does not give the tree that was carried.",
            remedy="`nox -s rebase -- --abort`, and report this: it must not happen.",
        )


def _pins(bench: Bench, session: Session, row: OntoRow, text: str) -> str:
    repository, commit = bench.repository, session.upstream.commit
    declared = declared_in(repository, commit, repository.changed_paths(EMPTY_TREE, commit))
    return propose(
        text, bench.context.stack, session.upstream, family=row.family, sources=row.sources,
        declared=declared, new_components=row.components_new, gone_components=row.components_gone,
        cmake={d.file: repository.read(commit, d.file) or "" for d in declared},
    )  # fmt: skip


def record(session: Session) -> str:
    """CHANGES.md of the new series."""
    lines = [
        f"# From vLLM {session.stack} to {session.upstream.version}", "",
        "| patch | verdict | became | hunks | why |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for done in session.done:
        row = done.row
        states = [h.state for h in row.hunks]
        counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
        why = row.why.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {row.verdict} | {row.became} | {counts} | {why} |")
    return "\n".join(lines) + "\n"


def entry(session: Session) -> str:
    """The changelog's entry: where to, and what was dropped with reason and release."""
    release = session.upstream.version
    dropped = [
        f"`{done.row.name}` ("
        + (f"upstream has it in {release}" if done.row.became == "upstreamed" else done.row.why)
        + ")"
        for done in session.done
        if not done.commit
    ]
    text = f"- The series of {session.stack} carried to vLLM {release} (`patches/vllm/{release}`)."
    return text + (f" Dropped there: {', '.join(dropped)}." if dropped else "") + "\n"


def with_entry(text: str, line: str) -> str:
    """A changelog with one entry more, at the end of its first section."""
    if not text:
        return f"# Changelog\n\n## Unreleased\n\n{line}"
    lines = text.rstrip("\n").splitlines(keepends=True)
    heads = [n for n, one in enumerate(lines) if one.startswith("## ")]
    end = heads[1] if len(heads) > 1 else len(lines)
    body = "".join(lines[:end]).rstrip("\n")
    after = "".join(lines[end:])
    return f"{body}\n{line}" + (f"\n{after}\n" if after else "")


def refuse(bench: Bench, session: Session, proposal: Proposal) -> None:
    """Raise UsageFault or PinsFault for what keeps a proposal from being written."""
    layout, release = bench.context.layout, session.upstream.version
    if not release:
        raise UsageFault(
            f"{session.upstream.label} is no release, so there are no pins for it.",
            cause="a stack names a release: its sdist is the second source of every build",
            remedy="Accept the same on a release or its tag; resolutions are remembered.",
        )
    mine = session.accepting.created if session.accepting else ()
    for name in (f"patches/vllm/{release}", f"pins/{release}"):
        if (layout.root / name).exists() and name not in mine:
            raise UsageFault(
                f"{name} exists already.",
                remedy="Move it away (git has it), then `nox -s rebase -- --accept`.",
            )
    if not session.upstream.sdist_sha256:
        raise UsageFault(
            f"The package index has no sdist of vLLM {release}, or can't be asked.",
            cause="pins name the sdist by its sha256: it is the second source of every build",
            remedy="Run the same command again when the index has it.",
        )
    if UNKNOWN_COMMIT in proposal.pins:
        raise UsageFault(
            f"The commit of v{release} is not known: the sdist has only its first digits.",
            cause=f"vllm/_version.py says {stated_commit(bench, session) or 'nothing'}",
            remedy=f"`git ls-remote {bench.context.stack.vllm.git} v{release}` says it; then "
            "`nox -s rebase -- --accept --commit HEX`.",
        )
    try:
        parse_stack(proposal.pins, layout.pins / release / "stack.toml")
    except PinsFault as fault:
        raise PinsFault(
            "The proposed pins have faults; nothing was written.", details=fault.details,
            cause=fault.cause, remedy=f"Correct pins/{session.stack}/stack.toml so that they can be moved.",
        ) from fault  # fmt: skip


def with_sdist(session: Session, releases: Releases) -> Session:
    """The session with the sha256 of the release's sdist, if the index can be asked for it."""
    upstream = session.upstream
    if upstream.sdist_sha256 or not upstream.version:
        return session
    try:
        found = releases.sdist(upstream.version).sha256
    except (UsageFault, NetworkFault):
        return session
    return replace(session, upstream=replace(upstream, sdist_sha256=found))


def stated_commit(bench: Bench, session: Session) -> str:
    """The first digits of the release's commit, as setuptools-scm wrote them into the sdist."""
    text = bench.repository.read(session.upstream.commit, "vllm/_version.py") or ""
    return next((w.strip("'\"g") for line in text.splitlines() if line.startswith("__commit_id__ =")
                 for w in [line.rpartition("=")[2].strip()]), "")  # fmt: skip


def with_commit(bench: Bench, session: Session, commit: str) -> Session:
    """The session with the release's commit as the user says. Raises UsageFault if it can't be."""
    stated = session.upstream.git_commit or stated_commit(bench, session)
    if len(commit) != 40 or set(commit) - set("0123456789abcdef") or not commit.startswith(stated):
        raise UsageFault(
            f"--commit {commit} is not the commit of this release.",
            cause=f"wanted 40 hex digits that begin with {stated}"
            if stated
            else "wanted 40 hex digits",
        )
    return replace(session, upstream=replace(session.upstream, git_commit=commit))


def write(bench: Bench, session: Session, proposal: Proposal) -> None:
    """Write the proposal; the session is over after it. A killed one is repeated or undone."""
    layout, release = bench.context.layout, session.upstream.version
    shared = bench.memory.shared
    changelog = layout.root / "CHANGELOG.md"
    if session.accepting is None:
        new = [name for name in proposal.resolutions if not (shared / name).exists()]
        paths = [
            layout.patches / "vllm" / release,
            layout.pins / release,
            *(shared / n for n in new),
        ]
        created = tuple(path.relative_to(layout.root).as_posix() for path in paths)
        session = replace(
            session, phase="accepting", accepting=Accepting(created=created, entry=entry(session))
        )
        bench.place.save(session, bench.repository)
    with fresh_directory(layout.patches / "vllm" / release) as fresh:
        for name, data in proposal.series.items():
            (fresh / name).write_bytes(data)
    for name, data in proposal.resolutions.items():
        if not (shared / name).exists():
            write_atomic(shared / name, data)
    write_atomic(changelog, proposal.changelog)
    # Last: with it the stack exists.
    write_atomic(layout.pins / release / "stack.toml", proposal.pins)
    bench.place.clear(bench.repository)
