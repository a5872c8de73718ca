"""Read a policy file."""

from __future__ import annotations

from pathlib import Path

from sm121.abi.policy.model import Policy
from sm121.pins.load import read_model

DEFAULT = Path(__file__).with_name("default.toml")


def load_policy(path: Path = DEFAULT) -> Policy:
    """Raises PinsFault with every fault found, each with its dotted path."""
    return read_model(
        path, Policy,
        remedy="Correct it; docs/verify-abi.md and policy.schema.json list every key.",
    )  # fmt: skip
