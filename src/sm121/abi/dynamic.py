"""The dynamic part: the target's Python imports every extension, from the wheelhouse alone.

The environment is made by unpacking wheels into an empty folder, so no interpreter is needed
to make it and nothing of this machine is in it. Python runs isolated (`-I`: no PYTHON*
variables, no user site, no current directory on the path), in an empty working directory, so
that a stale `~/vllm` cannot be imported instead. Where there is no GPU, `libraries` has a
driver stub.

A crash ends only the module that caused it: results are read line by line, and the rest is
run in another process.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.abi.archive import Archive
from sm121.abi.context import Context, finding
from sm121.abi.report import Finding, NotRun
from sm121.abi.scan import installed_path
from sm121.abi.symbols import is_extension_binary

_SUFFIX = re.compile(r"\.(?:abi3|cpython-[\w-]+)?\.?so$")
_MARK = "sm121-import "
DIED = "the interpreter died"
_SCRIPT = r"""
import importlib, json, sys
site, first, modules, operators, bare = json.loads(sys.argv[1])
sys.path.insert(0, site)
for name in bare:
    package = sys.modules[name] = type(sys)(name)
    package.__path__ = [site + "/" + name.replace(".", "/")]
def say(name, problem):
    print("sm121-import " + json.dumps([name, problem]), flush=True)
for name in first:
    print("sm121-import " + json.dumps([name, None]), flush=True)
    try:
        importlib.import_module(name)
        say(name, "")
    except BaseException as error:
        say(name, f"{type(error).__name__}: {error}")
for name in modules:
    print("sm121-import " + json.dumps([name, None]), flush=True)
    try:
        module = importlib.import_module(name)
        where = getattr(module, "__file__", None) or ""
        say(name, "" if where.startswith(site) else f"came from {where or 'nowhere'}, not from the wheelhouse")
    except BaseException as error:
        say(name, f"{type(error).__name__}: {error}")
for name in operators:
    print("sm121-import " + json.dumps(["torch.ops." + name, None]), flush=True)
    try:
        import torch
        space, _, op = name.partition(".")
        getattr(getattr(torch.ops, space), op)
        say("torch.ops." + name, "")
    except BaseException as error:
        say("torch.ops." + name, f"{type(error).__name__}: {error}")
"""


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


def extension_modules(context: Context) -> list[str]:
    """Dotted names of the judged extension modules that the target's Python would load."""
    names = []
    for wheel in context.subjects:
        for binary in wheel.binaries:
            if is_extension_binary(binary) and context.for_interpreter(binary):
                names.append(_SUFFIX.sub("", binary.path).replace("/", "."))
    return sorted(names)


def run_imports(
    python: Python, site: Path, modules: Sequence[str], *, first: Sequence[str] = (),
    operators: Sequence[str] = (), bare: Sequence[str] = (),
) -> dict[str, str]:  # fmt: skip
    """Module (or 'torch.ops.NAME') → '' if good, else what went wrong.

    first: imported before all others (torch). bare: packages whose own __init__ is not run,
    since what it imports is not in the set.
    """
    results: dict[str, str] = {}
    left = list(modules)
    pending = list(operators)
    with tempfile.TemporaryDirectory(prefix="sm121-empty-") as empty:
        while left or pending:
            request = json.dumps([str(site), list(first), left, pending, list(bare)])
            finished = proc.run(
                [*python.command, "-I", "-c", _SCRIPT, request],
                cwd=Path(empty), env=dict(python.environment), check=False,
            )  # fmt: skip
            current = ""
            before = len(results)
            for line in finished.output.splitlines():
                if not line.startswith(_MARK):
                    continue
                name, problem = json.loads(line.removeprefix(_MARK))
                if problem is None:
                    current = name
                elif problem or name == current:
                    results[name], current = problem, ""
            if current:
                results[current] = f"{DIED} (exit status {finished.returncode})"
            if len(results) == before:
                last = (finished.output.splitlines() or ["no output"])[-1]
                results.update(dict.fromkeys(left, f"the interpreter did not start: {last}"))
                break
            left = [m for m in left if m not in results]
            pending = [o for o in pending if f"torch.ops.{o}" not in results]
    return results


def check_imports(
    context: Context, results: Mapping[str, str]
) -> tuple[list[Finding], list[NotRun]]:
    """Findings for failed imports; what was not run is said."""
    out: list[Finding] = []
    not_run: list[NotRun] = []
    owners = {
        _SUFFIX.sub("", b.path).replace("/", "."): (w, b.path)
        for w in context.subjects
        for b in w.binaries
    }
    for name, problem in results.items():
        wheel, path = owners.get(name, (None, ""))
        if problem:
            out.append(finding("import", wheel, path, f"{name}: {problem}", names=[name]))
    for name in extension_modules(context):
        if name not in results:
            not_run.append(NotRun(check=f"import {name}", reason="it was not asked for"))
    return out, not_run


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
