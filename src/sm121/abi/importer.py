"""What the target's own Python does in the dynamic part: import extension modules, one after
another, each as its package does it.

    python -I -c TEXT-OF-THIS-FILE REQUEST

Standard library only; it does not import sm121. REQUEST is a JSON object:

site      the site-packages, which comes first on the path, with what its .pth files name
first     modules that are imported before all others (torch)
opens     [[library, global]]: files that are opened before the modules, visible to all that is
          loaded after them, or by their SONAME only
bare      [[name, folder]]: packages whose own __init__ is not run
modules   [[name, file, inits]]: see modules.Extension
files     [[label, file]]: opened by the loader, with every symbol looked up, and not imported
operators names in torch.ops

Prints lines of MARK and [name, 'begin' | 'pass' | 'fail', text]; a crash leaves a 'begin' alone. They
go where standard output went at the start: a module may close it, or put another into its place.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import site as site_module
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

MARK = "sm121-import "
_OUT = os.dup(1) if __name__ == "__main__" else 1


def say(name: str, state: str, text: str = "") -> None:
    # What a module has printed stands before its verdict, which is on a line of its own.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    line = f"\n{MARK}{json.dumps([name, state, text])}\n".encode()
    while line:
        line = line[os.write(_OUT, line) :]


def attempt(name: str, do: Callable[[], str]) -> None:
    """Say what came of it. do: returns what there is to say of a success."""
    say(name, "begin")
    try:
        say(name, "pass", do())
    except BaseException as error:
        say(name, "fail", f"{type(error).__name__}: {error}")


def enter(site: str) -> None:
    """Put a site-packages in front of the path, and what its .pth files name behind it."""
    before = list(sys.path)
    site_module.addsitedir(site, known_paths=set())
    added = sys.path[len(before) :]
    sys.path[:] = added + [entry for entry in before if entry not in added]


def same(module: Any, path: str) -> bool:
    """Is that a module object which was made of that file? Its name is compared first: looking up
    every file of a package takes long where it is emulated."""
    if not isinstance(module, ModuleType):
        return False
    file = module.__dict__.get("__file__")
    if not isinstance(file, str) or file.rpartition("/")[2] != path.rpartition("/")[2]:
        return False
    return str(Path(file).resolve()) == path


def held(name: str, path: str) -> str:
    """Where a package keeps the module that it made of a file, if not under its own name; '' if
    nowhere. A module object of that file is there only if its init was run and succeeded."""
    if same(sys.modules.get(name), path):
        return ""
    package = name.partition(".")[0]
    for place, module in list(sys.modules.items()):
        if place != package and not place.startswith(package + "."):
            continue
        if same(module, path):
            return place
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if same(value, path):
                return f"{place}.{key}"
    return ""


def load(name: str, path: str, inits: list[str]) -> str:
    """Import one extension module. Raises whatever its package or itself does."""
    parent = name.rpartition(".")[0]
    if parent:
        importlib.import_module(parent)
        if where := held(name, path):
            return f"loaded by its package, as {where}"
    if not inits:
        module = importlib.import_module(name)
        if not same(module, path):
            place = getattr(module, "__file__", None) or "nowhere"
            raise ImportError(f"came from {place}, not from {path} of the wheelhouse")
        return ""
    for init in inits:
        spec = importlib.util.spec_from_file_location(init, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"nothing loads {path}")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return f"its init is for the name {', '.join(inits)}: loaded by file"


def open_library(path: str, *, everywhere: bool = False) -> str:
    ctypes.CDLL(path, mode=os.RTLD_NOW | (os.RTLD_GLOBAL if everywhere else os.RTLD_LOCAL))
    return ""


def operator(name: str) -> str:
    space, _, rest = name.partition(".")
    getattr(getattr(importlib.import_module("torch").ops, space), rest)
    return ""


def imported(name: str) -> str:
    importlib.import_module(name)
    return ""


def main(request: dict[str, Any]) -> None:
    site = Path(request["site"])

    def at(file: str) -> str:
        return str((site / file).resolve())

    enter(str(site))
    for name, folder in request["bare"]:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(site / folder)]
    for name in request["first"]:
        attempt(name, lambda: imported(name))  # noqa: B023 - called at once
    for file, everywhere in request["opens"]:
        attempt(file, lambda: open_library(at(file), everywhere=everywhere))  # noqa: B023
    for name, file, inits in request["modules"]:
        attempt(name, lambda: load(name, at(file), inits))  # noqa: B023
    for name, file in request["files"]:
        attempt(name, lambda: open_library(at(file)))  # noqa: B023
    for name in request["operators"]:
        attempt("torch.ops." + name, lambda: operator(name))  # noqa: B023


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
