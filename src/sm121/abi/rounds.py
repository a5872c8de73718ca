"""Import every module: first as it stands; then, in a process of its own, what failed for a reason
that is known.

What policy says is opened before a module is opened only for one that lacks a symbol. A module that
needs what is not here by right (the GPU's driver, or what policy says by `imports`) is no fault and
no pass: it is 'not run', but its file is opened, so that a symbol it lacks is seen all the same. So is
a file that Python does not take, since another one of that module's name comes before it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from sm121.abi.context import matches
from sm121.abi.dynamic import DIED, Python, run_imports
from sm121.abi.modules import Extension
from sm121.abi.policy.model import Policy
from sm121.abi.report import Driver, ImportRow
from sm121.abi.system import LIBCUDA

_OPEN = "undefined symbol"
# glibc's words for a library that is nowhere (elf/dl-load.c, open_path and _dl_map_object).
_ABSENT = re.compile(r"(\S+): cannot open shared object file")
Rows = dict[str, ImportRow]
Opens = Sequence[tuple[str, bool]]
Load = Callable[[Sequence[Extension], Opens], Rows]


def import_all(
    python: Python, site: Path, modules: Sequence[Extension], policy: Policy, *, driver: Driver,
    emulated: bool = False, first: Sequence[str] = (), operators: Sequence[str] = (),
    bare: Sequence[tuple[str, str]] = (),
) -> Rows:  # fmt: skip
    """A row for each module and operator. driver: which libcuda there is."""

    def load(
        these: Sequence[Extension], opens: Opens = (), *, operators: Sequence[str] = ()
    ) -> Rows:
        def once(those: Sequence[Extension]) -> Rows:
            return run_imports(
                python, site, those, first=first, bare=bare, opens=opens, operators=operators
            )

        return _again(once, these, operators) if emulated else once(these)

    def only_open(these: Sequence[Extension], opens: Opens = ()) -> Rows:
        def once(those: Sequence[Extension]) -> Rows:
            return run_imports(python, site, files=those, first=first, opens=opens)

        return _again(once, these) if emulated else once(these)

    taken = [one for one in modules if not one.behind]
    rows = load(taken, operators=operators)
    rows |= _preloaded(rows, taken, policy, site, load)
    rows |= {one.label: _behind(one) for one in modules if one.behind}
    excuses = {one: _excuse(rows[one.label], one, policy, driver) for one in modules}
    excused = [one for one, why in excuses.items() if why]
    opened = only_open(excused) if excused else {}
    opened |= _preloaded(opened, excused, policy, site, only_open)
    libraries = driver_libraries(policy, driver)
    rows |= {
        one.label: _excused(rows[one.label], opened[one.label], excuses[one], libraries)
        for one in excused
    }
    return rows


def driver_libraries(policy: Policy, driver: Driver) -> frozenset[str]:
    """Names of the libraries that come with the GPU's driver and may not be here. libcuda is, where
    there is a driver or its stub."""
    cuda = {LIBCUDA} if driver == "none" else set()
    return frozenset({*cuda, *(one.name for one in policy.system if one.driver)})


def _again(
    once: Callable[[Sequence[Extension]], Rows], these: Sequence[Extension],
    operators: Sequence[str] = (),
) -> Rows:  # fmt: skip
    """qemu-user crashes now and then by itself; a fault of the module's own does it again.

    What passed once passes. Of what is not asked for but comes before (torch, a library that is
    opened) only the last word counts: it is at fault if it fails again. An operator needs all that
    was imported before it in one process, so where there are any, everything is done again.
    """
    rows = once(these)
    died = [name for name, row in rows.items() if row.result == "fail" and DIED in row.text]
    if not died:
        return rows
    again = once(these if operators else [one for one in these if one.label in died])
    asked = {one.label for one in these} | {f"torch.ops.{name}" for name in operators}
    return {
        name: rows[name] if name not in again or rows[name].result == "pass" else again[name]
        for name in rows if name in asked
    } | {name: row for name, row in again.items() if name not in asked}  # fmt: skip


def _preloaded(
    rows: Rows, modules: Sequence[Extension], policy: Policy, site: Path, load: Load
) -> Rows:
    """New rows of those that lack a symbol, where policy says what their package opens before. A
    library that can't be opened is told of with the modules that wait for it: it has no row."""
    out: Rows = {}
    for rule in policy.preload:
        now = rows | out
        waiting = [
            one for one in modules
            if now[one.label].result == "fail" and _OPEN in now[one.label].text
            and matches(one.file, rule.for_files)
        ]  # fmt: skip
        if not waiting:
            continue
        opens = [(path, rule.scope == "global") for path in _found(site, rule.opens)]
        loaded = load(waiting, opens)
        shut = [
            f"{path} can't be opened: {loaded[path].text}" for path, _ in opens if path in loaded
        ]
        opened = ", ".join(path for path, _ in opens if path not in loaded)
        with_them = f"with {opened or 'nothing of what policy names'} opened before: {rule.why}"
        for name in (one.label for one in waiting):
            told = [part for part in (loaded[name].text, *shut, with_them) if part]
            out[name] = dataclasses.replace(loaded[name], text="; ".join(told))
    return out


def _behind(one: Extension) -> ImportRow:
    """The row of a file that Python does not import, before it is excused for that."""
    return ImportRow(module=one.label, result="fail", text="was not imported")


def _found(site: Path, globs: Sequence[str]) -> list[str]:
    paths = (path.relative_to(site).as_posix() for path in site.rglob("*.so*"))
    return sorted(path for path in paths if matches(path, globs))


def _excuse(row: ImportRow, one: Extension, policy: Policy, driver: Driver) -> str:
    """Why a failed import is not the module's fault, '' if that is not known."""
    if row.result != "fail":
        return ""
    if one.behind:
        return f"Python takes {one.behind} for {one.name}"
    if library := _lacks(row, driver_libraries(policy, driver)):
        # A machine may have the driver and not this part of it (a container without `video`).
        place = "which this machine's lacks" if driver == "real" else "which is not here"
        stub = ", nor a stub for it (`nox -s build` makes one)" if library == LIBCUDA else ""
        return f"needs {library} of the GPU's driver, {place}{stub}"
    for rule in policy.imports:
        if matches(one.file, rule.files) and any(said in row.text for said in rule.error):
            return rule.why
    return ""


def _lacks(row: ImportRow, libraries: frozenset[str]) -> str:
    """The driver's library that was not found, '' if that is not what is wrong."""
    return next((name for name in _ABSENT.findall(row.text) if name in libraries), "")


def _excused(row: ImportRow, opened: ImportRow, why: str, libraries: frozenset[str]) -> ImportRow:
    """Not run, if its file can be opened, or lacks what is the driver's; else it is at fault."""
    if opened.result == "pass":
        text = f"{why}; its file was opened, and every symbol found"
        return dataclasses.replace(row, result="not run", text=text)
    if _lacks(opened, libraries):
        return dataclasses.replace(row, result="not run", text=f"{why}; nor can its file be opened")
    return dataclasses.replace(row, text=f"its file can't be opened: {opened.text} ({why})")
