"""Read what importer.py told, out of all that was printed."""

from __future__ import annotations

import json
from typing import Literal

from sm121.abi.importer import MARK

Verdict = tuple[Literal["pass", "fail"], str]


def read_told(output: str) -> tuple[dict[str, Verdict], str]:
    """Verdicts by name, in their order; and which one it was at when it ended, '' if at none.

    Modules print to the same place. A line of that form which is not the importer's makes a verdict
    on the module that was being imported doubtful, so it is a failure of that module. Outside of any
    (when Python ends) it is nobody's, and nothing is read out of it.
    """
    told: dict[str, Verdict] = {}
    current = ""
    for line in output.splitlines():
        if not line.startswith(MARK):
            continue
        name, state, text = _fields(line.removeprefix(MARK))
        if state == "begin" and not current:
            current = name
        elif state in ("pass", "fail") and name == current:
            told.setdefault(name, ("pass" if state == "pass" else "fail", text))
            current = ""
        elif current:
            told[current] = ("fail", f"printed a line that only the importer is to print: {line}")
    return told, current


def _fields(line: str) -> tuple[str, str, str]:
    """Name, state and text; empty ones if it has none."""
    try:
        name, state, text = json.loads(line)
    except (ValueError, TypeError):
        return "", "", ""
    return str(name), str(state), str(text)
