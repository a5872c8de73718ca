"""Disk, memory, cores, limits, and what kind of file system the folders lie on."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from sm121.compile.jobs import choose_jobs, usable_cores
from sm121.compile.measured import largest_need
from sm121.compile.memory import available_memory
from sm121.compile.stage import CompileStage
from sm121.context import Context
from sm121.doctor.machine import Machine
from sm121.doctor.model import Check, Level
from sm121.doctor.reference import Profile
from sm121.doctor.supplies import missing_files
from sm121.files import tree_size
from sm121.jitcache.stage import JitCacheStage
from sm121.repair.stage import RepairStage
from sm121.source.places import made_at
from sm121.toolkit.stage import EnvironmentStage, ToolkitStage
from sm121.ui import human_bytes

_GIB = 1 << 30
# An installed environment of the family (3.6 GB of wheels, unpacked), without any model.
_RUN_DISK_GB = 12.0
_UNSIZED_GB = 0.3
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "lustre", "beegfs", "ceph",
           "glusterfs", "afs")  # fmt: skip


def check_disk(machine: Machine, reference: Profile) -> Iterator[Check]:
    """Free space where build/ and the cache lie; what of this build is there counts as there."""
    layout = machine.context.layout
    there = sum(map(tree_size, _own_folders(machine.context))) / 1e9
    needs = {
        layout.build: max(0.0, reference.build_gb - there),
        # The pins of sdist and release wheel have no size.
        layout.cache: sum(f.size / 1e9 or _UNSIZED_GB for f in missing_files(machine)[1]),
    }
    wanted: dict[int, float] = {}
    places: dict[int, list[str]] = {}
    for folder, need in needs.items():
        device = nearest(folder).stat().st_dev
        wanted[device] = wanted.get(device, 0.0) + need
        places.setdefault(device, []).append(str(folder))
    for device, folders in places.items():
        free = shutil.disk_usage(nearest(Path(folders[0]))).free / 1e9
        build: Level = "ok"
        if free < wanted[device]:
            build = "fault"
        elif free < 1.3 * wanted[device]:
            build = "warning"
        run: Level = "ok" if free >= _RUN_DISK_GB else "warning"
        yield Check(
            name="disk",
            found=f"{free:.1f} GB free for {' and '.join(folders)}; a build of "
            f"{machine.context.options.profile} needs {wanted[device]:.1f} GB more",
            build=build, run=run,
            cause=f"an installed environment takes about {_RUN_DISK_GB:.0f} GB, without a model"
            if build == "ok" else f"recorded: {reference.source}",
            remedy="Free some space (`nox -s clean` lists what sm121 holds), or put build/ and the "
            "cache elsewhere (SM121_BUILD, SM121_CACHE).",
        )  # fmt: skip


def _own_folders(context: Context) -> list[Path]:
    """What a build of this stack, target and profile fills of build/; what other stacks and targets
    have there is of no use to it. (The imported releases lie in one repository, and are small.)"""
    layout, pins = context.layout, context.stack.sources
    return [
        EnvironmentStage().folder(context),
        ToolkitStage().folder(context),
        *(made_at(name, pins[name], layout.third_party) for name in context.profile.sources),
        CompileStage().work(context),
        CompileStage().dist(context),
        JitCacheStage().dist(context),
        RepairStage().folder(context),
    ]


def nearest(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def check_memory(machine: Machine) -> Iterator[Check]:
    """Can one compiler run, and do cores or memory limit how many?"""
    largest = largest_need(machine.context)
    available, total = available_memory(), int(psutil.virtual_memory().total)
    cores = usable_cores()
    jobs = choose_jobs(asked=None, cores=cores, available=available)
    found = f"{available / _GIB:.0f} GiB available of {total / _GIB:.0f} GiB"
    build: Level = "ok"
    cause = ""
    if not machine.compiles:
        build = "not needed"
    elif available < largest:
        build = "fault"
        cause = (
            f"one compiler of this profile can take {largest / _GIB:.1f} GiB; the kernel would "
            "kill it"
        )
    elif (together := int(jobs.memory // largest)) < cores:
        build = "warning"
        cause = (
            f"of the largest objects ({largest / _GIB:.1f} GiB) only {max(1, together)} fit at "
            f"once, for {cores} cores"
        )
    yield Check(
        name="memory", found=found, build=build, run="ok", cause=cause,
        remedy="Close other programs; a model that is being served counts too on unified memory."
        if cause else "",
    )  # fmt: skip
    yield Check(
        name="cores", found=f"{cores} usable; {jobs.reason}" if machine.compiles else f"{cores} usable",
        build="ok", run="ok",
    )  # fmt: skip


def check_system(machine: Machine) -> Iterator[Check]:
    """Kernel and C library; the latter must be as new as the target's where things run."""
    target = machine.context.runtime
    library, version = platform.libc_ver()
    parts = version.split(".")[:2]
    have = tuple(int(p) for p in parts) if library == "glibc" and all(p.isdigit() for p in parts) else ()  # fmt: skip
    here = f"linux-{platform.machine()}"
    run: Level = "ok"
    cause = remedy = ""
    if here != target.name:
        run, cause = "fault", f"the wheels are for {target.name}, this machine is {here}"
        remedy = f"Run it on a node, or look at --target {here}."
    elif have < target.glibc:
        run, cause = "fault", f"the wheels need glibc {target.glibc[0]}.{target.glibc[1]} or newer"
        remedy = "Use DGX OS 7 (Ubuntu 24.04) or newer."
    yield Check(
        name="system", build="ok", run=run, cause=cause, remedy=remedy,
        found=f"{platform.system()} {platform.release()}, {platform.machine()}, "
        f"{library or 'another C library'} {version}, pages of {resource.getpagesize() // 1024} kB",
    )  # fmt: skip


