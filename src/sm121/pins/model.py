"""The types of stack.toml. Versions, hashes and names are checked here, once.

All models are frozen and refuse unknown keys.
"""

from __future__ import annotations

import difflib
import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Model(BaseModel):
    """Frozen, unknown keys refused; keys are spelt with dashes, as TOML's manual has them."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=_kebab)


def _hex(length: int, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(rf"[0-9a-f]{{{length}}}", value):
            raise ValueError(f"{what} must be {length} lower-case hex digits")
        return value

    return AfterValidator(check)


def _version(value: str) -> str:
    try:
        Version(value)
    except InvalidVersion as error:
        raise ValueError(f"{value!r} is not a version (PEP 440)") from error
    return value


def _distribution(value: str) -> str:
    if canonicalize_name(value) != value:
        raise ValueError(f"distribution names are normalised: write {canonicalize_name(value)!r}")
    return value


def _requirement(value: str) -> str:
    try:
        Requirement(value)
    except InvalidRequirement as error:
        raise ValueError(f"{value!r} is not a requirement (PEP 508): {error}") from error
    return value


def _relative(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{value!r} must be a relative path that stays inside")
    return value


def _git_ref(value: str) -> str:
    # A ref that starts with a dash would reach git as an option.
    if not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z._/+-]*", value) or ".." in value:
        raise ValueError(f"{value!r} is not a git tag, branch or commit")
    return value


def _wheel_filename(value: str) -> str:
    try:
        parse_wheel_filename(value)
    except InvalidWheelFilename as error:
        raise ValueError(f"{value!r} is not the name of a wheel: {error}") from error
    return value


Sha256 = Annotated[str, _hex(64, "a sha256")]
Commit = Annotated[str, _hex(40, "a commit")]
GitRef = Annotated[str, AfterValidator(_git_ref)]
VersionText = Annotated[str, AfterValidator(_version)]
Distribution = Annotated[str, AfterValidator(_distribution)]
RequirementText = Annotated[str, AfterValidator(_requirement)]
WheelFilename = Annotated[str, AfterValidator(_wheel_filename)]
RelativePath = Annotated[str, AfterValidator(_relative)]
Arch = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9][af]?$")]
GlibcText = Annotated[str, Field(pattern=r"^2\.[0-9]+$")]
PythonText = Annotated[str, Field(pattern=r"^3\.[0-9]+$")]
TargetName = Literal["linux-aarch64", "linux-x86_64"]


class VllmPin(Model):
    """The upstream release: one commit, and the sdist made of it."""

    version: VersionText
    git: str
    tag: GitRef
    commit: Commit
    date: AwareDatetime
    sdist_sha256: Sha256


class CudaPin(Model):
    """CUDA release (major.minor), GPU arch, and the wheels that make the toolkit."""

    version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+$")]
    arch: Arch
    accepted_archs: tuple[Arch, ...]
    toolkit: dict[Distribution, VersionText]

    @model_validator(mode="after")
    def _arch_accepted(self) -> CudaPin:
        if self.arch not in self.accepted_archs:
            raise ValueError(f"arch {self.arch} is not in accepted-archs")
        return self


class TargetPin(Model):
    """A platform that the stack runs on: oldest glibc and CPythons, the first one ships."""

    glibc: GlibcText
    pythons: Annotated[tuple[PythonText, ...], Field(min_length=1)]


class FamilyPin(Model):
    """One distribution of the kernel-library family and why this version."""

    version: VersionText
    reason: str
    extras: tuple[str, ...] = ()


class YieldPin(Model):
    """A wheel that gives up the paths that another one owns too, and why."""

    to: Distribution
    reason: str


class HostPin(Model):
    """What the build host's own environment needs beside torch and the toolkit.

    programs: what upstream's build runs beside compilers, by name, and what for.
    """

    requirements: tuple[RequirementText, ...]
    programs: dict[str, str] = {}


class WheelProvider(Model):
    """A wheel on the index that carries the same tree as the git source.

    subtrees: folder of the source = folder in the wheel.
    """

    filename: WheelFilename
    sha256: Sha256
    subtrees: dict[RelativePath, RelativePath]


class SourcePin(Model):
    """A third-party source of vLLM's CMake.

    env: the variable by which vLLM's CMake takes it from a folder; subdirectory: which folder
    of the source that is. cmake: CMake variables to set to folders of the source. digest:
    content digest (sm121.files.tree_digest) per folder that the build uses; when given, every
    provider must match it. upstream_*: where upstream's own files ask for it.
    """

    git: str
    ref: GitRef
    env: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    upstream_file: RelativePath
    upstream_repository: str
    subdirectory: RelativePath = "."
    submodules: dict[RelativePath, Commit] = {}
    cmake: dict[str, RelativePath] = {}
    digest: dict[RelativePath, Annotated[str, Field(pattern=r"^h1:[0-9a-f]{64}$")]] = {}
    wheels: tuple[WheelProvider, ...] = ()


class ReleaseWheel(Model):
    """A wheel of the release as upstream published it."""

    filename: WheelFilename
    sha256: Sha256


class OverlayPin(Model):
    """What the profile `overlay` is made of: the release's own wheel for each target.

    python_alone: patches that change Python and inputs of the build, and why their Python is
    right beside binaries that were built without them. left_out: patches that are left out
    whole, and why.
    """

    wheels: Annotated[dict[TargetName, ReleaseWheel], Field(min_length=1)]
    python_alone: dict[str, str] = {}
    left_out: dict[str, str] = {}


class JitModule(Model):
    """A module that FlashInfer compiles when it is first used (its JitSpec).

    generator: 'package.module:function' in FlashInfer that gives the JitSpec; arguments: its
    keyword arguments, where 'torch.NAME' stands for that of torch. functions: what FlashInfer
    calls in it. reason: what for; source: where that was read.
    """

    generator: Annotated[str, Field(pattern=r"^flashinfer(\.\w+)*:gen_\w+$")]
    arguments: dict[str, str | bool | int] = {}
    functions: Annotated[tuple[str, ...], Field(min_length=1)]
    reason: str
    source: str


class JitCachePin(Model):
    """FlashInfer's modules that are compiled ahead of time, by the name of their JitSpec.

    imports: what importing FlashInfer on the build host needs beside the host's lock; taken
    from the family's. left_out: modules that a node compiles itself if it comes to use them.
    """

    imports: tuple[Distribution, ...]
    memory_per_job_gib: Annotated[float, Field(gt=0)]
    modules: Annotated[dict[str, JitModule], Field(min_length=1)]
    left_out: dict[str, JitModule] = {}


# FlashInfer, and what its modules are compiled against; members of the family.
FLASHINFER, TVM_FFI = "flashinfer-python", "apache-tvm-ffi"

# Its name is in the version of what it makes, and verify-abi's policy knows it there.
OVERLAY = "overlay"


class ProfilePin(Model):
    """What a profile builds. memory_per_job_gib: for an object that was never measured.
    jit_cache: FlashInfer's modules too, unless told otherwise."""

    summary: str
    components: Annotated[tuple[str, ...], Field(min_length=1)]
    memory_per_job_gib: Annotated[float, Field(gt=0)]
    sources: tuple[str, ...] = ()
    jit_cache: bool = False


