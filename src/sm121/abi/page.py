"""The report as one HTML page: no script, no request to anywhere, readable in print.

Everything from a wheel is untrusted text, so every value goes through `html.escape`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from sm121.abi.report import BinaryRow, ComponentRow, Finding, Report
from sm121.abi.table import _WORDS, fits, how_run
from sm121.ui import human_bytes

_SHOWN = 40


def to_html(report: Report, *, jit: str = "") -> str:
    """A whole page. jit: the section about kernels that are compiled on the node, as HTML."""
    body = "\n".join(
        part for part in (
            _head(report), _faults(report), _gpu(report), _family(report), _loading(report),
            _ran(report), jit, _wheels(report), _notes(report), _not_run(report),
        ) if part
    )  # fmt: skip
    return html_page(f"verify-abi: {report.result.upper()}", body)


def html_page(title: str, body: str) -> str:
    """A page in this project's style. body: HTML, escaped by whoever made it."""
    style = (files("sm121.abi") / "page.css").read_text("utf-8")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _head(report: Report) -> str:
    faults = len(report.faults)
    sentence = (
        f"It will load on the target, with exactly these libraries: {fits(report)}."
        + (f" There are {report.gpu_gaps}." if report.gpu_gaps else "")
        if report.result == "pass"
        else f"{faults} fault{'s' if faults != 1 else ''} found. Each is explained below."
    )
    figures = [
        ("wheels", f"{len(report.wheels)}"),
        ("binaries", f"{sum(w.binaries for w in report.wheels)}"),
        ("symbols looked up", f"{sum(w.symbols for w in report.wheels):,}"),
        ("target", report.target), ("CPython", report.python), ("GPU", f"sm_{report.arch.replace('.', '')}"),
    ]  # fmt: skip
    if report.profile:
        figures.append(("profile", report.profile))
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures)
    return (
        f'<header class="{report.result}"><p class="verdict">{report.result.upper()}</p>'
        f"<h1>Do these binaries fit?</h1><p>{escape(sentence)}</p><dl>{cells}</dl></header>"
    )


