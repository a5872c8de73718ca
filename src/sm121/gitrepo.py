"""Git, through GitPython, in this one module.

One bare repository per upstream under build/source/. Pristine trees and patched series are
commits in it; working trees are made from commits. Nothing here depends on the user's git
configuration: identity, dates and attributes are fixed, hooks and system config are off.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urljoin

import git
from git.exc import GitCommandError, InvalidGitRepositoryError, NoSuchPathError

from sm121 import proc
from sm121.errors import EnvironmentFault, NetworkFault, ToolFailed
from sm121.files import remove_tree, write_atomic
from sm121.gitcommand import GitCommands, failure
from sm121.gitimport import FAST_IMPORT, IMPORT_REF, ImportedFile, write_stream
from sm121.gitsettings import ISOLATION, LOCAL_VARIABLES, SETTINGS, configuration

# Whoever runs the pipeline, the same series on the same base has the same commit ids.
IDENTITY = ("sm121", "sm121@localhost")


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyResult:
    """What `git apply --cached` said: ok, and its messages (offsets, or the failing hunks)."""

    ok: bool
    messages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Author:
    name: str
    email: str
    date: str


class Repository:
    """A bare repository owned by the pipeline."""

    def __init__(self, path: Path) -> None:
        if shutil.which("git") is None:
            raise EnvironmentFault("git was not found.", remedy="Install git 2.34 or newer.")
        for name in LOCAL_VARIABLES:
            os.environ.pop(name, None)
        self.path = path
        # The run that holds build/ is the only one here: a lock is a killed git's.
        for lock in [*path.glob("*.lock"), *path.glob("refs/**/*.lock")]:
            lock.unlink()
        try:
            self._repo = git.Repo(path)
        except (InvalidGitRepositoryError, NoSuchPathError):
            _create(path)
            self._repo = git.Repo(path)
        # Highest precedence: a .gitattributes inside a tree must not change bytes or diffs.
        attributes = path / "info" / "attributes"
        attributes.parent.mkdir(exist_ok=True)
        attributes.write_text("* -text -filter -ident -working-tree-encoding -eol !diff !merge\n")
        self._repo.git.update_environment(**ISOLATION, **configuration(SETTINGS), **proc.mark())
        self._git = GitCommands(self._repo.git)

    def close(self) -> None:
        self._repo.close()

    # -- reading ----------------------------------------------------------------------

    def commit_of(self, ref: str) -> str | None:
        """Commit id that a ref names, None if there is none."""
        try:
            return str(self._git.rev_parse("--verify", "--quiet", f"{ref}^{{commit}}"))
        except ToolFailed:
            return None

    def tree_of(self, ref: str) -> str:
        return str(self._git.rev_parse("--verify", f"{ref}^{{tree}}"))

    def commit_date(self, commit: str) -> datetime:
        """Committer date, with its zone."""
        return datetime.fromisoformat(str(self._git.log("-1", "--format=%cI", commit)))

    def read(self, ref: str, path: str) -> str | None:
        """A file's text at a commit, None if it is not there. Line ends as stored."""
        try:
            return str(self._git.show(f"{ref}:{path}", strip_newline_in_stdout=False))
        except ToolFailed:
            return None

    def read_bytes(self, ref: str, path: str) -> bytes:
        """A file's content at a commit, byte for byte."""
        content = self._git.cat_file(
            "blob", f"{ref}:{path}", stdout_as_string=False, strip_newline_in_stdout=False
        )
        assert isinstance(content, bytes)
        return content

    def blobs(self, commit: str, folder: str) -> dict[str, str]:
        """Regular files below a folder (with a trailing slash): path → git's blob id."""
        output = str(self._git.ls_tree("-r", "-z", "--full-tree", commit, "--", folder))
        rows = [row.partition("\t") for row in output.split("\0") if row]
        return {path: facts.split()[2] for facts, _, path in rows if facts.startswith("100")}

    def changed_paths(self, old: str, new: str) -> list[str]:
        output = str(self._git.diff("--name-only", "--no-renames", "-z", old, new))
        return [name for name in output.split("\0") if name]

    def listing(self, ref: str, paths: Iterable[str]) -> str:
        """git's lines (mode, type, id, name) of every file at or below these paths."""
        return str(self._git.ls_tree("-r", ref, "--", *paths))

    def whitespace_faults(self, old: str, new: str) -> list[str]:
        """What `git diff --check` says of added lines: blanks at a line's or a file's end,
        conflict markers. As 'file:line: fault.'."""
        _, output, _ = self._git.diff(
            "--check", "--no-renames", old, new, with_extended_output=True, with_exceptions=False
        )
        return [line for line in str(output).splitlines() if re.match(r"[^+-].*:\d+: ", line)]

    # -- writing ----------------------------------------------------------------------

    def point(self, ref: str, commit: str) -> None:
        """Make a ref name a commit, so that git keeps it."""
        self._git.update_ref(ref, commit)

    def fetch_commit(self, url: str, *, ref: str, timeout_s: int) -> str:
        """Fetch one ref of a remote without its blobs' history; returns its commit id.

        Raises NetworkFault if the remote can't be reached or does not have it.
        """
        try:
            self._git.fetch(
                "--no-tags", "--depth=1", "--", url, f"+{ref}:refs/sm121/incoming",
                kill_after_timeout=timeout_s,
            )  # fmt: skip
        except ToolFailed as error:
            raise NetworkFault(f"{url} could not be fetched.", cause=error.cause) from error
        commit = self.commit_of("refs/sm121/incoming")
        if commit is None:
            raise NetworkFault(f"{url} gave no commit for {ref}.")
        return commit

    def import_tree(self, folder: Path, *, message: str, date: datetime) -> str:
        """Store a folder, byte for byte, as one parentless commit; the same folder, the same id."""
        with self._index() as index:
            work = {**index, "GIT_WORK_TREE": str(folder)}
            self._git.add("--all", "--force", "--", ".", env=work)
            tree = str(self._git.write_tree(env=index))
        return self.commit_tree(
            tree, parents=(), message=message, author=_pipeline_author(date), date=date.isoformat()
        )

    def import_files(self, files: Iterable[ImportedFile], *, message: str, date: datetime) -> str:
        """The same from a stream of files. If that raises, no ref names what was stored."""
        process = self._git.fast_import(*FAST_IMPORT, as_process=True, istream=subprocess.PIPE)
        try:
            write_stream(process.stdin, files, message=message, who=IDENTITY, date=date)
            process.wait()
        except BaseException as error:
            process.proc.kill()
            process.proc.wait()
            if isinstance(error, BrokenPipeError):
                error = GitCommandError("fast-import", 1, process.stderr.read())
            if isinstance(error, GitCommandError):
                raise failure("fast-import", error) from error
            raise
        commit = self.commit_of(IMPORT_REF)
        assert commit is not None
        return commit

    def commit_tree(
        self, tree: str, *, parents: tuple[str, ...], message: str, author: Author, date: str
    ) -> str:
        """A commit with a fixed committer; `date` (ISO 8601) is the committer date."""
        env = {
            "GIT_AUTHOR_NAME": author.name,
            "GIT_AUTHOR_EMAIL": author.email,
            "GIT_AUTHOR_DATE": author.date,
            "GIT_COMMITTER_NAME": IDENTITY[0],
            "GIT_COMMITTER_EMAIL": IDENTITY[1],
            "GIT_COMMITTER_DATE": date,
        }
        arguments = [part for parent in parents for part in ("-p", parent)]
        with tempfile.TemporaryDirectory() as scratch:
            text = Path(scratch) / "message"
            text.write_text(message, encoding="utf-8")
            return str(self._git.commit_tree(tree, *arguments, "-F", text, env=env))

    def apply(
        self, base: str, patch: Path, *, check_reverse: bool = False
    ) -> tuple[ApplyResult, str]:
        """Apply a patch file to the tree of `base` in a private index; returns result and tree.

        git apply has no fuzz: every context line must match, only offsets are allowed (they
        are in the messages). check_reverse: only ask whether the reversed patch applies, that
        is, whether the tree already has the change.
        """
        with self._index() as index:
            self._git.read_tree(base, env=index)
            arguments = ["--cached", "--verbose", "--whitespace=nowarn"]
            if check_reverse:
                arguments += ["--check", "--reverse"]
            status, _, stderr = self._git.apply(
                *arguments, "--", str(patch.resolve()), env=index,
                with_extended_output=True, with_exceptions=False,
            )  # fmt: skip
            messages = tuple(line for line in str(stderr).splitlines() if line.strip())
            if status != 0 or check_reverse:
                return ApplyResult(ok=status == 0, messages=messages), base
            return ApplyResult(ok=True, messages=messages), str(self._git.write_tree(env=index))

    def mailinfo(self, patch: Path) -> tuple[Author, str, str]:
        """Author, subject and body of a `git format-patch` file, as git itself reads them.

        All are empty if git finds no message in it.
        """
        with tempfile.TemporaryDirectory() as scratch:
            body = Path(scratch) / "body"
            with patch.open("rb") as stream:
                status, header, _ = self._git.mailinfo(
                    "-b", "--encoding=UTF-8", body, Path(scratch) / "diff", istream=stream,
                    with_extended_output=True, with_exceptions=False,
                )  # fmt: skip
            text = str(header).encode(errors="surrogateescape").decode(errors="replace")
            fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
            author = Author(
                name=fields.get("Author", ""),
                email=fields.get("Email", ""),
                date=fields.get("Date", ""),
            )
            message = body.read_bytes().decode(errors="replace").strip() if status == 0 else ""
            return author, fields.get("Subject", ""), message

    def patch_id(self, patch: Path) -> str:
        """git's stable patch id: the same for the same change, whatever the line numbers."""
        with patch.open("rb") as stream:
            output = str(self._git.patch_id("--stable", istream=stream))
        return output.split(" ", 1)[0]

    def checkout(self, commit: str, folder: Path, *, keep: str = "") -> list[str]:
        """Make a working tree equal a commit; returns the paths that were rewritten.

        Only files whose content differs are written, so that ninja rebuilds only what a
        patch touched. Files that the commit does not have are removed (third-party trees
        that vLLM's setup copied in, build leftovers, a user's own files): nothing left over
        may reach a wheel. keep: path from the top, as 'csrc/', below which they stay.
        """
        env = self._of(folder)
        index = Path(env["GIT_INDEX_FILE"])
        if not folder.is_dir() or not index.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            self._git.read_tree("--empty", env=env)
        index.with_name(f"{index.name}.lock").unlink(missing_ok=True)  # of a killed git
        self._git.update_index("-q", "--refresh", env=env, with_exceptions=False)
        before = {
            *self._names(self._git.diff_files("--name-only", "-z", env=env)),
            *self._names(self._git.diff_index("--cached", "--name-only", "-z", commit, env=env)),
        }
        self._git.read_tree("--reset", "-u", commit, env=env)
        self._git.checkout_index("--all", "--force", "-q", env=env)
        # Only now: what was left over before may be a file of this commit.
        found = self.untracked(folder)
        leftovers = [name for name in found if not (keep and name.startswith(keep))]
        for name in leftovers:
            remove_tree(folder / name.rstrip("/"))  # a nested repository is listed as "name/"
        self._remove_empty(folder, leftovers)
        # Last: a tree without it was not finished.
        write_atomic(folder.with_name(f"{folder.name}.commit"), commit)
        return sorted(before)

    @staticmethod
    def _of(folder: Path) -> dict[str, str]:
        """Environment of git for a working tree that `checkout` made."""
        index = folder.with_name(f"{folder.name}.index")
        return {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(folder)}

    def untracked(self, folder: Path) -> list[str]:
        """Files of a working tree that `checkout` did not write; a nested repository as 'name/'."""
        env = self._of(folder)
        return self._names(self._git.ls_files("--others", "-z", env=env))

    def edited(self, folder: Path) -> list[str]:
        """Files of a working tree that differ from what `checkout` wrote."""
        env = self._of(folder)
        self._git.update_index("-q", "--refresh", env=env, with_exceptions=False)
        return self._names(self._git.diff_files("--name-only", "-z", env=env))

    def export(self, commit: str, folder: Path, *, paths: Sequence[str] = ()) -> None:
        """Write a commit's files into a folder, beside what is there.

        paths: only those at or below these. Of the others no blob has to be there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with self._index() as index:
            env = {**index, "GIT_WORK_TREE": str(folder)}
            self._git.read_tree(commit, env=env)
            if not paths:
                self._git.checkout_index("--all", "--force", "-q", env=env)
            elif files := self._names(self._git.ls_files("-z", "--", *paths, env=env)):
                with tempfile.TemporaryFile() as listing:
                    listing.write("\0".join(files).encode("utf-8", "surrogateescape"))
                    listing.seek(0)
                    self._git.checkout_index(
                        "--stdin", "-z", "--force", "-q", env=env, istream=listing
                    )

    @contextmanager
    def borrowing(self, objects: Path) -> Iterator[None]:
        """Read another repository's objects as if they were here (gitrepository-layout(5),
        alternates). Nothing is written there, none of its settings count, and none of the
        remotes that it came from is asked for what it lacks."""
        variables = {
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects),
            "GIT_ALLOW_PROTOCOL": "none",
        }
        with self._repo.git.custom_environment(**variables):
            yield

    def submodule_commit(self, commit: str, path: str) -> str:
        """The commit that a tree records for a submodule, '' if there is none."""
        fields = str(self._git.ls_tree(commit, "--", path)).split()
        return fields[2] if len(fields) > 2 and fields[1] == "commit" else ""

    def submodule_url(self, commit: str, path: str, *, base: str) -> str:
        """URL of a submodule out of the commit's .gitmodules; relative ones are joined to base."""
        output = str(
            self._git.config("--blob", f"{commit}:.gitmodules", "--get-regexp", r"\.(path|url)$")
        )
        pairs = dict(line.split(" ", 1) for line in output.splitlines())
        for key, value in pairs.items():
            if key.endswith(".path") and value == path:
                url = pairs[key.removesuffix(".path") + ".url"]
                return urljoin(base.rstrip("/") + "/", url) if url.startswith(".") else url
        raise NetworkFault(f"{base} has no submodule at {path}.")

    @staticmethod
    def _names(output: object) -> list[str]:
        return [name for name in str(output).split("\0") if name]

    @staticmethod
    def _remove_empty(folder: Path, names: list[str]) -> None:
        for parent in sorted({(folder / n).parent for n in names}, key=lambda p: -len(p.parts)):
            current = parent
            while current != folder and current.is_dir() and not any(current.iterdir()):
                current.rmdir()
                current = current.parent

    @contextmanager
    def _index(self) -> Iterator[Mapping[str, str]]:
        with tempfile.TemporaryDirectory(dir=self.path) as scratch:
            yield {"GIT_INDEX_FILE": str(Path(scratch) / "index")}


def unreachable(url: str, *, timeout_s: int) -> str:
    """Why a remote can't be asked for what it has; '' if it can."""
    commands = git.Git()
    commands.update_environment(**ISOLATION, **proc.mark())
    try:
        GitCommands(commands).ls_remote("--", url, "HEAD", kill_after_timeout=timeout_s)
    except ToolFailed as error:
        return error.cause
    return ""


def _create(path: Path) -> None:
    """Make an empty bare repository, under another name first: a killed init is no repository."""
    remove_tree(path)
    partial = path.with_name(f"{path.name}.partial")
    remove_tree(partial)
    partial.mkdir(parents=True)
    GitCommands(git.Git(partial)).init("--bare", "--quiet", "--initial-branch=sm121", env=ISOLATION)
    partial.rename(path)


def _pipeline_author(date: datetime) -> Author:
    return Author(name=IDENTITY[0], email=IDENTITY[1], date=date.isoformat())
