"""manifest.json: what the wheelhouse is, made of what, by which tools.

Published as wheelhouse/manifest.schema.json beside this module; the schema is generated
from these models and tested to be equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from sm121.errors import CheckFailed
from sm121.published import schema_text_of

FILE = "manifest.json"
SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("manifest.schema.json")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Base(Entry):
    """The upstream release and who provided it."""

    version: str
    commit: str
    provider: Literal["git", "sdist"]
    provider_reason: str
    sdist_sha256: Sha256


class PatchEntry(Entry):
    """status: `applied in part` and `left out` only in an overlay, with the reason. files, of
    an overlay: what it changes in the wheel; not_applied: its other files and why."""

    name: str
    subject: str
    status: Literal["applied", "applied in part", "left out", "upstreamed"]
    upstream_status: str
    commit: str
    patch_id: str
    sha256: Sha256
    reason: str = ""
    files: tuple[str, ...] = ()
    not_applied: dict[str, str] = {}


class GpuEntry(Entry):
    """What the target's GPU gets of one file: objects with native code (sass), with code that
    the driver compiles at first use (ptx), with nothing (none). why: policy's reason where
    that is not all native. As verify-abi has it (its report's `components`)."""

    component: str
    file: str
    sass: int
    ptx: int
    none: int
    bytes: int
    archs: dict[str, int]
    verdict: str
    result: Literal["pass", "fail"]
    why: str


class ContentEntry(Entry):
    """Number and bytes of the files that belong together."""

    files: int
    bytes: int


class SourceEntry(Entry):
    """A third-party source: what it was pinned at, who provided it, and the digests that were
    found (none pinned: one of all of it)."""

    ref: str
    provider: str
    digest: dict[str, str]


class SourcesLeftOutEntry(Entry):
    """Sources of a built component that a patch keeps from being compiled, and why. sources: paths
    in vLLM's tree, or below `{NAME}/` in the third-party source NAME. kernels: what of them is left
    out, where it is not all; then `*` in a path stands for what differs between many alike."""

    patch: str
    component: str
    sources: tuple[str, ...]
    kernels: str = ""
    reason: str


class ComponentEntry(Entry):
    """built: what is in. left_out: name and reason; nothing is left out in silence.
    sources_left_out: the same inside of what is built; none in an overlay, where upstream
    compiled. without: optional parts of the profile that are not in, by name, and why. contents,
    of an overlay: all that the release's wheel holds, by component."""

    built: tuple[str, ...]
    left_out: dict[str, str]
    sources_left_out: tuple[SourcesLeftOutEntry, ...] = ()
    without: dict[str, str] = {}
    gpu: tuple[GpuEntry, ...] = ()
    contents: dict[str, ContentEntry] = {}


class LibraryEntry(Entry):
    machine: str
    needed: tuple[str, ...]


class OriginalEntry(Entry):
    """The vendor's file that a repaired wheel or an overlay was made of."""

    filename: str
    sha256: Sha256


class WheelEntry(Entry):
    """origin: compiled here, as the index has it, repaired, or an overlay. original, changes:
    of the last two, what it was made of and what was done (never to a binary)."""

    filename: str
    distribution: str
    version: str
    size: int
    sha256: Sha256
    origin: Literal["built", "index", "repaired", "overlay"]
    libraries: dict[str, LibraryEntry] = {}
    original: OriginalEntry | None = None
    changes: tuple[str, ...] = ()


class JitModuleEntry(Entry):
    """A FlashInfer module that was compiled ahead of time. file: in the wheel. codes: number of objects by what GPU
    code they hold; reason, source: of the pins."""

    file: str
    bytes: int
    codes: dict[str, int]
    needed: tuple[str, ...]
    reason: str
    source: str


class JitCacheEntry(Entry):
    """FlashInfer's modules ahead of time. wheel: its file name, null if this build has none.

    at_first_use: modules that FlashInfer compiles on the node if they come to be used, and why
    they are not in the wheel.
    """

    wheel: str | None
    flashinfer: str
    modules: dict[str, JitModuleEntry]
    at_first_use: dict[str, str]


class FirstStartEntry(Entry):
    """What a node compiles itself at its first start, of one JIT family: compilations of kernels,
    and the seconds that they took one after another where verify-jit ran. kept_in: the cache
    that a second start finds them in."""

    family: str
    kernels: int
    compilations: int
    seconds: float
    kept_in: str


class Check(Entry):
    """A check and its verdict; `not run` has the reason in detail. `allowed`: it did not pass,
    and policy says why that may be."""

    name: str
    verdict: Literal["passed", "allowed", "failed", "not run"]
    detail: str


class Manifest(Entry):
    """The whole of manifest.json.

    complete: holds every wheel of the lock, and so can be installed offline. notices: what a
    person who copies or publishes the folder must know. jit_cache: null if the stack lists no
    modules for one. first_start: null if verify-jit has not passed on this tree here. files:
    scripts that run on a node, and what they read; all of the folder is in SHA256SUMS.
    """

    schema_version: Literal[1]
    stack: str
    target: str
    python: str
    glibc: str
    profile: str
    partial: bool
    complete: bool
    notices: tuple[str, ...]
    arch: str
    base: Base
    sources: dict[str, SourceEntry] = {}
    patches: tuple[PatchEntry, ...]
    patched_commit: str
    lock_sha256: dict[str, Sha256]
    components: ComponentEntry
    tools: dict[str, str]
    wheels: tuple[WheelEntry, ...]
    jit_cache: JitCacheEntry | None = None
    first_start: tuple[FirstStartEntry, ...] | None = None
    checks: tuple[Check, ...]
    files: dict[str, Sha256] = {}


def load_manifest(folder: Path) -> Manifest | None:
    """The manifest of a wheelhouse, None if it has none.

    Raises CheckFailed for a file that is not a manifest of this schema version.
    """
    file = folder / FILE
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckFailed(
            f"{file} is no manifest of a wheelhouse that this version of sm121 knows.",
            cause=str(error).partition("\n")[0],
            remedy="Run `nox -s build` to make the wheelhouse anew.",
        ) from error


def render(manifest: Manifest) -> str:
    """JSON text, keys in the order of the model, one trailing newline."""
    return manifest.model_dump_json(indent=2) + "\n"


def schema_text() -> str:
    """The JSON schema (2020-12) of a manifest."""
    return schema_text_of(Manifest)
