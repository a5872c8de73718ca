"""Commits back to patch files: the reverse of `apply`, byte for byte.

`apply` then `export` changes no file, whatever git's version or configuration: every option that
decides a byte is said (sm121.gitseries). Two things differ all the same, so a file that means the
same is left as it is: compressed binary hunks (between zlib builds) and the column width of the
diffstat, which nothing reads (names that are not ASCII, between git 2.38 and 2.39).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.errors import PatchFailed
from sm121.files import write_atomic
from sm121.gitseries import SeriesRepository
from sm121.patches.series import listing

_BINARY = b"\nGIT binary patch\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """One patch file as it should be. commit: what it was made of."""

    name: str
    commit: str
    data: bytes

    @property
    def filename(self) -> str:
        return f"{self.name}.patch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What differs between the branch and a folder: a file name and how."""

    filename: str
    how: str


def export_commit(repository: SeriesRepository, commit: str, *, name: str) -> Exported:
    """A commit as a patch file that gives the same commit again.

    Raises PatchFailed if it can't: it changes nothing, is a merge, or its message has a line
    that git would take for the end of it ('---', 'diff -').
    """
    parents = repository.parents(commit)
    short = f"{commit[:12]} ({repository.message(commit).splitlines()[0]})"
    if len(parents) != 1:
        raise PatchFailed(
            f"{short} is a merge.", remedy="A series is a line of commits: rebase the branch."
        )
    tree = repository.tree_of(commit)
    if tree == repository.tree_of(parents[0]):
        raise PatchFailed(f"{short} changes nothing.", remedy="Drop it (`git rebase -i`).")
    data = repository.format_patch(commit)
    again, text = _reapplied(repository, parents[0], data)
    if again != tree or text != data:
        raise PatchFailed(
            f"{short} can't be written as a patch file that gives it again.",
            cause="a mail can't carry its message (a line such as '---' or 'diff -' ends it, 'Re:' "
            "and '[PATCH]' are taken off a subject) or its author (quotation marks)",
            remedy="Reword it (`git commit --amend`, with --author=… if need be), then export.",
        )
    return Exported(name=name, commit=commit, data=data)


def _reapplied(repository: SeriesRepository, parent: str, data: bytes) -> tuple[str, bytes]:
    """Tree, and the patch file of the commit, that a patch file gives on a parent."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "again.patch"
        file.write_bytes(data)
        author, subject, body = repository.mailinfo(file)
        result, tree = repository.apply(parent, file)
        if not result.ok or not author.date:
            return "", b""
        again = repository.commit_tree(
            tree, parents=(parent,), message=f"{subject}\n\n{body}\n", author=author,
            date=author.date,
        )  # fmt: skip
    return tree, repository.format_patch(again)


def differences(
    repository: SeriesRepository, patches: Sequence[Exported], folder: Path
) -> list[Difference]:
    """What `write` would change in a folder."""
    found = []
    for patch in patches:
        file = folder / patch.filename
        if not file.is_file():
            found.append(Difference(filename=patch.filename, how="new"))
        elif not _equal(repository, patch, file.read_bytes()):
            found.append(Difference(filename=patch.filename, how="changed"))
    names = [patch.filename for patch in patches]
    found += [
        Difference(filename=file.name, how="gone")
        for file in sorted(folder.glob("*.patch"))
        if file.name not in names
    ]
    text = (folder / "series").read_text(encoding="utf-8") if (folder / "series").is_file() else ""
    if listing(text, names) != text:
        found.append(Difference(filename="series", how="changed"))
    return found


def _equal(repository: SeriesRepository, patch: Exported, there: bytes) -> bool:
    if _without_stat(patch.data) == _without_stat(there):
        return True
    if _BINARY not in patch.data or _BINARY not in there:
        return False
    tree, text = _reapplied(repository, repository.parents(patch.commit)[0], there)
    # The same text but for the binary hunks, which only the tree can compare.
    return (
        tree == repository.tree_of(patch.commit)
        and _without_stat(text) == _without_stat(patch.data)
        and there.partition(b"\n---\n")[0] == patch.data.partition(b"\n---\n")[0]
    )


def _without_stat(data: bytes) -> bytes:
    """A patch file without what stands between the message and the first diff."""
    message, _, rest = data.partition(b"\n---\n")
    return message + b"\n---\n" + rest[max(rest.find(b"\ndiff --git "), 0) :]


def write(
    repository: SeriesRepository, patches: Sequence[Exported], folder: Path
) -> list[Difference]:
    """Make a folder hold exactly these patches; returns what changed.

    Each file is written whole or not at all, `series` after the patches that it lists, and
    what is gone last: after a kill, the same command finishes it.
    """
    changed = differences(repository, patches, folder)
    by_name = {patch.filename: patch for patch in patches}
    for one in changed:
        if one.filename in by_name:
            write_atomic(folder / one.filename, by_name[one.filename].data)
    series = folder / "series"
    text = series.read_text(encoding="utf-8") if series.is_file() else ""
    wanted = listing(text, list(by_name))
    if wanted != text or not series.is_file():
        write_atomic(series, wanted)
    for one in changed:
        if one.how == "gone":
            (folder / one.filename).unlink()
    return changed
