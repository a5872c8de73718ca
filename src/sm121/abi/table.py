"""The report for a person: short where all is well, whole sentences where it is not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from sm121.abi.report import ComponentRow, Finding, Report
from sm121.ui import human_bytes, human_seconds

_WORDS = {
    "symbol": "undefined symbols", "library": "missing libraries", "damaged": "damaged files",
    "archive": "archives", "machine": "wrong machine", "tag": "wheel tags", "abi3": "stable ABI",
    "symbol-version": "symbol versions", "floor": "system too old", "search-path": "search paths",
    "gpu-code": "GPU code", "component": "components", "ownership": "file ownership",
    "cuda-build": "CUDA builds", "nccl": "NCCL", "family": "versions", "mixture": "mixed packages",
    "patch": "patches", "import": "imports",
}  # fmt: skip
_BAR = 20
_SHOWN = 12


def render_table(report: Report) -> list[str]:
    """Lines without colour or trailing newline. Faults come last, next to the prompt."""
    return list(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    binaries = sum(row.binaries for row in report.wheels)
    symbols = sum(row.symbols for row in report.wheels)
    profile = f", profile {report.profile}" if report.profile else ""
    yield (
        f"{len(report.wheels)} wheel(s), {binaries} binaries, {symbols} symbols looked up, for "
        f"{report.target}, CPython {report.python}, GPU {report.arch}{profile}"
    )
    if report.against:
        yield f"loaded with {len(report.against)} other wheel(s), which are not judged"
    yield from _gpu(report)
    if report.family:
        yield ""
        width = max(len(row.name) for row in report.family)
        yield "The family"
        for row in report.family:
            mark = "ok  " if row.result == "pass" else "FAIL"
            text = row.text or (f"wanted {row.wanted}" if row.result == "fail" else "")
            yield f"{row.name:<{width}}  {mark} {row.found}  {text}".rstrip()
    notes = [f for f in report.findings if f.severity == "note"]
    if notes:
        yield ""
        yield "no fault, each for a reason:"
        yield from _notes(notes)
    yield from _ran(report)
    reasons: dict[str, list[str]] = defaultdict(list)
    for one in report.not_run:
        reasons[one.reason].append(one.check)
    for reason, checks in reasons.items():
        more = f" and {len(checks) - 2} more" if len(checks) > 2 else ""
        yield f"not run: {', '.join(checks[:2])}{more}: {reason}"
    yield from _faults(report)


def fits(report: Report) -> str:
    """The verdict of a report without faults, which must not say more than was found."""
    if report.gpu_gaps:
        return "every binary loads, and policy has a reason for each object without native code"
    return "every binary fits"


def how_run(report: Report) -> str:
    """One sentence on the dynamic part; empty if it was not run."""
    ran = report.ran
    if ran is None:
        return ""
    good = sum(row.result == "pass" for row in ran.imports)
    left = sum(row.result == "not run" for row in ran.imports)
    driver = {
        "stub": "a stub in place of the GPU's driver", "real": "this machine's driver",
        "none": "no GPU driver",
    }[ran.driver]  # fmt: skip
    place = "from the wheels alone" if ran.complete else "with the lock's wheels around them"
    bare = f"; without running {', '.join(ran.bare)}/__init__.py" if ran.bare else ""
    return (
        f"{ran.how} CPython {ran.python} imported {good} of {len(ran.imports)} {place}, with "
        f"{driver}{bare}{f'; {left} could not be run' if left else ''} ({human_seconds(ran.seconds)})"
    )


def _ran(report: Report) -> Iterator[str]:
    if report.ran is None:
        return
    yield ""
    yield how_run(report)
    names = [row.module for row in report.ran.imports if row.result == "pass"]
    if names:
        yield f"  imported: {', '.join(names[:_SHOWN])}" + (" …" if len(names) > _SHOWN else "")


def _gpu(report: Report) -> Iterator[str]:
    with_code = [row for row in report.components if row.sass + row.ptx + row.none]
    rows = [row for row in report.components if row.result == "fail"]
    rows += [row for row in with_code if row.wheel.startswith("vllm-") and row not in rows]
    rest = [row for row in with_code if row not in rows]
    if not with_code and not rows:
        return
    yield ""
    width = max([len(row.component) for row in rows] + [10])
    yield f"{'GPU code':<{width}}  {'# native  + JIT  . none':<{_BAR + 12}}  SASS   PTX  none"
    for row in rows:
        size = human_bytes(row.bytes) if row.bytes else ""
        mark = "" if row.result == "pass" else "  FAIL"
        yield (
            f"{row.component:<{width}}  {bar(row):<{_BAR}} {size:>9}   "
            f"{row.sass:5} {row.ptx:5} {row.none:5}{mark}"
        )
    if rest:
        native = sum(row.sass > 0 for row in rest)
        jit = sum(not row.sass and row.ptx > 0 for row in rest)
        yield (
            f"{len(rest)} other libraries with GPU code: {native} native, {jit} by JIT, "
            f"{len(rest) - native - jit} with none (see --html)"
        )


def bar(row: ComponentRow, width: int = _BAR) -> str:
    """'####++..': shares of native, JIT and none; every share that is not zero is seen."""
    total = row.sass + row.ptx + row.none
    if not total:
        return "-" * width if row.verdict == "missing" else ""
    parts = [(row.sass, "#"), (row.ptx, "+"), (row.none, ".")]
    cells = {sign: max(1, round(width * count / total)) for count, sign in parts if count}
    while sum(cells.values()) > width:
        largest = max(cells, key=lambda sign: cells[sign])
        cells[largest] -= 1
    while sum(cells.values()) < width:
        largest = max(cells, key=lambda sign: cells[sign])
        cells[largest] += 1
    return "".join(sign * count for sign, count in cells.items())


def _notes(notes: list[Finding]) -> Iterator[str]:
    grouped: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for note in notes:
        grouped[note.kind, note.why].append(note)
    for (kind, why), group in grouped.items():
        files = Counter(f.file or f.wheel for f in group)
        first = next(iter(files))
        others = f" and {len(files) - 1} more" if len(files) > 1 else ""
        yield f"  {_WORDS[kind]}: {first}{others}"
        yield f"    {why or group[0].text}"


def _faults(report: Report) -> Iterator[str]:
    yield ""
    faults = report.faults
    if not faults:
        yield f"PASS: {fits(report)}."
        if report.gpu_gaps:
            yield f"      {report.gpu_gaps}"
        return
    grouped: dict[str, list[Finding]] = defaultdict(list)
    for fault in faults:
        grouped[fault.kind].append(fault)
    for kind, group in grouped.items():
        yield f"{_WORDS[kind]}:"
        by_file: dict[tuple[str, str], list[Finding]] = defaultdict(list)
        for fault in group:
            by_file[fault.wheel, fault.file].append(fault)
        for (wheel, file), ones in by_file.items():
            yield f"  {file or wheel or 'the set'}" + (f"  ({wheel})" if file and wheel else "")
            for fault in ones[:_SHOWN]:
                yield f"    {fault.text}"
            if len(ones) > _SHOWN:
                yield f"    … and {len(ones) - _SHOWN} more: see --json"
    broken = len({f.wheel for f in faults if f.wheel})
    yield ""
    yield f"FAIL: {len(faults)} fault(s) in {broken} wheel(s)."
