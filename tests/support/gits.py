"""Real git repositories, made with the git program itself and not through sm121."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.tools import run, tool

DATE = "2026-01-02T03:04:05+00:00"
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "Ada Upstream",
    "GIT_AUTHOR_EMAIL": "ada@example.invalid",
    "GIT_AUTHOR_DATE": DATE,
    "GIT_COMMITTER_NAME": "Ada Upstream",
    "GIT_COMMITTER_EMAIL": "ada@example.invalid",
    "GIT_COMMITTER_DATE": DATE,
}

BODY = """Symptom: it breaks.

Cause: a wrong value.

Fix: the right one.

Tested: by hand.

Upstream-Status: Pending
Signed-off-by: Ada Upstream <ada@example.invalid>
"""


@dataclass(frozen=True, slots=True)
class Work:
    """A repository with a working tree."""

    path: Path

    @classmethod
    def init(cls, path: Path) -> Work:
        path.mkdir(parents=True)
        work = cls(path)
        work.git("init", "-q", "-b", "main")
        work.git("config", "core.autocrlf", "false")
        return work

    @property
    def url(self) -> str:
        return self.path.as_uri()

    def git(self, *arguments: str | Path) -> str:
        outer = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        return run(
            tool("git"), *arguments, cwd=self.path, env={**outer, **_ENVIRONMENT}
        ).stdout.strip()

    def show(self, ref: str, path: str) -> bytes:
        """A file's bytes at a commit."""
        return subprocess.run(
            [tool("git"), "show", f"{ref}:{path}"], cwd=self.path, capture_output=True, check=True
        ).stdout

    def write(self, files: Mapping[str, str | bytes | None]) -> None:
        """Write files (None: remove), byte for byte."""
        for name, content in files.items():
            file = self.path / name
            if content is None:
                file.unlink()
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)

    def commit(
        self, files: Mapping[str, str | bytes | None] | None = None, message: str = "change"
    ) -> str:
        self.write(files or {})
        self.git("add", "--all")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def patch(self, output: Path, *options: str, revision: str = "HEAD") -> Path:
        """`git format-patch` of one commit, under a name of our choice."""
        text_file = run(
            tool("git"), "-C", self.path, "format-patch", "-1", "--full-index", "--binary",
            "--no-signature", "--zero-commit", *options, revision, f"--output={output}",
        )  # fmt: skip
        assert text_file.returncode == 0
        return output

    def make_patch(
        self,
        output: Path,
        files: Mapping[str, str | bytes | None],
        *options: str,
        subject: str = "[Test] Change something",
        body: str = BODY,
        keep: bool = True,
    ) -> Path:
        """Commit a change and export it; keep False: forget the commit again."""
        self.commit(files, f"{subject}\n\n{body}")
        self.patch(output, *options)
        if not keep:
            self.git("reset", "-q", "--hard", "HEAD~1")
        return output
