"""Step `extensions`: its row, out of what verify-abi's dynamic part reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sm121.abi.report import Finding, ImportRow, Ran, Report
from sm121.target.model import How, Row

STEP = "extensions"
NOT_RUN = "not run: "


def extensions_row(report: Report, how: How) -> Row:
    """Passed if every module was imported, but for those that can't be here: each of them is named
    with its reason. facts: what came of each module."""
    ran = report.ran
    if ran is None:
        why = "; ".join(n.reason for n in report.not_run if n.check.startswith("imports"))
        return _not_run(why or "no import was run")
    if not ran.imports:
        return _not_run("there is no extension module in it")
    facts = {row.module: _fact(row) for row in ran.imports}
    faults = [f for f in report.faults if f.kind == "import"]
    left = _left([row for row in ran.imports if row.result == "not run"])
    if faults:
        return Row(
            step=STEP, how=how, verdict="fail", text=said(faults, "--json has all"), facts=facts
        )
    names = [row.module for row in ran.imports if row.result == "pass"]
    if not names:
        return Row(step=STEP, how="not run", verdict="not run", text=left, facts=facts)
    text = "; ".join(part for part in (_imported(names, ran), left) if part)
    return Row(step=STEP, how=how, verdict="pass", text=text, facts=facts)


def not_imported(rows: Iterable[Row]) -> list[str]:
    """Modules that were not run, of the step's row."""
    facts = {k: v for row in rows if row.step == STEP for k, v in row.facts.items()}
    return sorted(module for module, text in facts.items() if text.startswith(NOT_RUN))


def _fact(row: ImportRow) -> str:
    return f"{row.result}: {row.text}" if row.text else row.result


def _imported(names: Sequence[str], ran: Ran) -> str:
    bare = f" (without running {', '.join(ran.bare)}/__init__.py)" if ran.bare else ""
    return f"imported: {_listed(names, 8)}{bare}"


def _left(rows: Sequence[ImportRow]) -> str:
    """What was not run: how many, and each reason."""
    if not rows:
        return ""
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        reasons[row.text].append(row.module)
    told = "; ".join(f"{_listed(names, 2)}: {why}" for why, names in reasons.items())
    return f"{len(rows)} {NOT_RUN}{told}"


def _listed(names: Sequence[str], shown: int) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def said(faults: Sequence[Finding], rest: str) -> str:
    """The first faults, and how many more there are. rest: where those are."""
    first = [f"{f.file or f.wheel}: {f.text}".removeprefix(": ") for f in faults[:3]]
    more = f" and {len(faults) - 3} more ({rest})" if len(faults) > 3 else ""
    return "; ".join(first) + more


def _not_run(why: str) -> Row:
    return Row(step=STEP, how="not run", verdict="not run", text=why, facts={})
