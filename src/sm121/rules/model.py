"""The types of pins/rules.toml, and reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, Field

from sm121.pins.load import read_model
from sm121.pins.model import Model
from sm121.pins.texts import Distribution

FILE = "rules.toml"


def _specifier(value: str) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier as error:
        raise ValueError(f"{value!r} is not a version specifier (PEP 440)") from error
    return value


Specifier = Annotated[str, AfterValidator(_specifier)]
# A distribution name, or a pattern of fnmatch(3) over them.
Pattern = Annotated[str, Field(pattern=r"^[a-z0-9*][a-z0-9*-]*$")]


class RuleBase(Model):
    """reason: why the rule. symptom: what who breaks it sees. source: where that is from.

    serving_only: does not matter on a build host, which only compiles and links.
    """

    reason: str
    symptom: str
    source: str
    serving_only: bool = False


class EqualRule(RuleBase):
    """All members that are present have one version."""

    kind: Literal["equal"]
    members: tuple[Pattern, ...]
    compare: Literal["exact", "public"] = "exact"


class ExtraRule(RuleBase):
    """Where the distribution is, what its extra brings must be too."""

    kind: Literal["extra"]
    distribution: Distribution
    extra: str
    brings: Distribution


class OneMinorRule(RuleBase):
    """All members agree in major.minor; the anchor's decides, if it is present."""

    kind: Literal["one-minor"]
    members: tuple[Pattern, ...]
    anchor: Distribution


class KnownBadRule(RuleBase):
    """These versions are bad: always, only beside others, or only on one machine.

    symbol: the (mangled) symbol whose absence is the fault, for verify-abi to name.
    """

    kind: Literal["known-bad"]
    distribution: Distribution
    versions: Specifier
    beside: dict[Distribution, Specifier] = Field(default_factory=dict)
    machine: Literal["", "aarch64", "x86_64"] = ""
    symbol: str = ""


class PairRule(RuleBase):
    """When all of `when` hold, each of `wants` that is present must hold."""

    kind: Literal["pair"]
    when: dict[Distribution, Specifier]
    wants: dict[Distribution, Specifier]


class NoBuildRule(RuleBase):
    """No member may be one of these builds (the local part of its own __version__)."""

    kind: Literal["no-build"]
    members: tuple[Pattern, ...]
    builds: tuple[str, ...]


class OneOwnerRule(RuleBase):
    """No path is owned by two members with different content."""

    kind: Literal["one-owner"]


class OneVersionRule(RuleBase):
    """Each distribution is there once."""

    kind: Literal["one-version"]


Rule = (
    EqualRule | ExtraRule | OneMinorRule | KnownBadRule | PairRule | NoBuildRule | OneOwnerRule
    | OneVersionRule
)  # fmt: skip


class Rules(Model):
    """pins/rules.toml."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    rules: dict[str, Annotated[Rule, Field(discriminator="kind")]]


def load_rules(pins: Path) -> Rules:
    """Read and validate pins/rules.toml. Raises PinsFault with every fault and its place."""
    return read_model(pins / FILE, Rules, remedy="docs/lock.md describes the kinds of rules.")
