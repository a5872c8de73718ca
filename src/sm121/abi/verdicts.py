"""What each import means: a fault, or why it is none. A failure without a reason is a fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sm121.abi.context import Context, exemption, finding
from sm121.abi.modules import Extension
from sm121.abi.report import Finding, ImportRow, NotRun

_LONGEST = 400  # characters; packages append whole tracebacks to their errors


def judge_imports(
    context: Context, modules: Sequence[Extension], rows: Mapping[str, ImportRow]
) -> tuple[list[ImportRow], list[Finding], list[NotRun]]:
    """Rows by name, findings, and what was not run. What policy lets fail (`optional`) was not run
    either: its row says why."""
    owners = {b.path: wheel for wheel in context.subjects for b in wheel.binaries}
    files = {one.label: one.file for one in modules}
    judged: list[ImportRow] = []
    found: list[Finding] = []
    not_run = [
        NotRun(check=f"import {name}", reason="it was not asked for")
        for name in files if name not in rows
    ]  # fmt: skip
    for name, row in sorted(rows.items()):
        file = files.get(name, "")
        wheel = owners.get(file)
        if row.result == "fail":
            text = f"{name}: {_short(row.text)}"
            rule = exemption(context.policy.optional, file, wheel) if wheel else None
            found.append(finding("import", wheel, file, text, exempt=rule, names=[name]))
            if rule:
                row = dataclasses.replace(
                    row, result="not run", text=f"{_short(row.text)} ({rule.why})"
                )
        if row.result == "not run":
            not_run.append(NotRun(check=f"import {name}", reason=row.text))
        judged.append(row)
    return judged, found, not_run


def _short(text: str) -> str:
    """On one line, and not without end."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
