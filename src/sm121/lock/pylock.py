"""Lock files: read, write, and choose the one wheel per package for a target.

Format: PEP 751, through packaging.pylock. `path` entries are bare file names below
`../../wheelhouse/`, so that the same lock installs from a filled wheelhouse offline.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from packaging import tags
from packaging.markers import Environment
from packaging.pylock import PackageWheel, Pylock, PylockSelectError, PylockValidationError
from packaging.version import Version

from sm121.errors import LockStale, PinsFault
from sm121.files import write_atomic

# Lock files lie in pins/<release>/; the wheels they name in the wheelhouse of the checkout.
WHEELHOUSE_FROM_LOCK = "../../wheelhouse"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A platform and CPython that wheels are chosen for. glibc: (major, minor), newest allowed."""

    name: str
    machine: str
    python: str
    glibc: tuple[int, int]

    @classmethod
    def make(cls, name: str, *, python: str, glibc: str) -> Target:
        """From pins: name 'linux-aarch64', python '3.12', glibc '2.39'."""
        major, minor = glibc.split(".")
        return cls(
            name=name,
            machine=name.removeprefix("linux-"),
            python=python,
            glibc=(int(major), int(minor)),
        )

    @property
    def tag(self) -> str:
        """As in lock file names: 'linux-aarch64-cp312'."""
        return f"{self.name}-cp{self.python.replace('.', '')}"

    @property
    def uv_platform(self) -> str:
        """What `uv --python-platform` calls it: 'aarch64-manylinux_2_39'."""
        return f"{self.machine}-manylinux_{self.glibc[0]}_{self.glibc[1]}"

    def environment(self) -> Environment:
        """Marker environment (PEP 508) of that interpreter."""
        return Environment(
            implementation_name="cpython",
            implementation_version=f"{self.python}.0",
            os_name="posix",
            platform_machine=self.machine,
            platform_release="",
            platform_system="Linux",
            platform_version="",
            python_full_version=f"{self.python}.0",
            platform_python_implementation="CPython",
            python_version=self.python,
            sys_platform="linux",
        )

    def tags(self) -> list[tags.Tag]:
        """Wheel tags that it accepts, best first (PEP 425, PEP 600)."""
        major, minor = (int(part) for part in self.python.split("."))
        platforms = [
            f"manylinux_{self.glibc[0]}_{step}_{self.machine}"
            for step in range(self.glibc[1], 4, -1)
        ]
        for step, legacy in ((17, "2014"), (12, "2010"), (5, "1")):
            if self.machine == "x86_64" or legacy == "2014":
                name = f"manylinux_{self.glibc[0]}_{step}_{self.machine}"
                platforms.insert(platforms.index(name) + 1, f"manylinux{legacy}_{self.machine}")
        platforms.append(f"linux_{self.machine}")
        version = (major, minor)
        return [
            *tags.cpython_tags(version, platforms=platforms),
            *tags.compatible_tags(version, f"cp{major}{minor}", platforms),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class LockedFile:
    """One file of a lock: distribution, version, file name, sha256, size in bytes."""

    distribution: str
    version: str
    filename: str
    sha256: str
    size: int


def lock_path(pins: Path, stack: str, kind: str, target: Target) -> Path:
    """kind 'family' → pylock.<target>.toml; kind 'host' → pylock.host-<target>.toml."""
    prefix = "" if kind == "family" else f"{kind}-"
    return pins / stack / f"pylock.{prefix}{target.tag}.toml"


def read_lock(path: Path) -> Pylock:
    """Parse and validate. Raises LockStale (missing) or PinsFault (malformed)."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return Pylock.from_dict(data)
    except FileNotFoundError as error:
        raise LockStale(
            f"{path.name} does not exist.",
            cause="This platform and Python are not locked.",
            remedy="Run `nox -s lock`, or choose a target and Python that stack.toml lists.",
        ) from error
    except (tomllib.TOMLDecodeError, PylockValidationError) as error:
        raise PinsFault(
            f"{path} is not a PEP 751 lock.",
            cause=str(error),
            remedy="It is generated: restore it with git, or run `nox -s lock`.",
        ) from error


def locked_files(lock: Pylock, target: Target) -> Iterator[LockedFile]:
    """The files that installing the lock on the target would use (markers and tags applied)."""
    try:
        for package, chosen in lock.select(environment=target.environment(), tags=target.tags()):
            assert isinstance(chosen, PackageWheel)
            yield LockedFile(
                distribution=package.name,
                version=str(package.version),
                filename=chosen.filename,
                sha256=chosen.hashes["sha256"],
                size=chosen.size or 0,
            )
    except PylockSelectError as error:
        raise LockStale(
            f"The lock does not fit {target.tag}.", cause=str(error), remedy="Run `nox -s lock`."
        ) from error


def make_lock(
    files: Iterable[LockedFile], *, python: str, inputs: str, folder: str = WHEELHOUSE_FROM_LOCK
) -> Pylock:
    """A lock of exactly these files, sorted by distribution; no URL, no time, no index.

    inputs: digest of what it was made from, kept as `tool.sm121.inputs`. folder: where the
    wheels lie, relative to the lock; '' for the same folder.
    """
    packages = [
        {
            "name": file.distribution,
            "version": file.version,
            "wheels": [
                {
                    "path": f"{folder}/{file.filename}" if folder else file.filename,
                    "size": file.size,
                    "hashes": {"sha256": file.sha256},
                }
            ],
        }
        for file in sorted(files, key=lambda f: (f.distribution, Version(f.version)))
    ]
    return Pylock.from_dict(
        {
            "lock-version": "1.0",
            "requires-python": f"=={python}.*",
            "created-by": "sm121",
            "packages": packages,
            "tool": {"sm121": {"inputs": inputs}},
        }
    )


def render_lock(lock: Pylock, *, made: str = "`nox -s lock` from stack.toml") -> str:
    """TOML text of a lock, deterministic. made: by what and from what, for its first line."""
    return f"# Made by {made}: do not edit.\n" + tomli_w.dumps(dict(lock.to_dict()))


def write_lock(lock: Pylock, path: Path) -> None:
    write_atomic(path, render_lock(lock))
