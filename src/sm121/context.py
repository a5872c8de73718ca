"""What a run was asked to do, and the interface of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sm121.errors import UsageFault
from sm121.files import HashMemory
from sm121.layout import Layout
from sm121.lock.pylock import Target
from sm121.pins.model import ProfilePin, Stack, TargetName
from sm121.ui import Ui

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The user's choices. jobs None: decided by cores and memory. python: of the target, X.Y; None:
    the one that the stack ships for."""

    profile: str = "smoke"
    target: TargetName = "linux-aarch64"
    arch: str | None = None
    jobs: int | None = None
    offline: bool = False
    with_deps: bool = False
    python: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Everything a stage may look at."""

    layout: Layout
    stack_name: str
    stack: Stack
    options: Options
    ui: Ui
    memory: HashMemory

    @property
    def profile(self) -> ProfilePin:
        return self.stack.profiles[self.options.profile]

    @property
    def arch(self) -> str:
        return self.options.arch or self.stack.cuda.arch

    @property
    def key(self) -> str:
        """Folder-safe name of stack and target."""
        return f"{self.stack_name}-{self.options.target}"

    @property
    def runtime(self) -> Target:
        """Platform and CPython: the one that was asked for, else what the stack ships for, which is the
        first one listed."""
        pin = self.stack.targets[self.options.target]
        return Target.make(
            self.options.target, python=self.options.python or pin.pythons[0], glibc=pin.glibc
        )

    def log(self, stage: str) -> Path:
        return self.layout.log / f"{stage}.log"


def validate_options(stack: Stack, options: Options) -> None:
    """Raise UsageFault for a profile, target or arch that this stack does not have."""
    if options.profile not in stack.profiles:
        raise UsageFault(
            f"There is no profile {options.profile!r} in this stack.",
            cause="; ".join(f"{n}: {p.summary}" for n, p in stack.profiles.items()),
            remedy=f"Use --profile {next(iter(stack.profiles))}.",
        )
    if options.target not in stack.targets:
        raise UsageFault(
            f"This stack has no target {options.target!r}.",
            remedy=f"Use one of: {', '.join(stack.targets)}.",
        )
    if options.arch and options.arch not in stack.cuda.accepted_archs:
        bare = options.arch.rstrip("af")
        raise UsageFault(
            f"--arch {options.arch} is not an architecture that this stack can be built for.",
            cause="GB10's FP4 conversions exist only for the architecture-specific target: ptxas "
            'refuses plain sm_121 ("cvt ... .e2m1x2 not supported on .target sm_121")'
            if f"{bare}a" in stack.cuda.accepted_archs and bare == options.arch
            else "stack.toml, cuda.accepted-archs, lists what was tried",
            remedy=f"Use --arch {stack.cuda.arch} (the default).",
        )
    if options.jobs is not None and options.jobs < 1:
        raise UsageFault(f"--jobs {options.jobs}: at least 1 is needed.")


class Stage(Protocol):
    """A function from frozen inputs to a directory."""

    name: str

    def key(self, context: Context) -> str:
        """Under which state.json remembers it: what differs between parallel results."""
        ...

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        """Digests of everything the result depends on, by readable name."""
        ...

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        """Is the output of an earlier run still there and whole?"""
        ...

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        """Make the output; returns facts (JSON) for later stages."""
        ...