class Stack(Model):
    """One stack.toml."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    lock_date: AwareDatetime
    lock_newer: dict[Distribution, AwareDatetime] = {}
    vllm: VllmPin
    cuda: CudaPin
    targets: dict[TargetName, TargetPin]
    family: dict[Distribution, FamilyPin]
    overrides: dict[Distribution, str]
    yields: dict[Distribution, YieldPin] = {}
    installer: dict[Distribution, VersionText] = {}
    host: HostPin
    sources: dict[str, SourcePin]
    components: dict[str, str]
    left_out: dict[str, str]
    profiles: dict[str, ProfilePin]
    overlay: OverlayPin | None = None
    jit_cache: JitCachePin | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Stack:
        for name in self.overrides:
            if name not in self.family:
                raise ValueError(f"overrides.{name}: not a member of the family")
        for name, pin in self.yields.items():
            if pin.to == name or pin.to in self.yields:
                raise ValueError(f"yields.{name}.to: must be a wheel that keeps its paths")
        for name, profile in self.profiles.items():
            for source in profile.sources:
                if source not in self.sources:
                    raise ValueError(f"profiles.{name}.sources: no source is named {source!r}")
            for component in profile.components:
                if component not in self.components:
                    near = difflib.get_close_matches(component, self.components, n=1)
                    raise ValueError(
                        f"profiles.{name}.components: no component is named {component!r}"
                        + (f"; did you mean {near[0]!r}?" if near else "")
                    )
                # The overlay holds what upstream built, whether this GPU can use it or not.
                if component in self.left_out and name != OVERLAY:
                    raise ValueError(
                        f"profiles.{name}.components: {component!r} is also in left-out"
                    )
        for component in self.left_out:
            if component not in self.components:
                raise ValueError(f"left-out: no component is named {component!r}")
        if (OVERLAY in self.profiles) != (self.overlay is not None):
            raise ValueError("profiles.overlay and overlay.wheels: one needs the other")
        self._consistent_jit_cache()
        return self

    def _consistent_jit_cache(self) -> None:
        pin = self.jit_cache
        for name, profile in self.profiles.items():
            if profile.jit_cache and pin is None:
                raise ValueError(f"profiles.{name}.jit-cache: there is no [jit-cache]")
        if pin is None:
            return
        for name in (FLASHINFER, TVM_FFI):
            if name not in self.family:
                raise ValueError(f"jit-cache: needs {name} in the family")
        if both := sorted(set(pin.modules) & set(pin.left_out)):
            raise ValueError(f"jit-cache.left-out: {', '.join(both)}: also in jit-cache.modules")
