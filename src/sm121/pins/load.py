"""Read stack.toml; turn every fault into one message with the dotted path of the key."""

from __future__ import annotations

import difflib
import tomllib
import typing
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sm121.errors import PinsFault
from sm121.pins.model import Stack

ModelType = TypeVar("ModelType", bound=BaseModel)
_STACK_REMEDY = "Correct stack.toml; docs/pins.md lists every key."


def stack_names(pins: Path) -> list[str]:
    """The stacks there are: folders of pins/ that hold a stack.toml."""
    return sorted(p.parent.name for p in pins.glob("*/stack.toml"))


def default_stack(pins: Path) -> str:
    """The name in pins/default. Raises PinsFault if the file is missing or empty."""
    try:
        name = (pins / "default").read_text().strip()
    except OSError as error:
        raise PinsFault(f"{pins / 'default'} cannot be read.", cause=str(error)) from error
    if not name:
        raise PinsFault(
            f"{pins / 'default'} is empty.",
            remedy=f"Write one of these into it: {', '.join(stack_names(pins))}",
        )
    return name


def load_stack(pins: Path, name: str) -> Stack:
    """Read and validate pins/<name>/stack.toml.

    Raises PinsFault with all faults found: unknown keys with the nearest known one, wrong
    values with the dotted path and what was expected.
    """
    path = pins / name / "stack.toml"
    if not path.is_file():
        known = stack_names(pins)
        near = difflib.get_close_matches(name, known, n=1)
        raise PinsFault(
            f"There is no stack {name!r}.",
            cause=f"{path} does not exist; there are: {', '.join(known) or 'none'}.",
            remedy=f"Did you mean `--stack {near[0]}`?" if near else "",
        )
    return read_model(path, Stack, remedy=_STACK_REMEDY)


def parse_stack(text: str, path: Path) -> Stack:
    """Validate the text of a stack.toml; path is only named in messages. Raises PinsFault."""
    return parse_model(text, path, Stack, remedy=_STACK_REMEDY)


def read_model(path: Path, model: type[ModelType], *, remedy: str) -> ModelType:
    """Read one TOML file as a model: the one way in for stacks, rules and policies.

    Raises PinsFault if it can't be read, is not TOML, or has faults (all of them, each with
    its dotted path).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PinsFault(f"{path} cannot be read.", cause=str(error)) from error
    except UnicodeDecodeError as error:
        raise PinsFault(f"{path} is not TOML.", cause=str(error)) from error
    return parse_model(text, path, model, remedy=remedy)


def parse_model(text: str, path: Path, model: type[ModelType], *, remedy: str) -> ModelType:
    """The same from text; path is only named in messages."""
    try:
        return model.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PinsFault(f"{path} is not TOML.", cause=str(error)) from error
    except ValidationError as error:
        raise PinsFault(
            f"{path} has {error.error_count()} fault(s).",
            details=[describe(fault, model) for fault in error.errors()],
            remedy=remedy,
        ) from error


def describe(fault: ErrorDetails, model: type[BaseModel]) -> str:
    """One line for one validation fault: dotted path, what is wrong, a suggestion."""
    location = [str(part) for part in fault["loc"]]
    dotted = ".".join(location) or "(whole file)"
    if fault["type"] == "extra_forbidden":
        known = known_keys(model, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(known)}"
        return f"{dotted}: unknown key{hint}"
    if fault["type"] == "missing":
        return f"{dotted}: missing"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{dotted}: {message}" + (
        f" (found {fault['input']!r})" if isinstance(fault["input"], str | int | float) else ""
    )


def known_keys(model: type[BaseModel], location: list[str]) -> list[str]:
    """Keys that `model` knows at a dotted location, walking through nested models and dicts."""
    current: object = model
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            fields = {f.alias or n: f.annotation for n, f in current.model_fields.items()}
            current = fields.get(part)
        elif typing.get_origin(current) is dict:
            current = typing.get_args(current)[1]
        elif typing.get_origin(current) is tuple:
            current = typing.get_args(current)[0]
    if isinstance(current, type) and issubclass(current, BaseModel):
        return sorted(f.alias or n for n, f in current.model_fields.items())
    return []
