"""The report as one HTML page, and as a section for other pages."""

from __future__ import annotations

from html import escape

from sm121.abi.page import html_page
from sm121.jit.last import Last
from sm121.jit.recipes import FILE
from sm121.jit.report import FAULTS, Report, Row
from sm121.jit.table import shared_notes, shared_text, short_name
from sm121.ui import human_seconds

_TITLE = "What a node compiles itself"


def to_html(report: Report) -> str:
    """A whole page."""
    versions = "".join(
        f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in report.versions.items()
    )
    head = (
        f'<header class="{report.result}"><p class="verdict">{report.result.upper()}</p>'
        f"<h1>Does what a node compiles itself compile?</h1><p>{escape(_sentence(report))}</p>"
        f"<dl>{versions}</dl></header>"
    )
    return html_page(f"verify-jit: {report.result.upper()}", head + section(report))


def in_verify_abi(last: Last | None, *, commit: str, without: str = "") -> str:
    """The section of verify-abi's page about these binaries' other half, the kernels that are
    compiled on the node. commit: of the patched source that was judged, '' if that isn't known.
    without: name of a stack that has no jit.toml."""
    if without:
        return (
            f"<section><h2>{_TITLE}</h2><p>Stack {escape(without)} has no {FILE}, without which verify-jit "
            "compiles nothing: nobody looked at the kernels that a node compiles itself.</p></section>"
        )
    if last is None:
        text = (
            "verify-jit was not run here: nobody looked at the kernels that a node compiles itself."
        )
    elif (same := last.is_of(commit=commit)) is None:
        text = (
            "It is not known of which source these binaries were made (there is no manifest of a "
            "wheelhouse), so no run of verify-jit can be told to be theirs; its last run here was for "
            f"{last.source.commit[:12]}."
        )
    elif not same:
        text = (
            f"verify-jit was not run for this source (patched commit {commit[:12]}); "
            f"its last run here was for {last.source.commit[:12]}."
        )
    else:
        report = last.report
        word = "ok" if report.result == "pass" else "<strong class=fail>FAIL</strong>"
        return (
            f"<section><h2>{_TITLE}</h2><p>{word} {escape(_sentence(report))} As verify-jit found in its "
            f"last run for the same source.</p>{section(report, heading='h3')}</section>"
        )
    return (
        f"<section><h2>{_TITLE}</h2><p>{escape(text)} <code>nox -s verify-jit</code> compiles them, "
        "without a GPU.</p></section>"
    )


def _sentence(report: Report) -> str:
    faults = sum(row.verdict in FAULTS for row in report.rows)
    faults += sum(note.kind == "fault" for note in report.notes)
    compiled = sum(row.verdict == "compiled" for row in report.rows)
    if report.result == "pass":
        return f"{compiled} kernels compile for {report.target}."
    return f"{faults} fault{'s' if faults != 1 else ''} found; each is explained below."


def section(report: Report, *, heading: str = "h2") -> str:
    """Faults, kernels by verdict, first start, notes."""
    faults = "".join(_fault(row) for row in report.rows if row.verdict in FAULTS)
    made = "".join(_made(row) for row in report.rows if row.verdict == "compiled")
    rest = "".join(
        f"<tr><td>{escape(row.family)}</td><td><code>{escape(row.kernel)}</code></td><td>{escape(row.why)}</td></tr>"
        for row in report.rows
        if row.verdict in ("helper", "left-out")
    )
    notes = "".join(f"<li>{escape(n.kind)}: {escape(n.text)}</li>" for n in report.notes)
    starts = "".join(
        f"<tr><td>{escape(s.family)}</td><td class=num>{s.kernels}</td><td class=num>{s.compilations}</td>"
        f"<td class=num>{human_seconds(s.seconds)}</td><td>{'wheelhouse' if s.shipped else escape(s.cache)}</td></tr>"
        for s in report.first_start
    )
    partly = "".join(f"<p class=dim>{escape(note)}</p>" for note in shared_notes(report.rows))
    parts = [
        f"<section><{heading}>What is wrong</{heading}>{faults}</section>" if faults else "",
        f"<section><{heading}>Notes</{heading}><ul>{notes}</ul></section>" if notes else "",
        f"<section><{heading}>Compiled</{heading}>{partly}<table><thead><tr><th>family</th><th>kernel</th><th>target</th>"
        "<th class=num>registers</th><th class=num>shared memory</th><th class=num>spills</th>"
        f"<th class=num>variants</th><th class=num>time</th></tr></thead><tbody>{made}</tbody></table></section>"
        if made
        else "",
        f"<section><{heading}>First start of a node</{heading}><table><thead><tr><th>family</th><th class=num>kernels</th>"
        f"<th class=num>compilations</th><th class=num>time here</th><th>kept in</th></tr></thead><tbody>{starts}</tbody></table></section>"
        if starts
        else "",
        f"<section><{heading}>Not compiled, and why</{heading}><details><summary>all of them</summary><table><tbody>{rest}</tbody></table></details></section>"
        if rest
        else "",
    ]
    return "\n".join(part for part in parts if part)


def _fault(row: Row) -> str:
    reading = (
        f"<li><strong>{escape(row.reading.kind)}</strong>: {escape(row.reading.says)}; {escape(row.reading.next)}</li>"
        if row.reading
        else ""
    )
    why = f"<li>{escape(row.why)}</li>" if row.why else ""
    message = f"<pre>{escape(row.message[:4000])}</pre>" if row.message else ""
    return (
        f'<div class="fault"><p><strong class=fail>{escape(row.verdict)}</strong> '
        f"<code>{escape(row.kernel)}</code></p><ul>{reading}{why}</ul>{message}</div>"
    )


def _made(row: Row) -> str:
    made = row.variants
    spills = max(v.spills for v in made) if all(v.spills >= 0 for v in made) else "?"
    return (
        f"<tr><td>{escape(row.family)}</td><td><code>{escape(short_name(row.kernel))}</code></td>"
        f"<td>{escape(', '.join(sorted({v.target for v in made})))}</td>"
        f"<td class=num>{max(v.registers for v in made)}</td>"
        f"<td class=num>{shared_text(made)}</td>"
        f"<td class=num>{spills}</td><td class=num>{len(made)}</td>"
        f"<td class=num>{human_seconds(row.seconds)}</td></tr>"
    )
