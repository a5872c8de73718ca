"""The release's wheel as upstream published it: read once, and compared with its source.

The patched Python is taken from git, so the wheel must be of the very commit that the patches
were made for: every Python file in it has to be the tree's, byte for byte.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename

from sm121.abi.elf import MAGIC, Elf, read_elf
from sm121.abi.source import BytesSource, Malformed
from sm121.compile.wheel import component_path
from sm121.errors import CheckFailed, WheelFault
from sm121.repair.wheel import Wheel, read_wheel, record_digest

PACKAGE = "vllm/"
# Written by setuptools-scm when upstream built the wheel; the sdist has its own, git has none.
VERSION_FILE = "vllm/_version.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """blobs: git's id of each member that is no ELF file. libraries: the ELF files, with the
    newest glibc that each asks for, e.g. (2, 17). sizes: bytes of every member."""

    wheel: Wheel
    blobs: Mapping[str, str]
    libraries: Mapping[str, tuple[int, int]]
    sizes: Mapping[str, int]

    @property
    def glibc(self) -> tuple[int, int]:
        return max(self.libraries.values(), default=(0, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The wheel's package and the tree's. only_wheel: not in the tree, by folder, with counts
    (third-party trees, what the build generates)."""

    same: int
    differing: tuple[str, ...]
    only_wheel: Mapping[str, int]


def read_release(path: Path) -> Release:
    """Read every member. Raises WheelFault if RECORD does not describe the content."""
    wheel = read_wheel(path)
    blobs: dict[str, str] = {}
    libraries: dict[str, tuple[int, int]] = {}
    sizes: dict[str, int] = {}
    wrong: list[str] = []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            data = archive.read(info)
            name = info.filename
            sizes[name] = len(data)
            entry = wheel.record.get(name)
            if name != f"{wheel.dist_info}/RECORD" and (
                entry is None or entry.digest != record_digest(data)
            ):
                wrong.append(name)
            if data[:4] == MAGIC:
                libraries[name] = _newest_glibc(name, data)
            else:
                blobs[name] = blob_id(data)
    wrong += [f"{name} (listed, not there)" for name in wheel.record if name not in sizes]
    if wrong:
        raise WheelFault(
            f"RECORD of {path.name} does not describe {len(wrong)} of its files.",
            details=wrong[:10],
            cause="the overlay copies RECORD's lines for what it does not change",
            remedy="Pin another file of the release in stack.toml, overlay.wheels.",
        )
    return Release(wheel=wheel, blobs=blobs, libraries=libraries, sizes=sizes)


def blob_id(data: bytes) -> str:
    """git's object id of a file's content (git hash-object)."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _newest_glibc(name: str, data: bytes) -> tuple[int, int]:
    try:
        elf: Elf = read_elf(BytesSource(data))
    except Malformed as error:
        raise WheelFault(f"{name} in the release's wheel is not a whole ELF file.", cause=str(error)) from error  # fmt: skip
    asked = [v.removeprefix("GLIBC_").split(".") for _, versions in elf.needs_versions
             for v in versions if v.startswith("GLIBC_2.")]  # fmt: skip
    return max(((int(v[0]), int(v[1])) for v in asked), default=(0, 0))


def compare(release: Release, tree: Mapping[str, str], *, commit: str) -> Comparison:
    """Compare the package's files with those of the pristine tree (path → git's blob id).

    Raises CheckFailed if a Python file differs or is missing: then the wheel is of another
    commit, and a patched file of ours would not fit the ones around it.
    """
    ours = {path: blob for path, blob in tree.items() if path.startswith(PACKAGE)}
    theirs = {name: blob for name, blob in release.blobs.items() if name.startswith(PACKAGE)}
    differing = [n for n, blob in theirs.items() if n in ours and ours[n] != blob]
    missing = [n for n in ours if n not in theirs and n.endswith(".py") and n != VERSION_FILE]
    if faults := [*(n for n in differing if n != VERSION_FILE), *(f"{n} (missing)" for n in missing)]:  # fmt: skip
        raise CheckFailed(
            f"{release.wheel.filename} is not what its source {commit[:12]} would make: "
            f"{len(faults)} file(s) differ.",
            details=sorted(faults)[:10],
            cause="patches made for that source do not fit this wheel",
            remedy="Pin the wheel of the same release in stack.toml, overlay.wheels.",
        )
    only: dict[str, int] = {}
    for name in sorted(theirs.keys() - ours.keys()):
        folder = "/".join(name.split("/")[:-1][:3])
        key = name if name == VERSION_FILE else f"{folder}/"
        only[key] = only.get(key, 0) + 1
    same = sum(ours.get(name) == blob for name, blob in theirs.items())
    return Comparison(same=same, differing=tuple(sorted(differing)), only_wheel=only)


def platform_tag(release: Release, machine: str) -> str:
    """Upstream's manylinux tag, while no binary needs a newer glibc than it promises (PEP 600);
    else one that promises nothing.

    The file's name is what upstream publishes; its WHEEL says linux_*, as setup.py made it.
    """
    for tag in sorted(tag.platform for tag in parse_wheel_filename(release.wheel.filename)[3]):
        match = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{machine}", tag)
        if match and release.glibc <= (int(match[1]), int(match[2])):
            return tag
    return f"linux_{machine}"


def contents(
    components: Sequence[str], release: Release, tree: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    """Files and bytes of everything in the release's wheel, by component; what belongs to none
    is vLLM's Python, the metadata, or a folder's name."""
    folders = {path.rpartition("/")[0] + "/": name for name in components
               if (path := component_path(name)).endswith("/__init__.py")}  # fmt: skip
    files = {component_path(name): name for name in components}
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for name, size in release.sizes.items():
        owner = files.get(name) or next((o for f, o in folders.items() if name.startswith(f)), "")
        if not owner and ".dist-info/" in name:
            owner = "metadata"
        elif not owner:
            owner = "Python tree" if name in tree or name == VERSION_FILE else name.rpartition("/")[0]  # fmt: skip
        count[owner] += 1
        total[owner] += size
    return {owner: {"files": count[owner], "bytes": total[owner]} for owner in sorted(count)}
