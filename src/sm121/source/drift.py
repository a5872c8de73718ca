"""Do our pins of third-party sources agree with what upstream's own CMake asks for?

Upstream states them in FetchContent calls (CMake manual, FetchContent: GIT_REPOSITORY,
GIT_TAG), sometimes through `set(VAR "value")` in the same file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sm121.errors import SourceDrift
from sm121.gitrepo import Repository
from sm121.pins.model import SourcePin

_SET = re.compile(r"^\s*set\(\s*(\w+)\s+\"?([^\s\"\)]+)\"?", re.MULTILINE | re.IGNORECASE)
_PAIR = re.compile(r"GIT_REPOSITORY\s+(\S+)(?:\s+#[^\n]*)*\s+GIT_TAG\s+([^\s\)]+)", re.IGNORECASE)
# `if` without another one inside, on the device that is built for: what holds for CUDA is kept.
_OTHER_DEVICE = re.compile(
    r"^[ \t]*if\s*\(\s*VLLM_TARGET_DEVICE\s+STREQUAL\s+\"(?!cuda\")\w+\"\s*\)"
    r"(?:(?!\bif\s*\().)*?(?:\belse\s*\(\s*\)(?P<rest>(?:(?!\bif\s*\().)*?))?\bendif\s*\([^)]*\)",
    re.MULTILINE | re.IGNORECASE | re.DOTALL,
)
_FILES = re.compile(r"^(CMakeLists\.txt|cmake/external_projects/[^/]+\.cmake)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """One source that upstream's CMake fetches."""

    file: str
    repository: str
    ref: str


def declared_sources(text: str, file: str) -> list[Fetched]:
    """All GIT_REPOSITORY/GIT_TAG pairs that a CUDA build gets from one CMake file.

    Variables of the same file are expanded. One that is set to different values is not: which
    of them holds can't be told here, and a pair with `${NAME}` in it agrees with no pin.
    """
    text = _OTHER_DEVICE.sub(lambda m: m["rest"] or "", text)
    values: dict[str, set[str]] = {}
    for name, value in _SET.findall(text):
        values.setdefault(name, set()).add(value)

    def expand(value: str) -> str:
        return re.sub(
            r"\$\{(\w+)\}",
            lambda m: next(iter(found)) if len(found := values.get(m[1], ())) == 1 else m[0],
            value.strip('"'),
        )

    return [
        Fetched(file=file, repository=_repository(expand(url)), ref=expand(ref))
        for url, ref in _PAIR.findall(text)
    ]


def _repository(url: str) -> str:
    """'https://host/Owner/Name.git' → 'owner/name'."""
    return "/".join(url.removesuffix(".git").rstrip("/").split("/")[-2:]).lower()


def declared_components(setup_py: str, build_rust_py: str) -> set[str]:
    """Component names that upstream's setup.py and tools/build_rust.py know."""
    names = re.findall(r'CMakeExtension\(\s*name="vllm\.(?:vllm_flash_attn\.)?(\w+)"', setup_py)
    return {*names, *re.findall(r'target="vllm\.([\w-]+)"', build_rust_py)}


def declared_in(repository: Repository, commit: str, files: Iterable[str]) -> list[Fetched]:
    """Every source that the CMake files of a tree fetch. files: all paths of the tree."""
    return [
        fetched
        for file in files
        if _FILES.match(file)
        for fetched in declared_sources(repository.read(commit, file) or "", file)
    ]


def components_in(repository: Repository, commit: str) -> set[str]:
    """Every component that a tree's own build files know."""
    return declared_components(
        repository.read(commit, "setup.py") or "",
        repository.read(commit, "tools/build_rust.py") or "",
    )


def check_drift(
    repository: Repository,
    commit: str,
    files: list[str],
    pins: Mapping[str, SourcePin],
    components: Collection[str],
) -> None:
    """Compare every declared source and component of the tree with the pins.

    Raises SourceDrift naming both values for each disagreement: another ref, a source that
    upstream fetches and we do not pin, a pin that upstream no longer asks for, a component
    that only one side knows.
    """
    declared = declared_in(repository, commit, files)
    faults = []
    for name, pin in pins.items():
        wanted = pin.upstream_repository.lower()
        here = [d for d in declared if d.file == pin.upstream_file and d.repository == wanted]
        if not here:
            faults.append(
                f"sources.{name}: pinned at {pin.ref}, but {pin.upstream_file} does not fetch "
                f"{pin.upstream_repository}"
            )
        faults += [
            f"sources.{name}: pinned at {pin.ref}, but {d.file} asks for {d.ref}"
            for d in here
            if d.ref != pin.ref
        ]
    pinned = {(p.upstream_file, p.upstream_repository.lower()) for p in pins.values()}
    faults += [
        f"{d.file} fetches {d.repository} at {d.ref}, which stack.toml does not pin"
        for d in declared
        if (d.file, d.repository) not in pinned
    ]
    known = components_in(repository, commit)
    faults += [
        f"component {name}: upstream builds it, [components] does not list it"
        for name in sorted(known - set(components))
    ]
    faults += [
        f"component {name}: [components] lists it, upstream does not know it"
        for name in sorted(set(components) - known)
    ]
    if faults:
        raise SourceDrift(
            f"{len(faults)} pin(s) disagree with upstream's own build files.",
            details=faults,
            cause="A build would compile something else than the pins say.",
            remedy="Correct [sources] or [components] in stack.toml.",
        )
