"""The row of step `extensions`."""

from sm121.abi.report import Finding, ImportRow, NotRun, Ran, Report
from sm121.target.extensions import extensions_row, not_imported, said

WHY = "needs libnvidia-encode.so.1 of the GPU's driver, which is not here"


def report(*imports, faults=(), not_run=(), ran=True):
    rows = tuple(ImportRow(module=m, result=r, text=t) for m, r, t in imports)
    return Report(
        schema_version=1, target="linux-aarch64", machine="aarch64", python="3.12", arch="12.1a",
        profile="smoke", result="fail" if faults else "pass", wheels=(), binaries=(), against=(),
        components=(), open_symbols=(), findings=tuple(faults), family=(), not_run=tuple(not_run),
        ran=Ran(
            how="emulated", python="3.11.2", driver="stub", complete=True, bare=(), seconds=1.0,
            imports=rows,
        ) if ran else None,
    )  # fmt: skip


def fault(file):
    return Finding(
        kind="import", severity="fault", wheel="w", file=file, text="undefined symbol: x"
    )


def test_what_was_not_run_is_said_and_is_no_pass():
    row = extensions_row(
        report(("a.x", "pass", ""), ("v.b", "not run", WHY), ("v.c", "not run", WHY), ("v.a", "not run", "no Tk")),
        "emulated",
    )  # fmt: skip
    assert (row.verdict, row.how) == ("pass", "emulated")
    assert row.text == f"imported: a.x; 3 not run: v.b, v.c: {WHY}; v.a: no Tk"
    assert row.facts["a.x"] == "pass"
    assert row.facts["v.b"] == f"not run: {WHY}"
    assert not_imported([row]) == ["v.a", "v.b", "v.c"]


def test_only_what_could_not_be_run_is_not_run():
    row = extensions_row(report(("v.b", "not run", WHY)), "emulated")
    assert (row.verdict, row.how) == ("not run", "not run")
    assert WHY in row.text


def test_a_fault_fails_the_step_and_is_said_first():
    row = extensions_row(
        report(("a.x", "fail", "undefined symbol: x"), ("b", "pass", "loaded by file"), faults=[fault("a/x.so")]),
        "emulated",
    )  # fmt: skip
    assert row.verdict == "fail"
    assert row.text == "a/x.so: undefined symbol: x"
    assert row.facts == {"a.x": "fail: undefined symbol: x", "b": "pass: loaded by file"}
    assert not_imported([row]) == []


def test_more_faults_than_are_shown():
    faults = [fault(f"{n}.so") for n in range(5)]
    assert said(faults, "--json has all").endswith(" and 2 more (--json has all)")


def test_nothing_to_run():
    why = NotRun(check="imports of other wheels", reason="they are for another Python")
    assert extensions_row(report(ran=False, not_run=[why]), "native").text == why.reason
    assert extensions_row(report(ran=False), "native").verdict == "not run"
    assert "no extension module" in extensions_row(report(), "native").text
