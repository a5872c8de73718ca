"""Git for series: three-way merges, mail, worktrees. The second half of sm121.gitrepo.

Everything that decides bytes is said on the command line (diff algorithm, heuristics, widths),
so that neither a user's configuration nor another version's defaults change a patch file.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.errors import EnvironmentFault, NetworkFault, ToolFailed
from sm121.files import remove_tree
from sm121.gitrepo import IDENTITY, Author, Repository

# `merge-tree --write-tree` came with 2.38 (git's release notes).
OLDEST_GIT = (2, 38)
LABELS = ("upstream", "before", "patch")
_CONTENT = (
    "--no-color", "--no-ext-diff", "--no-textconv", "--full-index", "--src-prefix=a/",
    "--dst-prefix=b/",
)  # fmt: skip
# What git's merge uses inside (merge-ort.c), so that our hunks are those that it merges.
_MERGE_DIFF = (*_CONTENT, "--diff-algorithm=histogram", "--no-indent-heuristic", "--no-renames")
_MAIL = (
    *_CONTENT, "--stdout", "--binary", "--zero-commit", "--no-signature", "--no-numbered",
    "--no-attach", "--no-thread", "--no-cover-letter", "--no-base", "--no-notes", "--no-from",
    "--no-add-header", "--no-to", "--no-cc", "--no-signoff", "--encode-email-headers",
    "--subject-prefix=PATCH", "--diff-algorithm=myers", "--indent-heuristic", "--unified=3",
    "--inter-hunk-context=0", "--find-renames=50%", "-l1000", "--no-relative", "-O/dev/null",
    "--stat=72", "--summary", "--patch", "--no-function-context",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One path of a tree or of an index. stage 0: no conflict; else base 1, ours 2, theirs 3."""

    mode: str
    blob: str
    path: str
    stage: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One path that two trees differ in. An absent side has mode 000000 and a null blob."""

    path: str
    old: Entry
    new: Entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """A three-way merge. tree: the result; where it is not clean, with git's own markers, which
    name the commits (`conflict_text` has constant ones).
    """

    tree: str
    clean: bool
    conflicts: tuple[Entry, ...]
    messages: tuple[str, ...]
    commits: tuple[str, str, str] = ("", "", "")

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.path for entry in self.conflicts))


class SeriesRepository(Repository):
    """A pipeline's repository, with what moving and exporting a series needs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # Of objects that are named by their content, what was read once stays true.
        self._entries: dict[tuple[str, str], Entry | None] = {}
        self._changes: dict[tuple[str, str], list[Change]] = {}
        self._bare: dict[tuple[str, ...], str] = {}
        self._diffs: dict[tuple[str, str, int], bytes] = {}
        found = self._repo.git.version_info
        if tuple(found[:2]) < OLDEST_GIT:
            raise EnvironmentFault(
                f"git {'.'.join(map(str, found))} is too old to rebase with.",
                cause="`git merge-tree --write-tree` came with git 2.38",
                remedy="Install git 2.38 or newer; everything but rebase and export works with "
                "2.34.",
            )
        with self._repo.config_writer() as config:
            config.set_value("merge", "conflictStyle", "diff3")
            config.set_value("merge", "directoryRenames", "false")

    # -- reading ----------------------------------------------------------------------

    def blob(self, name: str) -> bytes:
        """A blob's content, by one `git cat-file --batch` for all."""
        return bytes(self._repo.git.get_object_data(name)[3])

    def entry(self, tree: str, path: str) -> Entry | None:
        """What a tree has at a path, None if nothing."""
        return self.entries(tree, [path]).get(path)

    def entries(self, tree: str, paths: Iterable[str]) -> dict[str, Entry]:
        """What a tree has at some paths; those where it has nothing are left out."""
        wanted = [path for path in paths if (tree, path) not in self._entries]
        if wanted:
            output = str(self._git.ls_tree("-z", tree, "--", *(f":(literal){p}" for p in wanted)))
            self._entries.update(((tree, path), None) for path in wanted)
            for line in filter(None, output.split("\0")):
                head, path = line.split("\t", 1)
                mode, _, blob = head.split(" ")
                self._entries[tree, path] = Entry(mode=mode, blob=blob, path=path)
        found = {path: self._entries[tree, path] for path in paths}
        return {path: entry for path, entry in found.items() if entry}

    def changes(self, old: str, new: str) -> list[Change]:
        """Every path that differs between two trees, renames as removed and added."""
        if (old, new) in self._changes:
            return self._changes[old, new]
        output = str(
            self._git.diff_tree("-r", "-z", "--raw", "--no-renames", "--no-abbrev", old, new)
        )
        fields = output.split("\0")
        found = self._changes[old, new] = []
        for head, path in zip(fields[::2], fields[1::2], strict=False):
            old_mode, new_mode, old_blob, new_blob, _ = head.lstrip(":").split(" ")
            found.append(
                Change(
                    path=path,
                    old=Entry(mode=old_mode, blob=old_blob, path=path),
                    new=Entry(mode=new_mode, blob=new_blob, path=path),
                )
            )
        return found

    def renames(self, old: str, new: str) -> dict[str, str]:
        """Files that were moved between two trees, as git finds them: old path → new path."""
        output = str(
            self._git.diff_tree(
                "-r", "-z", "--name-status", "--diff-filter=R", "--find-renames=50%", "-l5000",
                old, new,
            )
        )  # fmt: skip
        fields = [field for field in output.split("\0") if field]
        return dict(zip(fields[1::3], fields[2::3], strict=True))

    def blob_diff(self, old: str, new: str, *, context: int = 0) -> bytes:
        """The hunks between two blobs, as git's merge sees them; empty for binary files."""
        key = (old, new, context)
        if key not in self._diffs:
            output = bytes(
                self._git.diff(
                    *_MERGE_DIFF, f"--unified={context}", old, new,
                    stdout_as_string=False, strip_newline_in_stdout=False,
                )
            )  # fmt: skip
            start = output.find(b"\n@@ ")
            self._diffs[key] = output[start + 1 :] if start >= 0 else b""
        return self._diffs[key]

    def commits(self, base: str, tip: str) -> list[str]:
        """Commits after `base` up to `tip`, oldest first."""
        return str(self._git.rev_list("--reverse", "--topo-order", f"{base}..{tip}")).split()

    def parents(self, commit: str) -> list[str]:
        return str(self._git.rev_list("--parents", "-1", commit)).split()[1:]

    def message(self, commit: str) -> str:
        """A commit's message; '(no message)' if there is none. What is no UTF-8 is replaced."""
        text = str(self._git.log("-1", "--format=%B", "--encoding=UTF-8", commit))
        return text.encode(errors="surrogateescape").decode(errors="replace") or "(no message)"

    def is_ancestor(self, old: str, new: str) -> bool:
        try:
            self._git.merge_base("--is-ancestor", old, new)
        except ToolFailed:
            return False
        return True

    def reworded(self, commit: str, message: str) -> str:
        """The same commit, parents and author with another message."""
        name, email, date = str(
            self._git.log(
                "-1", "--format=%an%x00%ae%x00%ad", "--date=raw", "--encoding=UTF-8", commit
            )
        ).split("\0")
        author = Author(name=name, email=email, date=f"@{date}")
        return self.commit_tree(
            self.tree_of(commit), parents=tuple(self.parents(commit)), message=message,
            author=author, date=author.date,
        )  # fmt: skip

    def recent(self, tip: str, path: str, first: int, last: int) -> list[str]:
        """Up to three newest commits that touched lines first…last (1-based) of a file, or the
        file itself when first is 0. One line each: id, date, subject. Empty without history.
        """
        span = [f"-L{first},{last}:{path}", "--no-patch"] if first else []
        tail = [] if first else ["--", f":(literal){path}"]
        try:
            output = str(self._git.log("-3", "--format=%h %cs %s", *span, tip, *tail))
        except ToolFailed:
            return []
        return output.splitlines()

    def range_diff(self, base: str, tip: str, new_base: str, new_tip: str) -> str:
        return str(
            self._git.range_diff("--no-color", "--creation-factor=90",
                                 f"{base}..{tip}", f"{new_base}..{new_tip}")
        )  # fmt: skip

    # -- merging ----------------------------------------------------------------------

    def merge(self, base: str, ours: str, theirs: str) -> Merged:
        """Merge three trees: what happened from base to theirs, done to ours.

        Conflict markers name the commits; see `conflict_text`.
        """
        # Before 2.40 merge-tree takes no base, so it is given commits that have one.
        root = self._bare_commit(base)
        left, right = self._bare_commit(ours, root), self._bare_commit(theirs, root)
        status, output, error = self._git.merge_tree(
            "--write-tree", "-z", "--messages", left, right,
            with_extended_output=True, with_exceptions=False,
        )  # fmt: skip
        if status not in (0, 1):
            raise ToolFailed("git merge-tree failed.", returncode=int(status), cause=str(error))
        tree, _, rest = str(output).partition("\0")
        entries: list[Entry] = []
        fields = rest.split("\0")
        while fields and fields[0]:
            head, path = fields.pop(0).split("\t", 1)
            mode, blob, stage = head.split(" ")
            entries.append(Entry(mode=mode, blob=blob, path=path, stage=int(stage)))
        messages = _messages(fields[1:])
        return Merged(
            tree=tree, clean=status == 0, conflicts=tuple(entries), messages=tuple(messages),
            commits=(left, root, right),
        )  # fmt: skip

    def _bare_commit(self, tree: str, *parents: str) -> str:
        if known := self._bare.get((tree, *parents)):
            return known
        moment = {f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
        for who in ("AUTHOR", "COMMITTER"):
            moment |= {f"GIT_{who}_NAME": IDENTITY[0], f"GIT_{who}_EMAIL": IDENTITY[1]}
        words = [word for parent in parents for word in ("-p", parent)]
        made = str(self._git.commit_tree(tree, *words, "-m", "merge", env=moment))
        self._bare[tree, *parents] = made
        return made

    def conflict_text(self, merged: Merged, path: str) -> bytes:
        """A conflicted file with its markers, b'' if it has none (removed, binary, a link).

        Markers are labelled upstream (ours), before (base) and patch (theirs), so that the same
        conflict reads the same in every run.
        """
        modes = [entry.mode for entry in merged.conflicts if entry.path == path]
        if not all(mode.startswith("100") for mode in modes):
            return b""
        name = f"{merged.tree}:{path}"
        if "\n" in path or not path.isprintable():  # not a line for `cat-file --batch`
            entry = self.entry(merged.tree, path)
            name = entry.blob if entry else ""
        try:
            text = self.blob(name)
        except ValueError:
            return b""
        left, root, right = merged.commits
        marked = text
        for mark, commit, label in (
            (b"<<<<<<< ", left, LABELS[0]), (b"||||||| ", root[:7], LABELS[1]),
            (b">>>>>>> ", right, LABELS[2]),
        ):  # fmt: skip
            pattern = rb"^" + re.escape(mark + commit.encode()) + rb"[^\r\n]*"
            marked = re.sub(pattern, mark + label.encode(), marked, flags=re.MULTILINE)
        return marked if marked != text else b""

    def store(self, content: bytes) -> str:
        """Content as a blob; returns its id."""
        with tempfile.TemporaryFile() as stream:
            stream.write(content)
            stream.seek(0)
            return str(self._git.hash_object("-w", "--stdin", istream=stream))

    def empty_tree(self) -> str:
        with self._index() as index:
            self._git.read_tree("--empty", env=index)
            return str(self._git.write_tree(env=index))

    def with_files(self, tree: str, contents: dict[str, bytes]) -> str:
        """A tree with other contents for some files; their modes stay (new ones: 100644)."""
        if not contents:
            return tree
        with self._index() as index:
            self._git.read_tree(tree, env=index)
            lines = []
            for path, content in contents.items():
                known = self.entry(tree, path)
                mode = known.mode if known else "100644"
                lines.append(f"{mode} {self.store(content)} 0\t{path}\0")
            self._feed(lines, index)
            return str(self._git.write_tree(env=index))

    def _feed(self, lines: Sequence[str], env: Mapping[str, str]) -> None:
        with tempfile.TemporaryFile() as stream:
            stream.write(os.fsencode("".join(lines)))
            stream.seek(0)
            self._git.update_index("-z", "--index-info", istream=stream, env=env)

    # -- mail -------------------------------------------------------------------------

    def format_patch(self, commit: str) -> bytes:
        """A commit as a patch file, the same bytes from every git that has these options."""
        return bytes(
            self._git.format_patch(
                *_MAIL, "-1", commit, stdout_as_string=False, strip_newline_in_stdout=False
            )
        )

    # -- remotes ----------------------------------------------------------------------

    def fetch_history(self, url: str, *, ref: str, since: str, timeout_s: int) -> str:
        """Fetch a ref with its history after a day (YYYY-MM-DD), without blobs if the server can.

        Raises NetworkFault if the remote can't be reached or does not have it.
        """
        try:
            self._git.fetch(
                "--no-tags", f"--shallow-since={since}", "--filter=blob:none", "--", url,
                f"+{ref}:refs/sm121/incoming", kill_after_timeout=timeout_s,
            )  # fmt: skip
        except ToolFailed as error:
            # A ref whose whole history is older: nothing is "since".
            if "shallow" in (error.cause or ""):
                return self.fetch_commit(url, ref=ref, timeout_s=timeout_s)
            raise NetworkFault(f"{url} could not be fetched.", cause=error.cause) from error
        commit = self.commit_of("refs/sm121/incoming")
        if commit is None:
            raise NetworkFault(f"{url} gave no commit for {ref}.")
        return commit

    # -- worktrees --------------------------------------------------------------------

    def add_worktree(self, folder: Path, commit: str, *, branch: str = "") -> None:
        """A working tree of its own at a commit, on a branch or on none. Replaces `folder`."""
        self.remove_worktree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        where = ["-B", branch] if branch else ["--detach"]
        self._git.worktree("add", "--quiet", "--force", *where, str(folder), commit)

    def remove_worktree(self, folder: Path) -> None:
        remove_tree(folder)
        self._git.worktree("prune")


def _messages(fields: Sequence[str]) -> list[str]:
    """Of merge-tree's messages (count, paths, type, text) the texts of conflicts."""
    found = []
    rest = list(fields)
    while rest and rest[0].isdigit():
        count = int(rest.pop(0))
        del rest[:count]
        kind, text = rest.pop(0), rest.pop(0)
        if kind.startswith("CONFLICT"):
            found.append(text.strip())
    return found
