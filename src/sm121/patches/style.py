"""Does every patch pass upstream's own ruff: its release, its settings, check and format?"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sm121 import proc
from sm121.errors import NetworkFault, PatchFailed
from sm121.gitrepo import Repository
from sm121.index import uv_binary
from sm121.patches.apply import AppliedSeries
from sm121.source.stage import EMPTY_TREE

# Of a pre-commit configuration, the release of the hook that upstream's CI runs.
_RUFF = re.compile(r"repo: https://github\.com/astral-sh/ruff-pre-commit\s+rev: v?([0-9.]+)")
_SETTINGS = "pyproject.toml"


def ruff_release(configuration: str) -> str:
    """The ruff that upstream's .pre-commit-config.yaml asks for, '' if it asks for none."""
    match = _RUFF.search(configuration)
    return match[1] if match else ""


def check_style(repository: Repository, applied: AppliedSeries, *, offline: bool, log: Path) -> str:
    """Run ruff over each Python file as each patch leaves it; returns what was checked.

    Raises PatchFailed with ruff's own lines, NetworkFault if that ruff is neither in uv's cache
    nor to be fetched.
    """
    release = ruff_release(repository.read(applied.base, ".pre-commit-config.yaml") or "")
    if not release:
        return "no style checked: upstream's .pre-commit-config.yaml names no ruff"
    uv: list[str | Path] = [uv_binary(), "tool", "run", *(["--offline"] if offline else [])]
    ruff: list[str | Path] = [*uv, "--from", f"ruff=={release}", "ruff"]
    if proc.run([*ruff, "--version"], log=log, check=False).returncode != 0:
        raise NetworkFault(
            f"ruff {release}, which upstream checks its style with, could not be had.",
            cause=f"uv's own words are in {log}",
            remedy="Run the same command again with the package index in reach.",
        )
    # isort tells upstream's own packages from others by the folders of a whole checkout.
    tree = repository.changed_paths(EMPTY_TREE, applied.base)
    own = sorted({path.split("/")[0] for path in tree if path.endswith(".py") and "/" in path})
    check = ["check", "--quiet", "--output-format=concise", "--config"]
    check.append(f"lint.isort.known-first-party={own}")
    with tempfile.TemporaryDirectory() as scratch:
        checked = _write_out(repository, applied, Path(scratch))
        faults: list[str] = []
        for arguments in (check, ["format", "--check"]):
            done = proc.run([*ruff, *arguments, "--no-cache", "."], cwd=Path(scratch), check=False)
            if done.returncode != 0:
                faults += _lines(done.output.splitlines())
    if faults:
        raise PatchFailed(
            f"The series does not pass upstream's ruff {release}.",
            details=faults,
            remedy="Each line starts with the patch's name; its settings are in upstream's "
            f"{_SETTINGS}.",
        )
    return f"{checked} Python files pass upstream's ruff {release}, check and format"


def _write_out(repository: Repository, applied: AppliedSeries, folder: Path) -> int:
    """A folder for each patch, with the Python files it touches and upstream's settings."""
    parent, checked = applied.base, 0
    for patch in applied.patches:
        if patch.status != "applied":
            continue
        root = folder / patch.name
        root.mkdir()
        (root / _SETTINGS).write_text(
            repository.read(patch.commit, _SETTINGS) or "", errors="surrogateescape"
        )
        for path in repository.changed_paths(parent, patch.commit):
            text = repository.read(patch.commit, path)
            if path.endswith((".py", ".pyi")) and text is not None:
                checked += 1
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text, errors="surrogateescape")
        parent = patch.commit
    return checked


def _lines(output: Sequence[str]) -> list[str]:
    return [line for line in output if ".py" in line][:40]
