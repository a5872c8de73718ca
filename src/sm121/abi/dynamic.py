"""The dynamic part: the target's Python imports every extension, from the wheelhouse alone.

What it does there is importer.py.

The environment is made by unpacking wheels into an empty folder, so no interpreter is needed
to make it and nothing of this machine is in it. Python runs isolated (`-I`: no PYTHON*
variables, no user site, no current directory on the path), in an empty working directory, so
that a stale `~/vllm` cannot be imported instead. Where there is no GPU, `libraries` has a
driver stub.

A crash ends only the module that caused it: results are read line by line (told.py), and the rest
is run in another process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.abi import importer
from sm121.abi.archive import Archive
from sm121.abi.modules import Extension
from sm121.abi.report import ImportRow
from sm121.abi.scan import installed_path
from sm121.abi.told import read_told

_SCRIPT = Path(importer.__file__)
DIED = "the interpreter died"


@dataclass(frozen=True, kw_only=True, slots=True)
class Python:
    """A Python that runs the target's code. command: argv, an emulator's in front if needed.

    environment: whole, as nothing is inherited.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]


def unpack_site(wheels: Sequence[Path], site: Path) -> None:
    """Unpack wheels into a folder as an installer would. Raises Malformed for a bad one."""
    for path in wheels:
        archive = Archive(path)
        try:
            for member in archive.members:
                out = site / installed_path(member.name)
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("wb") as file:
                    for chunk in archive.chunks(member):
                        file.write(chunk)
        finally:
            archive.close()


def run_imports(
    python: Python, site: Path, modules: Sequence[Extension] = (), *, first: Sequence[str] = (),
    operators: Sequence[str] = (), bare: Sequence[tuple[str, str]] = (),
    opens: Sequence[tuple[str, bool]] = (), files: Sequence[Extension] = (),
) -> dict[str, ImportRow]:  # fmt: skip
    """Label of a module (or 'torch.ops.NAME', or what failed of `opens` and `first`) → its row.

    first: imported before all others (torch). bare: packages, with their folders, whose own
    __init__ is not run, since what it imports is not in the set. opens: libraries that are opened
    before, globally or not. files: only opened by the loader, and not imported.
    """
    results: dict[str, ImportRow] = {}
    left = {one.name: one for one in modules}
    shut = {one.label: one for one in files}
    pending = {f"torch.ops.{name}": name for name in operators}
    asked = {*left, *shut, *pending}
    with tempfile.TemporaryDirectory(prefix="sm121-empty-") as empty:
        while left or shut or pending:
            request = {
                "site": str(site), "first": list(first), "bare": list(bare), "opens": list(opens),
                "modules": [[one.name, one.file, one.inits] for one in left.values()],
                "files": [[one.label, one.file] for one in shut.values()],
                "operators": list(pending.values()),
            }  # fmt: skip
            finished = proc.run(
                [*python.command, "-I", "-c", _SCRIPT.read_text("utf-8"), json.dumps(request)],
                cwd=Path(empty), env=dict(python.environment), check=False,
            )  # fmt: skip
            told, current = read_told(finished.output)
            before = len(results)
            for name, (result, text) in told.items():
                if result == "fail" or name in asked:
                    results[name] = ImportRow(module=name, result=result, text=text)
            if current:
                text = f"{DIED} (exit status {finished.returncode})"
                results[current] = ImportRow(module=current, result="fail", text=text)
            if len(results) == before or (current and current not in asked):
                last = (finished.output.splitlines() or ["no output"])[-1]
                why = f"{current} {DIED}" if current else f"the interpreter did not start: {last}"
                for name in (*left, *shut, *pending):
                    if name not in results:
                        results[name] = ImportRow(module=name, result="fail", text=why)
                break
            for known in (left, shut, pending):
                for name in results.keys() & known.keys():
                    del known[name]
    return results


def clean_environment(
    libraries: Sequence[Path] = (), base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that a program needs to start, and nothing of the user's.

    libraries: folders for LD_LIBRARY_PATH (the driver stub's). base: instead of this machine's.
    """
    here = {k: os.environ[k] for k in ("PATH", "LANG", "TMPDIR") if k in os.environ}
    kept = dict(base) if base is not None else here
    if libraries:
        kept["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    # PyTorch asks for a home directory for its caches; an empty one is as clean as none.
    return kept | {"HOME": "/nonexistent"}