def _faults(report: Report) -> str:
    if not report.faults:
        return ""
    grouped: dict[str, dict[tuple[str, str], list[Finding]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for fault in report.faults:
        grouped[fault.kind][fault.wheel, fault.file].append(fault)
    parts = ["<section><h2>What is wrong</h2>"]
    for kind, places in grouped.items():
        parts.append(f"<h3>{escape(_WORDS[kind].capitalize())}</h3>")
        for (wheel, file), faults in places.items():
            place = f"<code>{escape(file or wheel or 'the set')}</code>"
            if file and wheel:
                place += f' <span class="dim">in {escape(wheel)}</span>'
            items = "".join(_item(f) for f in faults[:_SHOWN])
            if len(faults) > _SHOWN:
                items += f"<li>… and {len(faults) - _SHOWN} more (all are in the JSON report)</li>"
            parts.append(f'<div class="fault"><p>{place}</p><ul>{items}</ul></div>')
    parts.append(_symbols(report))
    return "\n".join(parts) + "</section>"


def _item(fault: Finding) -> str:
    why = f' <span class="dim">{escape(fault.why)}</span>' if fault.why else ""
    return f"<li>{escape(fault.text)}{why}</li>"


def _symbols(report: Report) -> str:
    if not report.open_symbols:
        return ""
    rows = "".join(
        f"<tr><td><code>{escape(s.demangled)}</code></td><td><code>{escape(s.needed_by)}</code></td>"
        f"<td>{escape(s.expected_in)}</td><td>{escape(', '.join(s.found_in)) or '<span class=dim>not known</span>'}</td></tr>"
        for s in report.open_symbols[:200]
    )
    return (
        "<h3>Symbols that nobody has</h3><table><thead><tr><th>symbol</th><th>needed by</th>"
        f"<th>should be in</th><th>is in</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _gpu(report: Report) -> str:
    own = [c for c in report.components if c.wheel.startswith("vllm") or c.result == "fail"]
    rest = [c for c in report.components if c not in own]
    if not report.components:
        return ""
    legend = (
        '<p class="legend"><span class="key sass"></span> native code'
        '<span class="key ptx"></span> PTX, compiled by the driver at first use'
        '<span class="key none"></span> nothing that this GPU can use</p>'
    )
    parts = [f"<section><h2>What the GPU gets</h2>{legend}"]
    if own:
        parts.append(_bars(own))
    if rest:
        table = _bars(rest)
        parts.append(
            table if not own
            else f"<details><summary>{len(rest)} other libraries with GPU code</summary>{table}</details>"
        )  # fmt: skip
    return "\n".join(parts) + "</section>"


def _bars(rows: Iterable[ComponentRow]) -> str:
    body = "".join(
        f'<tr class="{row.result}"><td><code>{escape(row.component)}</code></td>'
        f"<td>{_bar(row)}</td><td class=num>{row.sass or ''}</td><td class=num>{row.ptx or ''}</td>"
        f"<td class=num>{row.none or ''}</td><td class=num>{human_bytes(row.bytes) if row.bytes else ''}</td>"
        f"<td>{_verdict(row)}</td></tr>"
        for row in rows
    )
    return (
        '<table class="gpu"><thead><tr><th>component</th><th class="wide">objects</th>'
        "<th class=num>native</th><th class=num>PTX</th><th class=num>none</th>"
        f"<th class=num>size</th><th>verdict</th></tr></thead><tbody>{body}</tbody></table>"
    )


def _bar(row: ComponentRow) -> str:
    total = row.sass + row.ptx + row.none
    if not total:
        return ""
    label = f"{row.sass} native, {row.ptx} PTX, {row.none} none"
    spans = "".join(
        f'<span class="{name}" style="flex-grow:{count}"></span>'
        for name, count in (("sass", row.sass), ("ptx", row.ptx), ("none", row.none))
        if count
    )
    return f'<div class="bar" role="img" aria-label="{label}" title="{label}">{spans}</div>'


def _verdict(row: ComponentRow) -> str:
    word = "" if row.result == "pass" else '<strong class="fail">FAIL</strong> '
    plain = {
        "native": "native", "native+ptx": "native, some by JIT", "ptx": "by JIT only",
        "none": "nothing", "no gpu code": "host code only", "missing": "missing", "mixed": "partly",
    }  # fmt: skip
    why = f'<br><span class="dim">{escape(row.why)}</span>' if row.why else ""
    return f"{word}{plain[row.verdict]}{why}"


def _family(report: Report) -> str:
    if not report.family:
        return ""
    rows = "".join(
        f'<tr class="{row.result}"><td>{escape(row.name)}</td><td><code>{escape(row.found)}</code></td>'
        f"<td>{escape(row.wanted)}</td><td>{'ok' if row.result == 'pass' else '<strong class=fail>FAIL</strong>'}"
        f" {escape(row.text)}</td></tr>"
        for row in report.family
    )
    return (
        "<section><h2>The family</h2><table><thead><tr><th>who</th><th>found</th><th>wanted</th>"
        f"<th>verdict</th></tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _loading(report: Report) -> str:
    """Symbol verdicts: vLLM's files and failed ones in sight, the others folded."""
    rows = [b for b in report.binaries if b.loadable]
    bad = {(f.wheel, f.file) for f in report.faults if f.kind in ("symbol", "library")}
    shown = [b for b in rows if b.wheel.startswith("vllm") or (b.wheel, b.file) in bad]
    rest = [b for b in rows if b not in shown]
    if not rows:
        return ""
    parts = ["<section><h2>What the loader finds</h2>"]
    if shown:
        parts.append(_binary_table(shown))
    if rest:
        inner = _binary_table(rest)
        parts.append(f"<details><summary>{len(rest)} other files</summary>{inner}</details>")
    return "".join(parts) + "</section>"


def _binary_table(rows: Iterable[BinaryRow]) -> str:
    body = "".join(
        f"<tr><td><code>{escape(row.file)}</code></td><td class=num>{row.symbols:,}</td>"
        f"<td>{_binary_verdict(row)}</td></tr>"
        for row in rows
    )
    return (
        "<table><thead><tr><th>file</th><th class=num>symbols it needs</th><th>verdict</th></tr>"
        f"</thead><tbody>{body}</tbody></table>"
    )


def _binary_verdict(row: BinaryRow) -> str:
    if not row.open and not row.libraries:
        return "all found"
    text = []
    if row.libraries:
        text.append(f"no {escape(', '.join(row.libraries[:4]))}")
    if row.open:
        text.append(f"{row.open} not found")
    said = "; ".join(text)
    if row.allowed:
        return f'{said} <span class="dim">(optional)</span>'
    return f'<strong class="fail">FAIL</strong> {said}'


def _wheels(report: Report) -> str:
    rows = [row for row in report.wheels if row.binaries or row.faults]
    body = "".join(
        f'<tr class="{row.result}"><td><code>{escape(row.filename)}</code></td>'
        f"<td class=num>{row.binaries}</td><td class=num>{row.symbols:,}</td>"
        f"<td>{escape(', '.join(f'{k} {v}' for k, v in row.floors.items()))}</td>"
        f"<td>{'ok' if row.result == 'pass' else f'<strong class=fail>{row.faults} fault(s)</strong>'}</td></tr>"
        for row in rows
    )
    pure = len(report.wheels) - len(rows)
    table = (
        "<table><thead><tr><th>wheel</th><th class=num>binaries</th><th class=num>symbols</th>"
        f"<th>needs at least</th><th>verdict</th></tr></thead><tbody>{body}</tbody></table>"
    )
    more = f'<p class="dim">and {pure} wheel(s) without binaries</p>' if pure else ""
    inner = table + more
    if len(rows) > 12:
        inner = f"<details><summary>{len(rows)} wheels with binaries</summary>{inner}</details>"
    return f"<section><h2>Wheels</h2>{inner}</section>"


def _notes(report: Report) -> str:
    grouped: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for note in report.findings:
        if note.severity == "note":
            grouped[note.kind, note.why or note.text].append(note)
    if not grouped:
        return ""
    parts = []
    for (kind, why), group in grouped.items():
        places = sorted({n.file or n.wheel for n in group})
        shown = ", ".join(f"<code>{escape(p)}</code>" for p in places[:4])
        more = f" and {len(places) - 4} more" if len(places) > 4 else ""
        parts.append(
            f"<li><strong>{escape(_WORDS[kind])}</strong>: {escape(why)}<br>{shown}{more}</li>"
        )
    return (
        "<section><h2>Allowed, and why</h2><p class=dim>Findings that policy says are no fault.</p>"
        f"<ul>{''.join(parts)}</ul></section>"
    )


def _ran(report: Report) -> str:
    if report.ran is None:
        return ""
    words = {"pass": "ok", "fail": "<strong class=fail>FAIL</strong>", "not run": "not run:"}
    rows = "".join(
        f'<tr class="{row.result}"><td><code>{escape(row.module)}</code></td><td>'
        f"{words[row.result]} {escape(row.text)}</td></tr>"
        for row in report.ran.imports
    )
    table = f"<table><thead><tr><th>module</th><th>verdict</th></tr></thead><tbody>{rows}</tbody></table>"
    if len(report.ran.imports) > 20:
        table = f"<details><summary>{len(report.ran.imports)} modules</summary>{table}</details>"
    return f"<section><h2>What was imported</h2><p>{escape(how_run(report))}</p>{table}</section>"


def _not_run(report: Report) -> str:
    if not report.not_run:
        return ""
    items = "".join(
        f"<li><strong>{escape(n.check)}</strong>: {escape(n.reason)}</li>" for n in report.not_run
    )
    return f"<section><h2>Not run</h2><ul>{items}</ul></section>"
