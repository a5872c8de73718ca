"""Read a policy file."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import ValidationError

from sm121.abi.policy.model import Policy
from sm121.errors import PinsFault
from sm121.pins.load import describe

DEFAULT = Path(__file__).with_name("default.toml")


def load_policy(path: Path = DEFAULT) -> Policy:
    """Raises PinsFault with every fault found, each with its dotted path."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PinsFault(f"{path} is no policy file.", cause=str(error)) from error
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        raise PinsFault(
            f"{path} has {error.error_count()} fault(s).",
            details=[describe(fault, Policy) for fault in error.errors()],
            remedy="Correct it; docs/verify-abi.md and policy.schema.json list every key.",
        ) from error
