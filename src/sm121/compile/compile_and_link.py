"""A C++ compiler for scripts that compile and link one source in one command.

    python -IS compile_and_link.py OBJECT -- LAUNCHER... -- CXX -- COMPILE... -- LINK... -- ARGUMENTS...

Splits ARGUMENTS (as for `c++ -shared ... source.cpp -o library.so`) in two: the compile goes
through the launcher, and so takes memory from the common budget, is recorded and can come out of
ccache; the link follows. COMPILE and LINK are options put before those of ARGUMENTS.

Standard library only: it is started with -IS.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def commands(argv: list[str]) -> tuple[list[str], list[str]]:
    """The compile and the link. Raises ValueError for a command of another form."""
    (target,), launcher, (cxx,), compiling, linking, arguments = split(argv)
    at = arguments.index("-o")
    output, rest = arguments[at + 1], arguments[:at] + arguments[at + 2 :]
    sources = [a for a in rest if a.endswith((".cpp", ".cc", ".cxx"))]
    if len(sources) != 1 or "-shared" not in rest:
        raise ValueError(f"not a shared library of one source: {' '.join(arguments)}")
    for_link = [a for a in rest if a == "-shared" or a.startswith(("-L", "-l", "-Wl,"))]
    for_compile = [a for a in rest if a not in for_link and a not in sources]
    compiled = [*launcher, cxx, *compiling, *for_compile, "-c", sources[0], "-o", target]
    # -f options (-fPIC) count for both.
    common = [a for a in for_compile if a.startswith("-f")]
    return compiled, [cxx, *common, *linking, target, *for_link, "-o", output]


def split(argv: list[str]) -> list[list[str]]:
    """The six parts; only the first five '--' separate."""
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == "--" and len(parts) < 6:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def main(argv: list[str]) -> int:
    compiling, linking = commands(argv)
    Path(compiling[-1]).parent.mkdir(parents=True, exist_ok=True)
    for command in (compiling, linking):
        if code := subprocess.run(command, check=False).returncode:
            return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
