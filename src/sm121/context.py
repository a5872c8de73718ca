"""What a run was asked to do, and the interface of a stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sm121.errors import UsageFault
from sm121.files import HashMemory
from sm121.layout import Layout
from sm121.lock.pylock import Target
from sm121.pins.model import JitModule, ProfilePin, Stack
from sm121.pins.texts import TargetName
from sm121.ui import Ui

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The user's choices. jobs None: decided by cores and memory.

    jit_cache: FlashInfer's modules ahead of time; 'none', 'listed' (those of the pins), 'all' (what
    the pins leave out too); None: as the profile says. without, require: names of the profile's
    optional parts, to be left out and to be built whatever it takes. clones: git repositories on
    this machine that may provide sources. python: of the target, X.Y; None: the one that the
    stack ships for.
    """

    profile: str = "smoke"
    target: TargetName = "linux-aarch64"
    arch: str | None = None
    jobs: int | None = None
    offline: bool = False
    with_deps: bool = False
    jit_cache: str | None = None
    without: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    clones: tuple[Path, ...] = ()
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
        """The profile, less what the user wants to do without."""
        whole = self.stack.profiles[self.options.profile]
        return reduced(self.stack, whole, self.options.without)

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

    @property
    def jit_modules(self) -> dict[str, JitModule]:
        """FlashInfer's modules that are compiled ahead of time in this build; may be none."""
        pin = self.stack.jit_cache
        wanted = self.options.jit_cache or ("listed" if self.profile.jit_cache else "none")
        if pin is None or wanted == "none":
            return {}
        return pin.modules | (pin.left_out if wanted == "all" else {})

    def log(self, stage: str) -> Path:
        return self.layout.log / f"{stage}.log"


def reduced(stack: Stack, whole: ProfilePin, without: Collection[str]) -> ProfilePin:
    """A profile without some of its optional parts, and without the sources that only they need."""
    gone = {name for group in without for name in whole.optional[group].components}
    if not gone:
        return whole
    components = tuple(name for name in whole.components if name not in gone)
    sources = tuple(
        name
        for name in whole.sources
        if not (needed_by := stack.sources[name].components)
        or any(component in components for component in needed_by)
    )
    return whole.model_copy(update={"components": components, "sources": sources})


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
    if options.jit_cache not in (None, "none") and stack.jit_cache is None:
        raise UsageFault(
            f"--jit-cache {options.jit_cache}: this stack lists no FlashInfer modules.",
            cause="its stack.toml has no [jit-cache]",
            remedy="Leave --jit-cache out.",
        )
    optional = stack.profiles[options.profile].optional
    for option, groups in (("--without", options.without), ("--require", options.require)):
        for group in groups:
            if group not in optional:
                raise UsageFault(
                    f"{option} {group}: profile {options.profile} has no optional part of that name.",
                    cause="; ".join(f"{n}: {pin.reason}" for n, pin in optional.items())
                    or "all of it is always built",
                    remedy=f"Use one of: {', '.join(optional)}."
                    if optional
                    else f"Leave {option} out.",
                )
    if both := sorted(set(options.without) & set(options.require)):
        raise UsageFault(f"--without and --require both name {', '.join(both)}.")
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


@runtime_checkable
class Guarded(Protocol):
    """A stage that can say beforehand what would stop it."""

    def guard(self, context: Context) -> None:
        """Raise that; asked before the first stage runs."""
        ...
