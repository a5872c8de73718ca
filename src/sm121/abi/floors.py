"""Checks: symbol versions against the system's newest, and abi3 files against their tag."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from sm121.abi.context import Context, exemption, finding
from sm121.abi.facts import Binary, Wheel
from sm121.abi.report import Finding
from sm121.abi.scan import expand_tags

_VERSION = re.compile(r"([A-Z][A-Z_]*[A-Z])_(\d+(?:\.\d+)*)")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def floors_of(wheel: Wheel, context: Context) -> dict[str, str]:
    """Prefix (GLIBC, GLIBCXX, …) → newest version that any file of the wheel asks for."""
    newest: dict[str, str] = {}
    for binary in wheel.binaries:
        for prefix, version in _asked(binary, context):
            if prefix not in newest or numbers(version) > numbers(newest[prefix]):
                newest[prefix] = version
    return dict(sorted(newest.items()))


def _asked(binary: Binary, context: Context) -> Iterator[tuple[str, str]]:
    known = context.policy.targets[context.target.name].floors  # type: ignore[index]
    if binary.elf is None or binary.elf.machine != context.target.machine:
        return
    for _, versions in binary.elf.needs_versions:
        for text in versions:
            match = _VERSION.fullmatch(text)
            if match and match[1] in known:
                yield match[1], match[2]


def check_floors(context: Context) -> Iterator[Finding]:
    """A version newer than the target's system has makes the loader refuse the file."""
    policy = context.policy.targets[context.target.name]  # type: ignore[index]
    for wheel in context.subjects:
        for binary in wheel.binaries:
            for prefix, version in dict.fromkeys(_asked(binary, context)):
                if numbers(version) > numbers(policy.floors[prefix]):
                    yield finding(
                        "floor", wheel, binary.path,
                        f"needs {prefix}_{version}; the target has {prefix}_{policy.floors[prefix]}",
                        exempt=exemption(context.policy.optional, binary.path, wheel),
                        why=policy.why, names=[f"{prefix}_{version}"],
                    )  # fmt: skip


@cache
def stable_abi() -> dict[str, tuple[int, int]]:
    """Symbol of CPython's stable ABI → the version that added it (CPython's stable_abi.toml)."""
    from abi3info import DATAS, FUNCTIONS

    return {
        str(symbol.name): (one.added.major, one.added.minor)
        for table in (FUNCTIONS, DATAS)
        for symbol, one in table.items()
    }


def abi3_needs(binary: Binary) -> tuple[tuple[int, int], list[str], list[str]]:
    """(lowest CPython, symbols that make it so, symbols that are in no stable ABI)."""
    lowest, because, foreign = (3, 2), [], []
    known = stable_abi()
    for symbol in binary.elf.imports if binary.elf else ():
        if symbol.weak or not symbol.name.startswith(("Py", "_Py")):
            continue
        added = known.get(symbol.name)
        if added is None:
            foreign.append(symbol.name)
        elif added > lowest:
            lowest, because = added, [symbol.name]
        elif added == lowest:
            because.append(symbol.name)
    return lowest, because, foreign


def check_abi3(context: Context) -> Iterator[Finding]:
    """Files named .abi3.so need no newer CPython than the wheel's tag and the target have."""
    target = tuple(int(part) for part in context.target.python.split("."))
    for wheel in context.subjects:
        tagged = [
            (int(python[2]), int(python[3:]))
            for python, abi, _ in expand_tags(wheel.tags)
            if abi == "abi3" and re.fullmatch(r"cp\d\d+", python)
        ]
        for binary in wheel.binaries:
            if not binary.name.endswith(".abi3.so"):
                continue
            lowest, because, foreign = abi3_needs(binary)
            rule = exemption(context.policy.tags, binary.path, wheel)
            text = f"{lowest[0]}.{lowest[1]}"
            if foreign:
                yield finding(
                    "abi3", wheel, binary.path,
                    f"is named abi3 and uses symbols outside the stable ABI: {', '.join(foreign[:4])}",
                    exempt=rule, names=foreign,
                )  # fmt: skip
            if lowest > target:
                yield finding(
                    "abi3", wheel, binary.path,
                    f"needs CPython {text} ({because[0]}); the target has {context.target.python}",
                    names=because,
                )  # fmt: skip
            elif tagged and lowest > min(tagged):
                low = min(tagged)
                yield finding(
                    "abi3", wheel, binary.path,
                    f"needs CPython {text} ({', '.join(because[:3])}); the wheel's tag promises "
                    f"{low[0]}.{low[1]}",
                    exempt=rule, names=because,
                )  # fmt: skip
