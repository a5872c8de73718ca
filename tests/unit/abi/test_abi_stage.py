"""The end of a build: skipped when nothing changed, failing with a report when something is wrong."""

import hashlib
import shutil
import sys
from pathlib import Path

import pytest
from make import Sym, elf, write_wheel

from sm121.abi.interpreter import Interpreter
from sm121.abi.stage import VerifyStage
from sm121.context import Context, Options
from sm121.errors import AbiFault
from sm121.files import HashMemory
from sm121.jit.last import Source, keep_last, last_file
from sm121.jit.recipes import FILE as JIT_RECIPES
from sm121.jit.report import Report as JitReport
from sm121.jit.report import Row, Variant
from sm121.layout import Layout
from sm121.pins.load import load_stack
from sm121.pipeline import run_stages
from support.environments import listed, manifest_text
from support.stacks import COMMIT

NAME = "vllm-0.26.0+sm121.smoke.1-cp311-abi3-linux_aarch64.whl"
GOOD = elf([Sym(name="PyModule_Create2")], needed=["libc.so.6"])


class House:
    """Stands in for the stage before it."""

    name = "wheelhouse"
    digest = ""

    def key(self, context):
        return "wheelhouse/x"

    def inputs(self, context, results):
        return {"manifest": self.digest}

    def standing(self, context, result):
        return True

    def run(self, context, results):
        return {"manifest": self.digest}


@pytest.fixture
def context(screen, tmp_path, root, stack_name, monkeypatch):
    """The real pins, in a checkout of its own."""
    monkeypatch.setattr("sm121.abi.interpreter.host_machine", lambda: "x86_64")
    checkout = tmp_path / "real"
    shutil.copytree(root / "pins", checkout / "pins")
    layout = Layout(
        root=checkout, build=checkout / "build", wheelhouse=checkout / "wheelhouse",
        cache=checkout / "cache",
    )  # fmt: skip
    return Context(
        layout=layout, stack_name=stack_name, stack=load_stack(layout.pins, stack_name),
        options=Options(profile="smoke"), ui=screen.ui,
        memory=HashMemory(layout.build / "hashes.json"),
    )  # fmt: skip


@pytest.fixture
def finish(context):
    """Put a wheel into the wheelhouse and run the end of a build."""
    house = House()
    made = {}  # a zip has the time in it: the same content is to be the same file

    def run(binary=GOOD):
        folder = context.layout.wheelhouse
        folder.mkdir(exist_ok=True)
        wheel = folder / NAME
        if binary not in made:
            made[binary] = write_wheel(folder, NAME, {"vllm/spinloop.abi3.so": binary}).read_bytes()
        wheel.write_bytes(made[binary])
        manifest = manifest_text(
            [listed(wheel)], target="linux-aarch64", profile="smoke", complete=False,
            components={"built": ["spinloop"], "left_out": {}},
        )  # fmt: skip
        (folder / "manifest.json").write_text(manifest)
        house.digest = hashlib.sha256(manifest.encode()).hexdigest()
        return run_stages(context, [house, VerifyStage()])

    return run


def test_runs_once_and_again_when_the_wheelhouse_or_a_report_changed(context, finish, screen):
    results, _ = finish()
    assert results["verify"]["verdict"] == "pass"
    assert (
        "every binary fits (1 files, 1 symbols); imports not run: " in results["verify"]["summary"]
    )
    page = VerifyStage().report(context, "html")
    assert "PASS" in page.read_text()
    assert "PASS: every binary fits." in context.log("verify").read_text()
    _, ran = run_stages(context, [House(), VerifyStage()], dry_run=True)
    assert not ran
    page.unlink()
    finish()
    assert "its output is gone" in screen.text
    assert page.is_file()
    finish(elf([Sym(name="PyModule_Create2"), Sym(name="Py_IncRef")], needed=["libc.so.6"]))
    assert "verify      wheelhouse changed" in screen.text


def test_the_page_says_what_verify_jit_found_of_this_source(context, finish, screen):
    recipes = context.layout.pins / context.stack_name / JIT_RECIPES
    recipes.touch()  # not every stack has one
    finish()
    page = VerifyStage().report(context, "html")
    assert "verify-jit was not run here" in page.read_text()
    made = Variant(
        variant={}, mode="triton", target="sm_121a", registers=40, threads=128, shared_static=0,
        shared_dynamic=0, stack=0, spills=0, seconds=1.0,
    )  # fmt: skip
    row = Row(
        family="triton", kernel="vllm.ops:norm", where="", verdict="compiled", variants=(made,)
    )
    report = JitReport(result="pass", stack="", target="sm_121a", tree="", versions={}, rows=(row,))
    file = last_file(context.layout.build, context.stack_name)
    keep_last(report, file, source=Source(commit="e" * 40, tree=""))
    finish()
    assert "was not run for this source" in page.read_text()
    keep_last(report, file, source=Source(commit=COMMIT, tree=""))
    finish()
    assert "verify      what verify-jit found changed" in screen.text
    assert "1 kernels compile for sm_121a" in page.read_text()
    assert "<td><code>ops:norm</code></td>" in page.read_text()
    _, ran = run_stages(context, [House(), VerifyStage()], dry_run=True)
    assert not ran
    recipes.unlink()
    finish()
    assert f"Stack {context.stack_name} has no jit.toml" in page.read_text()


def test_runs_again_when_a_library_of_the_driver_comes(
    context, finish, screen, tmp_path, monkeypatch
):
    """A container gets NVENC: what could not be run before can be now."""
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.setattr("sm121.abi.driver._FOLDERS", (str(folder),))
    python = Interpreter(how="native", version="3.12", program=Path(sys.executable))
    monkeypatch.setattr("sm121.abi.stage.find_interpreter", lambda _job: python)
    (folder / "libcuda.so.1").touch()
    finish()
    _, ran = run_stages(context, [House(), VerifyStage()], dry_run=True)
    assert not ran
    (folder / "libnvidia-encode.so.1").touch()
    finish()
    assert "verify      the GPU's driver changed" in screen.text


def test_faults_stop_the_build_and_name_the_report(context, finish, screen):
    finish()
    for _ in range(2):  # a failed stage is not remembered as done
        with pytest.raises(AbiFault, match=r"2 fault\(s\): abi3, symbol") as caught:
            finish(elf([Sym(name="PyModule_Create9")], needed=["libc.so.6"]))
        page = VerifyStage().report(context, "html")
        assert str(page) in caught.value.cause
        assert caught.value.exit_code == 1
        assert "PyModule_Create9" in page.read_text()
        assert "undefined symbol PyModule_Create9" in screen.text
    results, _ = finish()
    assert results["verify"]["verdict"] == "pass"
