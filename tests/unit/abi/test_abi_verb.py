"""`verify-abi` on the command line: what is judged, what is written, which exit code."""

import json
import signal

import jsonschema
import pytest
from make import Sym, elf, write_wheel

from sm121.__main__ import main
from sm121.abi.report import SCHEMA_FILE

NAME = "vllm-0.26.0+sm121.smoke.1-cp311-abi3-linux_aarch64.whl"
GOOD = {"vllm/spinloop.abi3.so": elf([Sym(name="PyModule_Create2")], needed=["libc.so.6"])}
TORCH = {"vllm/spinloop.abi3.so": elf(needed=["libtorch.so", "libc.so.6"])}


@pytest.fixture
def verb(root, tmp_path, monkeypatch, capsys):
    """Run it in this checkout, with an empty cache; returns (code, standard output, the rest)."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("SM121_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("SM121_CACHE", str(tmp_path / "cache"))
    before = signal.getsignal(signal.SIGTERM)

    def run(*argv):
        code = main(["verify-abi", *map(str, argv), "--no-run"])
        return code, *capsys.readouterr()

    yield run
    signal.signal(signal.SIGTERM, before)


def test_a_wheel_that_fits(verb, tmp_path):
    code, out, said = verb(write_wheel(tmp_path, NAME, GOOD))
    assert (code, out) == (0, "")
    assert "PASS: every binary fits." in said
    assert "not run: imports: --no-run" in said


def test_faults_are_exit_code_1_after_the_table(verb, tmp_path):
    bad = {"vllm/spinloop.abi3.so": elf(needed=["libc.so.6"], runpath="/build")}
    page = tmp_path / "out/report.html"
    code, out, said = verb(write_wheel(tmp_path, NAME, bad), "--json", "--html", page)
    assert code == 1
    report = json.loads(out)
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))
    assert report["result"] == "fail"
    assert said.index("FAIL: ") < said.index("error: verify-abi found 1 fault(s): search-path.")
    assert str(page) in said
    assert "/build" in page.read_text()


def test_without_the_locks_wheels_libraries_are_not_run(verb, tmp_path):
    code, _, said = verb(write_wheel(tmp_path, NAME, TORCH))
    assert code == 0
    assert "not run: symbols of vllm/spinloop.abi3.so: libtorch.so was not found" in said
    assert "torch 2.11.0" in said


def test_surroundings_by_hand(verb, tmp_path):
    torch = write_wheel(
        tmp_path, "torch-2.11.0-py3-none-any.whl", {"torch/lib/libtorch.so": elf(soname="libtorch.so")}
    )  # fmt: skip
    code, _, said = verb(write_wheel(tmp_path, NAME, TORCH), "--against", torch)
    # Somebody who names them names all: then a missing library is a fault.
    assert "loaded with 1 other wheel(s)" in said
    assert code == 1
    assert "needs libtorch.so" in said  # torch's folder is on no search path, and nobody loaded it


def test_manifest_that_is_none(verb, tmp_path):
    write_wheel(tmp_path, NAME, GOOD)
    (tmp_path / "manifest.json").write_text("[]")
    code, _, said = verb(tmp_path)
    assert code == 1
    assert "is no manifest of a wheelhouse" in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["gone.whl"], "does not exist"),
        (["x.whl", "--env", "y"], "--env is checked alone"),
        (["--json", "x.whl"], "Write the targets first"),
        (["--arch", "12.1"], "architecture 12.1 "),
        (["--env", "gone"], "not a virtual environment"),
    ],
)
def test_wrong_usage(verb, tmp_path, argv, words):
    wheel = write_wheel(tmp_path, NAME, GOOD)
    code, _, said = verb(*([wheel, *argv] if argv[0] == "--arch" else argv))
    assert code == 2
    assert words in said
