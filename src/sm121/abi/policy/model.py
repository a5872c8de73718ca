"""The types of a policy file. Published as `policy.schema.json`; tested to be equal.

Globs are fnmatch patterns on paths relative to site-packages; `*` also crosses slashes.
Every exception carries its reason, and the report prints it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm121.pins.model import Model
from sm121.pins.texts import Arch, Distribution, PythonText, TargetName
from sm121.published import schema_text_of

SCHEMA_FILE = Path(__file__).with_name("policy.schema.json")

Glob = Annotated[str, Field(min_length=1)]
Why = Annotated[str, Field(min_length=10)]
Dotted = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)*$")]


class TargetPolicy(Model):
    """What a target's system has. floors: prefix of a symbol version → newest there is."""

    floors: dict[str, Dotted]
    python: PythonText
    why: Why


class SystemLibrary(Model):
    """A library that the system or the driver provides and whose symbols are not listed.

    symbols: prefixes of the names that come from it. driver: it is the GPU driver's, so where there
    is no GPU it is not there, and a module that needs it is not run.
    """

    name: str
    symbols: tuple[str, ...]
    driver: bool = False
    why: Why


class Preload(Model):
    """Libraries that are opened before others.

    for_files: extension modules that this concerns; empty: everything (what `import torch`
    does). scope 'global': RTLD_GLOBAL; 'name': later found by SONAME only. if_loaded: only
    when a library of that name is loaded by an earlier entry.
    """

    opens: Annotated[tuple[Glob, ...], Field(min_length=1)]
    for_files: tuple[Glob, ...] = ()
    scope: Literal["global", "name"]
    if_loaded: str = ""
    why: Why


class Exempt(Model):
    """Files for which a finding is no fault, and why. It is still reported as a note.

    distributions: only in wheels of these; empty: any. release: only in wheels with binaries of
    an upstream's own: a version without local part, or our `overlay` of one.
    """

    files: Annotated[tuple[Glob, ...], Field(min_length=1)]
    distributions: tuple[Distribution, ...] = ()
    release: bool = False
    why: Why

    def covers(self, path: str, distribution: str, version: str) -> bool:
        return (
            (not self.distributions or distribution in self.distributions)
            and not (self.release and compiled_here(version))
            and any(fnmatchcase(path, glob) for glob in self.files)
        )


def compiled_here(version: str) -> bool:
    """False for an upstream's version, and for profile `overlay`: patched Python around the
    release's own binaries. The profile is in the version (compile.stage, wheel_version)."""
    local = version.partition("+")[2]
    return bool(local) and not local.startswith("sm121.overlay.")


class Unimported(Model):
    """Extension modules whose import may fail, if the failure says one of `error`. They are then
    'not run', and their files only opened."""

    files: Annotated[tuple[Glob, ...], Field(min_length=1)]
    error: Annotated[tuple[Annotated[str, Field(min_length=10)], ...], Field(min_length=1)]
    why: Why


class GpuExempt(Exempt):
    """Objects with no native code for the target, and why that is right.

    target: only there; None: everywhere. objects: how many at most, or 'any'. ptx: PTX targets that the driver may compile from
    (for `ptx-only`); empty: any.
    """

    target: TargetName | None = None
    objects: int | Literal["any"] = "any"
    ptx: tuple[str, ...] = ()


class Component(Model):
    """A part of vLLM: where it lies, whether it must hold GPU code, and which operators
    (`NAMESPACE.NAME` of torch.ops) must be there once it is imported."""

    file: Glob
    gpu: bool
    operators: tuple[Annotated[str, Field(pattern=r"^\w+\.\w+$")], ...] = ()


class Overlap(Model):
    """Distributions that own common files on purpose. The winner must be installed last."""

    distributions: Annotated[tuple[Distribution, ...], Field(min_length=2)]
    winner: Distribution | None = None
    files: tuple[Glob, ...] = ("*",)
    why: Why


class CudaBuild(Model):
    """A distribution that must be a CUDA build of the set's torch.

    version_file: the file whose __version__ has the local part (+cu130). marks: any one of
    these NEEDED entries or exported symbols (globs) in `library` shows a CUDA build.
    same_version: its release must equal torch's; otherwise its metadata's exact requirement
    on torch counts.
    """

    distribution: Distribution
    version_file: str
    library: Glob | None = None
    needed: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    same_version: bool = False


class Provider(Model):
    """Which library should have a symbol: the first pattern found in its mangled name."""

    pattern: str
    library: str


class GpuPolicy(Model):
    accepted_archs: Annotated[tuple[Arch, ...], Field(min_length=1)]
    no_code: tuple[GpuExempt, ...] = ()
    ptx_only: tuple[GpuExempt, ...] = ()


class NcclPolicy(Model):
    """NCCL has neither symbol versions nor a versioned SONAME: the version is in a string."""

    distribution: Distribution
    library: Glob


class Policy(Model):
    """One policy file."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    targets: dict[TargetName, TargetPolicy]
    gpu: GpuPolicy
    system: tuple[SystemLibrary, ...] = ()
    preload: tuple[Preload, ...] = ()
    optional: tuple[Exempt, ...] = ()
    imports: tuple[Unimported, ...] = ()
    paths: tuple[Exempt, ...] = ()
    machines: tuple[Exempt, ...] = ()
    tags: tuple[Exempt, ...] = ()
    components: dict[str, Component] = Field(default_factory=dict)
    overlaps: tuple[Overlap, ...] = ()
    cuda_builds: tuple[CudaBuild, ...] = ()
    nccl: NcclPolicy
    providers: tuple[Provider, ...] = ()


def schema_text() -> str:
    """The JSON schema (2020-12) of a policy file."""
    return schema_text_of(Policy)
