"""Figures of builds elsewhere (reference.toml)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm121.pins.load import read_model
from sm121.pins.model import Model

FILE = Path(__file__).with_name("reference.toml")
Figure = Annotated[float, Field(ge=0)]


class Profile(Model):
    """See reference.toml."""

    task_minutes: Figure
    longest_minutes: Figure
    other_minutes: Figure
    download_gb: Figure
    build_gb: Figure
    source: str

    def seconds(self, jobs: int) -> float:
        """Wall time of a build from a full cache: no less than the longest object's."""
        return 60 * (self.other_minutes + max(self.longest_minutes, self.task_minutes / jobs))


class References(Model):
    schema_: Annotated[Literal[1], Field(alias="schema")]
    jit_cache_minutes: Figure
    profiles: dict[str, Profile]


def load_references() -> References:
    return read_model(FILE, References, remedy="Correct it: it is part of sm121.")


def reference_of(profile: str) -> Profile:
    """A profile's figures; those of the largest known for one that was never measured."""
    known = load_references().profiles
    return known.get(profile) or max(known.values(), key=lambda one: one.build_gb)