def check_locked_memory(limit: int | None = None) -> Iterator[Check]:
    """`ulimit -l`. RDMA pins its buffers; with a low limit NCCL between two nodes fails or goes
    over TCP (NCCL user guide, Troubleshooting)."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    unlimited = soft == resource.RLIM_INFINITY
    yield Check(
        name="ulimit -l", build="not needed", run="ok" if unlimited else "warning",
        found="unlimited" if unlimited else f"{human_bytes(soft)} of memory can be locked",
        cause="" if unlimited else "RDMA between two nodes pins more than that",
        remedy="" if unlimited else "`* - memlock unlimited` in /etc/security/limits.d/, "
        "LimitMEMLOCK=infinity in a service, --ulimit memlock=-1 in a container.",
    )  # fmt: skip


def check_places(machine: Machine) -> Iterator[Check]:
    """File systems of build/ and the cache: remote ones lock and link badly, noexec ones can't
    run the toolkit's nvcc."""
    layout = machine.context.layout
    for name, folder in (("build folder", layout.build), ("cache folder", layout.cache)):
        kind, options, source = mount_of(nearest(folder).resolve(), machine.read("/proc/mounts"))
        level: Level = "ok"
        cause = remedy = ""
        if not os.access(nearest(folder), os.W_OK | os.X_OK):
            level, cause = "fault", f"{nearest(folder)} can't be written to by this user"
        elif name == "build folder" and machine.compiles and "noexec" in options:
            level, cause = "fault", "mounted noexec: the toolkit's programs can't run there"
        elif kind in _REMOTE:
            level, cause = "warning", "a network file system: slow for thousands of small files"
        elif kind in ("tmpfs", "ramfs"):
            level, cause = "warning", "it lies in memory, which the compilers need"
        if cause:
            variable = "SM121_BUILD" if name == "build folder" else "SM121_CACHE"
            remedy = f"Put it on a local disk that is yours: {variable}=/path."
        yield Check(
            name=name, found=f"{folder} on {kind or 'an unknown file system'} ({source or '?'})",
            build=level, run="not needed", cause=cause, remedy=remedy,
        )  # fmt: skip


def mount_of(folder: Path, mounts: str) -> tuple[str, tuple[str, ...], str]:
    """Type, options and device of the mount that holds a folder (proc(5), /proc/mounts)."""
    best: tuple[int, tuple[str, tuple[str, ...], str]] = (-1, ("", (), ""))
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        # Spaces and such are octal escapes there.
        point = Path(fields[1].encode().decode("unicode_escape"))
        # A later mount on the same folder hides an earlier one.
        if folder.is_relative_to(point) and len(point.parts) >= best[0]:
            best = (len(point.parts), (fields[2], tuple(fields[3].split(",")), fields[0]))
    return best[1]
