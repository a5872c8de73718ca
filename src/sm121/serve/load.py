"""Read serve.toml, of a stack in pins/ or of a wheelhouse."""

from __future__ import annotations

from pathlib import Path

from sm121.errors import PinsFault
from sm121.pins.load import read_model, stack_names
from sm121.serve.model import Serve

FILE = "serve.toml"
# They stand beside install.py in a wheelhouse, by these names.
SCRIPTS = tuple(sorted(Path(__file__).with_name("node").glob("serve_*.py")))
_REMEDY = "Correct serve.toml; docs/serve.md lists every key."


def serve_file(pins: Path, stack: str) -> Path | None:
    """The stack's serve.toml; None if it has none."""
    path = pins / stack / FILE
    return path if path.is_file() else None


def carried(pins: Path, stack: str) -> tuple[Path, ...]:
    """Files that a wheelhouse carries, so that it can be served: serve.toml and the scripts that
    run on a node. None, if the stack has no serve.toml. Raises PinsFault for one with faults."""
    path = serve_file(pins, stack)
    if path is None:
        return ()
    load_serve(pins, stack)
    return (path, *SCRIPTS)


def load_serve(pins: Path, stack: str) -> Serve:
    """Read pins/<stack>/serve.toml.

    Raises PinsFault: there is none, or it has faults (each with its dotted path).
    """
    path = serve_file(pins, stack)
    if path is None:
        have = [name for name in stack_names(pins) if serve_file(pins, name)]
        raise PinsFault(
            f"Stack {stack!r} has no {FILE}: how to serve it is not known.",
            cause=f"stacks that have one: {', '.join(have) or 'none'}",
        )
    return read_model(path, Serve, remedy=_REMEDY)


def load_carried(wheelhouse: Path) -> Serve:
    """Read the serve.toml that a wheelhouse carries. Raises PinsFault."""
    return read_model(wheelhouse / FILE, Serve, remedy="Build the wheelhouse anew: `nox -s build`.")
