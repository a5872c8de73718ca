"""The longest objects first: ninja, with the objects of build.ninja in order of their cost.

    python -IS order.py NINJA ARGUMENTS...

CMake runs it as its build program (CMAKE_MAKE_PROGRAM). ninja up to 1.13 gives every compile
the same weight (build.cc, EdgeWeightHeuristic: 1, whatever .ninja_log says) and breaks ties by
the order of statements in build.ninja, which is that of the source lists. So that order is what
can be changed, and only that: the order in which objects are linked, and with it the library,
stays. CMake writes build.ninja anew before each build; its time is kept, so that ninja sees no
change.

Standard library only: it is started with -IS, before ninja.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping

_STATEMENT = re.compile(r"^build (\S+): \w*_COMPILER__", re.MULTILINE)
# A statement ends at the first line that is neither indented nor continued (ninja manual).
_END = re.compile(r"(?<!\$)\n(?! )")


def objects_of(rules: str) -> list[str]:
    """The objects that a build.ninja of CMake's compiles, as ninja names them, in its order."""
    return _STATEMENT.findall(rules)


def longest_first(text: str, seconds: Mapping[str, float]) -> str:
    """build.ninja with its compile statements sorted, the dearest first.

    seconds: what each object was measured to take; one that was never measured counts as the
    mean. Everything else stays where it is.
    """
    if not seconds:
        return text
    mean = sum(seconds.values()) / len(seconds)
    spans = []
    for match in _STATEMENT.finditer(text):
        end = _END.search(text, match.start())
        spans.append((match.start(), end.start() if end else len(text), match[1]))
    ordered = sorted(spans, key=lambda span: -seconds.get(span[2], mean))
    parts, position = [], 0
    for slot, chosen in zip(spans, ordered, strict=True):
        parts += [text[position : slot[0]], text[chosen[0] : chosen[1]]]
        position = slot[1]
    return "".join([*parts, text[position:]])


def sort_file(path: str, settings: str) -> None:
    """Sort build.ninja in place, by the costs that the launcher's settings hold."""
    with open(settings, encoding="utf-8") as file:
        objects = json.load(file)["objects"]
    with open(path, encoding="utf-8") as file:
        text = file.read()
    ordered = longest_first(text, {name: float(cost["cpu"]) for name, cost in objects.items()})
    if ordered == text:
        return
    times = os.stat(path)
    with open(f"{path}.ordered", "w", encoding="utf-8") as file:
        file.write(ordered)
    os.utime(f"{path}.ordered", ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(f"{path}.ordered", path)


def main(argv: list[str]) -> None:
    """Sort, if this is a build, and become ninja."""
    settings = os.environ.get("SM121_LAUNCH")
    if settings and "-t" not in argv and "--version" not in argv:
        # No build.ninja here, or no settings: ninja has its own words for what is wrong.
        with contextlib.suppress(OSError, ValueError, KeyError):
            sort_file("build.ninja", settings)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
