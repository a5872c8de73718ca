"""A root file system of the target: Debian's packages, extracted by mmdebstrap, kept in the cache.

Extracting needs no privilege and runs nothing of the target. Which packages, by name, is in
`roots.toml`; which versions and files they were when this was tested is in
`packages-NAME.sha256`, in sha256sum's format. Debian's mirror keeps only current versions, so an
old root can't be had again from it: a root that differs from the record is used, and the
difference is reported. What a package's scripts would do when it is configured is not done;
the little of it that is needed is `finish` below.
"""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from sm121 import proc
from sm121.errors import CheckFailed
from sm121.files import fresh_directory, sha256_text, write_atomic
from sm121.toolkit.machine import require_programs
from sm121.ui import Ui

_HERE = Path(__file__).parent
_LISTED = "sm121-packages.sha256"
# What Debian, and container engines, call a machine.
DEBIAN = {"aarch64": "arm64", "x86_64": "amd64"}
# mmdebstrap's hook: before the packages are extracted, while their files are there.
_RECORD = f'cd "$1"/var/cache/apt/archives && sha256sum -- *.deb >"$1"/{_LISTED}'
_FILES = {"passwd": "passwd.master", "group": "group.master"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One root of roots.toml. links: path below the root → what it points at, relative to it."""

    name: str
    suite: str
    python: str
    glibc: str
    packages: tuple[str, ...]
    links: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """A root that is there. drift: packages that are not those of the record, as sentences."""

    path: Path
    recipe: Recipe
    machine: str
    packages: dict[str, str]
    drift: tuple[str, ...]

    @property
    def described(self) -> str:
        """'Debian bookworm (44 packages)'."""
        return f"Debian {self.recipe.suite} ({len(self.packages)} packages)"


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    data = tomllib.loads((_HERE / "roots.toml").read_text(encoding="utf-8"))
    packages = [
        p for part in data[name]["packages"] for p in data.get(part, {}).get("packages", [part])
    ]
    return Recipe(
        name=name, suite=data["suite"], python=data["python"], glibc=data["glibc"],
        packages=tuple(packages), links=data[name].get("links", {}),
    )  # fmt: skip


def record(name: str) -> dict[str, str]:
    """Package file → sha256, as recorded when this was tested."""
    return _parse((_HERE / f"packages-{name}.sha256").read_text(encoding="utf-8"))


def make_root(name: str, machine: str, *, cache: Path, ui: Ui) -> Root:
    """The root of that recipe, made if the cache lacks it.

    Raises CompilerMissing (no mmdebstrap), ToolFailed (mmdebstrap), CheckFailed (a package of
    the recorded name and version that is another file).
    """
    wanted = recipe(name)
    key = sha256_text(wanted.suite, *wanted.packages, repr(wanted.links), machine, _RECORD)[:16]
    folder = cache / "roots" / f"{name}-{machine}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / _LISTED).is_file():
            ui.note(
                f"making a root of {machine} in {folder} (Debian {wanted.suite}, half a minute)"
            )
            _extract(wanted, machine, folder)
    packages = _parse((folder / _LISTED).read_text(encoding="utf-8"))
    return Root(
        path=folder, recipe=wanted, machine=machine, packages=packages,
        drift=tuple(compare(packages, record(name))),
    )  # fmt: skip


def compare(found: dict[str, str], recorded: dict[str, str]) -> list[str]:
    """What is not as recorded, one sentence a package.

    Raises CheckFailed if a file of the same name has another content: a mirror never does that.
    """
    versions = {_name(file): file for file in recorded}
    lines = []
    for file, digest in found.items():
        if recorded.get(file) == digest:
            continue
        if file in recorded:
            raise CheckFailed(
                f"The mirror's {file} is not the file that was recorded.",
                cause=f"sha256 is {digest[:12]}…, recorded was {recorded[file][:12]}…",
                remedy="Compare with another mirror before you trust either.",
            )
        lines.append(f"{file}, recorded was {versions.get(_name(file), 'no such package')}")
    present = {_name(file) for file in found}
    lines += [
        f"{file} was recorded and is not there" for n, file in versions.items() if n not in present
    ]
    return lines


def finish(root: Path, links: dict[str, str]) -> None:
    """What configuring would have made: users, and the commands that are alternatives."""
    for name, master in _FILES.items():
        shutil.copyfile(root / "usr/share/base-passwd" / master, root / "etc" / name)
    for place, points_at in links.items():
        link = root / place
        link.unlink(missing_ok=True)
        link.symlink_to(points_at)


def _extract(wanted: Recipe, machine: str, folder: Path) -> None:
    require_programs(
        {"mmdebstrap": "makes a root file system of the target out of Debian's packages"}
    )
    with fresh_directory(folder) as fresh:
        log = folder.with_suffix(".log")
        write_atomic(log, "")
        proc.run(
            [
                "mmdebstrap", "--variant=extract", f"--arch={DEBIAN[machine]}",
                f"--include={','.join(wanted.packages)}", f"--extract-hook={_RECORD}",
                # Whether the target's programs run here is our business, and not needed to extract.
                "--skip=check/qemu", wanted.suite, fresh,
            ],
            log=log,
        )  # fmt: skip
        finish(fresh, wanted.links)


def _parse(text: str) -> dict[str, str]:
    return {
        name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())
    }


def _name(file: str) -> str:
    """'libc6_2.36-9_arm64.deb' → 'libc6'."""
    return file.partition("_")[0]
