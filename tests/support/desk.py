"""A project whose commands are run through the real command line, in this process."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sm121.__main__ import main
from support.rebasing import Project, lines


@dataclass
class Desk:
    """A project and what its commands say."""

    project: Project
    capsys: pytest.CaptureFixture[str]

    def run(self, *argv: str, code: int | None = 0) -> str:
        """Run a verb; returns what it said to a person. code None: whatever it is."""
        got = main(list(argv))
        out, err = self.capsys.readouterr()
        assert code in (got, None), err
        assert "Traceback" not in err
        return err + out

    def rebase(self, *argv: str, code: int | None = 0) -> str:
        return self.run("rebase", *argv, code=code)

    def lint(self, *argv: str) -> None:
        """`patch --check`: passes all that needs no toolchain, of which a made-up stack has none."""
        self.run("patch", *argv)  # what comes of a remote, while there may be one
        said = self.run("patch", "--check", "--offline", *argv, code=3)
        answers, _, error = said.partition("error:")
        assert "patches: headers, order" in answers
        assert "ok  no style checked" in answers
        assert "cutlass (v4.4.2): git: --offline" in error

    def report(self, *argv: str, code: int = 0) -> dict[str, Any]:
        """The same, as --json."""
        got = main(["rebase", *argv, "--json"])
        out, err = self.capsys.readouterr()
        assert got == code, err
        return json.loads(out)

    def verdicts(self, *argv: str, code: int = 0) -> dict[str, str]:
        """Patch → verdict of --check on one upstream."""
        (row,) = self.report("--check", *argv, code=code)["onto"]
        return {patch["name"]: patch["verdict"] for patch in row["patches"]}


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Desk]:
    project = Project.make(tmp_path, {"a.txt": lines(), "b.txt": lines(), "c.txt": lines()})
    monkeypatch.chdir(project.root)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    yield Desk(project, capsys)
    for number, handler in zip((signal.SIGTERM, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)
