"""Checks: sound archive, right machine, right tags, and search paths that hold on a target."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sm121.abi.context import Context, exemption, finding
from sm121.abi.facts import Wheel
from sm121.abi.report import Finding
from sm121.abi.scan import expand_tags

# ELF files that a GPU or a kernel loads, not the process.
_DEVICE = ("cuda", "amdgpu", "bpf")


def check_identity(context: Context) -> Iterator[Finding]:
    """Damage, machine of every file, and the wheel's tags against target and content."""
    for wheel in context.subjects:
        if wheel.damage:
            yield finding("archive", wheel, "", wheel.damage)
        machines: set[str] = set()
        for binary in wheel.binaries:
            elf = binary.elf
            if binary.damage:
                yield finding("damaged", wheel, binary.path, binary.damage)
            if elf is None or elf.machine in _DEVICE:
                continue
            machines.add(elf.machine)
            if elf.machine != context.target.machine or elf.bits != 64:
                yield finding(
                    "machine", wheel, binary.path,
                    f"is {elf.bits}-bit {elf.machine} code; the target is {context.target.machine}",
                    exempt=exemption(context.policy.machines, binary.path, wheel),
                    names=[elf.machine],
                )  # fmt: skip
        if wheel.tags:
            yield from _tags(context, wheel, machines)


def _tags(context: Context, wheel: Wheel, machines: set[str]) -> Iterator[Finding]:
    accepted = {str(tag) for tag in context.target.tags()}
    if not accepted.intersection(wheel.tags):
        yield finding(
            "tag", wheel, "",
            f"no matching platform tag: {', '.join(wheel.tags[:3])} cannot be installed on "
            f"{context.target.tag} (glibc {context.target.glibc[0]}.{context.target.glibc[1]})",
            why="pip and uv would refuse it there", names=wheel.tags,
        )  # fmt: skip
    platforms = {platform for _, _, platform in expand_tags(wheel.tags)}
    promised = {p.rpartition("_")[2] if not p.endswith("x86_64") else "x86_64" for p in platforms}
    rule = exemption(context.policy.tags, "", wheel)
    if platforms == {"any"} and machines:
        yield finding(
            "tag", wheel, "", f"is tagged 'any' and holds {', '.join(sorted(machines))} code",
            exempt=rule, names=sorted(machines),
        )  # fmt: skip
    elif machines and not machines & promised and platforms != {"any"}:
        yield finding(
            "tag", wheel, "",
            f"is tagged {', '.join(sorted(platforms))} and holds {', '.join(sorted(machines))} code",
            exempt=rule, names=sorted(machines),
        )  # fmt: skip
    yield from _glibc_tag(context, wheel, platforms)


def _glibc_tag(context: Context, wheel: Wheel, platforms: set[str]) -> Iterator[Finding]:
    """PEP 600: manylinux_X_Y promises to need no newer glibc than X.Y."""
    promised = [(int(m[1]), int(m[2])) for p in platforms
                if (m := re.match(r"manylinux_(\d+)_(\d+)_", p))]  # fmt: skip
    legacy = {"manylinux2014": (2, 17), "manylinux2010": (2, 12), "manylinux1": (2, 5)}
    promised += [v for name, v in legacy.items() if any(p.startswith(name) for p in platforms)]
    if not promised or any(p.startswith("linux_") for p in platforms):
        return
    for binary in wheel.binaries:
        for _, versions in binary.elf.needs_versions if binary.elf else ():
            for text in versions:
                match = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", text)
                if match and (int(match[1]), int(match[2])) > max(promised):
                    low = max(promised)
                    yield finding(
                        "tag", wheel, binary.path,
                        f"needs {text}; the wheel's tag promises glibc {low[0]}.{low[1]}",
                        note=True, names=[text],
                    )  # fmt: skip


def check_paths(context: Context) -> Iterator[Finding]:
    """RPATH and RUNPATH must be relative to the file and stay inside site-packages.

    An absolute entry is a folder of the machine that built it; an empty one is the current
    directory of whoever runs Python (ld.so(8)), which anyone can write to.
    """
    for wheel in context.subjects:
        for binary in wheel.binaries:
            elf = binary.elf
            if elf is None:
                continue
            for name, value in (("RPATH", elf.rpath), ("RUNPATH", elf.runpath)):
                if value is None:
                    continue
                for entry in value.split(":"):
                    if problem := _entry_problem(entry, binary.path):
                        yield finding(
                            "search-path", wheel, binary.path, f"{name} {value!r}: {problem}",
                            exempt=exemption(context.policy.paths, binary.path, wheel),
                            names=[entry],
                        )  # fmt: skip


def _entry_problem(entry: str, owner: str) -> str:
    if not entry:
        return "an empty entry, which means the current directory"
    plain = entry.replace("${ORIGIN}", "$ORIGIN")
    if plain.startswith("/"):
        return f"{entry} is an absolute path, a folder of the machine that built it"
    if not plain.startswith("$ORIGIN"):
        return f"{entry} is relative to the current directory"
    depth = owner.count("/")
    for part in plain.removeprefix("$ORIGIN").split("/"):
        depth += {"..": -1, "": 0, ".": 0}.get(part, 1)
        if depth < 0:
            return f"{entry} leaves site-packages"
    return ""
