"""The types of stack.toml. Versions, hashes and names are checked once (sm121.pins.texts).

All models are frozen and refuse unknown keys.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from sm121.pins.texts import (
    Arch,
    Commit,
    CompiledSource,
    Distribution,
    GitRef,
    GlibcText,
    PythonText,
    RelativePath,
    RequirementText,
    Sha256,
    TargetName,
    VersionText,
    WheelFilename,
)


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Model(BaseModel):
    """Frozen, unknown keys refused; keys are spelt with dashes, as TOML's manual has them."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=_kebab)


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

    subtrees: folder of the source = folder in the wheel. target: of a wheel for one platform,
    which one, so that it is found whatever is built for.
    """

    filename: WheelFilename
    sha256: Sha256
    subtrees: dict[RelativePath, RelativePath]
    target: TargetName | None = None


class SourcePin(Model):
    """A third-party source of vLLM's CMake.

    commit: what ref, a tag, names; without it a clone on this machine can't provide a tag, since
    other projects have tags of the same name.
    env: the variable by which vLLM's CMake takes it from a folder; subdirectory: which folder
    of the source that is. handed_over: how a source that was made ready reaches vLLM's CMake, by
    that variable or only by those of `cmake`. cmake: CMake variables to set to folders of the
    source. digest: content digest (sm121.files.tree_digest) per folder that the build uses; when
    given, every provider must match it. components: which need it (none named: all do).
    upstream_*: where upstream's own files ask for it.
    """

    git: str
    ref: GitRef
    commit: Commit | None = None
    env: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    upstream_file: RelativePath
    upstream_repository: str
    components: tuple[str, ...] = ()
    handed_over: Literal["env", "cmake"] = "env"
    subdirectory: RelativePath = "."
    submodules: dict[RelativePath, Commit] = {}
    cmake: dict[str, RelativePath] = {}
    digest: dict[RelativePath, Annotated[str, Field(pattern=r"^h1:[0-9a-f]{64}$")]] = {}
    wheels: tuple[WheelProvider, ...] = ()

    @property
    def pinned_commit(self) -> str | None:
        """The commit, if it is known without asking the remote."""
        return self.commit or (self.ref if re.fullmatch(r"[0-9a-f]{40}", self.ref) else None)

    @property
    def digested(self) -> tuple[str, ...]:
        """The folders whose content has a digest: all of the source, if none is pinned."""
        return tuple(self.digest) or (".",)

    def content(self) -> dict[str, Any]:
        """What decides what is fetched, and where it lies; not who uses it and how: a change of
        that must not give the folder another name, and so compile everything again."""
        return self.model_dump(
            mode="json",
            exclude={
                "commit": True,
                "components": True,
                "handed_over": True,
                "wheels": {"__all__": {"target"}},
            },
        )


class ReleaseWheel(Model):
    """A wheel of the release as upstream published it."""

    filename: WheelFilename
    sha256: Sha256


class SourcesLeftOut(Model):
    """Sources of a component that a patch keeps from being compiled for this GPU, and why.

    sources: paths in vLLM's tree, or below `{NAME}/` in the third-party source NAME. kernels: which
    of those in the sources are left out; if it is empty, all of each source is. `*` in a path
    stands for whatever makes the names of sources with such kernels differ.
    """

    patch: str
    component: str
    sources: Annotated[tuple[CompiledSource, ...], Field(min_length=1)]
    kernels: str = ""
    reason: Annotated[str, Field(min_length=1)]

    @property
    def third_party(self) -> set[str]:
        """The third-party sources that the paths name."""
        return {path[1:].partition("}")[0] for path in self.sources if path.startswith("{")}

    @model_validator(mode="after")
    def _countable(self) -> SourcesLeftOut:
        if not self.kernels and (patterns := [path for path in self.sources if "*" in path]):
            raise ValueError(
                f"{patterns[0]!r}: `*` is for `kernels`; name each source that is gone"
            )
        return self


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


class OptionalPin(Model):
    """Components that a build of a profile may do without, and what is lost then.

    needs: a tool without which they are left out, and that is said; None: only by choice.
    """

    components: Annotated[tuple[str, ...], Field(min_length=1)]
    reason: str
    needs: Literal["cargo"] | None = None


class ProfilePin(Model):
    """What a profile builds. memory_per_job_gib: for an object that was never measured.

    jit_cache: FlashInfer's modules too, unless told otherwise.
    optional: by the name that stands in `--without` and, with 'no' before it, in the version.
    """

    summary: str
    components: Annotated[tuple[str, ...], Field(min_length=1)]
    memory_per_job_gib: Annotated[float, Field(gt=0)]
    sources: tuple[str, ...] = ()
    jit_cache: bool = False
    optional: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*$")], OptionalPin] = {}


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
    sources_left_out: tuple[SourcesLeftOut, ...] = ()
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
            for group, optional in profile.optional.items():
                for component in optional.components:
                    if component not in profile.components:
                        raise ValueError(
                            f"profiles.{name}.optional.{group}: {component!r} is not in the profile"
                        )
        for name, source_pin in self.sources.items():
            for component in source_pin.components:
                if component not in self.components:
                    raise ValueError(
                        f"sources.{name}.components: no component is named {component!r}"
                    )
        for component in self.left_out:
            if component not in self.components:
                raise ValueError(f"left-out: no component is named {component!r}")
        if (OVERLAY in self.profiles) != (self.overlay is not None):
            raise ValueError("profiles.overlay and overlay.wheels: one needs the other")
        self._consistent_sources_left_out()
        self._consistent_jit_cache()
        return self

    def _consistent_sources_left_out(self) -> None:
        """All but the patches' names, which only the series knows (sm121.patches.left_out)."""
        gone: set[str] = set()
        for number, pin in enumerate(self.sources_left_out):
            at = f"sources-left-out.{number}"
            if pin.component not in self.components:
                near = difflib.get_close_matches(pin.component, self.components, n=1)
                raise ValueError(
                    f"{at}.component: no component is named {pin.component!r}"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )
            if pin.component in self.left_out:
                raise ValueError(f"{at}.component: {pin.component!r} is in left-out, all of it")
            for name in sorted(pin.third_party - self.sources.keys()):
                raise ValueError(f"{at}.sources: no source is named {name!r}")
            if pin.kernels:
                continue
            for path in pin.sources:
                if path in gone:
                    raise ValueError(f"{at}.sources: {path!r} is listed twice")
                gone.add(path)

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
