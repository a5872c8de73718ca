"""The dynamic part under emulation: real torch for aarch64, real extension modules built here.

Needs qemu-aarch64-static and a root of the target: SM121_TARGET_ROOT, or mmdebstrap makes one.
"""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from make import write_wheel

from sm121.abi.interpreter import Interpreter, full_version
from sm121.abi.policy.load import load_policy
from sm121.abi.proof import Job, prove
from sm121.files import HashMemory
from sm121.lock.pylock import Target
from sm121.pins.load import load_stack
from sm121.toolkit.machine import host_machine
from sm121.ui import Ui
from support.tools import run, tool

pytestmark = [pytest.mark.network, pytest.mark.compiler, pytest.mark.timeout(900)]

INCLUDE = "python3,libstdc++6,zlib1g,libgomp1"
MODULE = """
extern "C" {{
void *PyModule_Create2(void *, int);
{declared}
static struct {{ long head[5]; const char *name; const char *doc; long size; void *rest[5]; }}
  def = {{ {{1}}, "{name}", 0, -1, {{0}} }};
void *PyInit_{name}(void) {{ {call} return PyModule_Create2(&def, 3); }}
}}
"""


@pytest.fixture(scope="session")
def target_root(tmp_path_factory) -> Iterator[Path]:
    """An arm64 root with Python 3.11 (Debian 12), extracted only: nothing of it is run."""
    tool("qemu-aarch64-static", "qemu-user-static")
    if given := os.environ.get("SM121_TARGET_ROOT"):
        yield Path(given)
        return
    root = tmp_path_factory.mktemp("arm64") / "root"
    run(
        tool("mmdebstrap"), "--quiet", "--variant=extract", "--arch=arm64", f"--include={INCLUDE}",
        "bookworm", root,
    )  # fmt: skip
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def modules(tools, tmp_path_factory):
    """Extension modules for aarch64, by path in the wheel: two that load, one that does not."""
    folder = tmp_path_factory.mktemp("modules")
    stub = folder / "torch"
    stub.mkdir()
    tools.shared(stub / "libtorch.so", "-Wl,-soname,libtorch.so", source="")
    made = {"vllm/__init__.py": b"raise RuntimeError('its own __init__ is not to be run')\n"}
    for name, functions, flags in (
        ("good", [], ["-Wl,--no-as-needed", f"-L{stub}", "-ltorch"]),
        ("driver", ["cuMemRelease"], ["-lcuda"]),
        ("broken", ["cutlass_moe_mm_sm100"], []),
    ):
        source = MODULE.format(
            name=name, declared="".join(f"int {f}(int);\n" for f in functions),
            call="".join(f"if (def.size == 7) {f}(0);" for f in functions),
        )  # fmt: skip
        out = tools.shared(folder / f"{name}.so", *flags, source=source)
        made[f"vllm/{name}.abi3.so"] = out.read_bytes()
    return made


@pytest.fixture(scope="session")
def job(layout, target_root, tools, tmp_path_factory):
    """A checkout's worth of what the checks need, with a build folder of its own."""
    stack = load_stack(layout.pins, "0.26.0")
    build = tmp_path_factory.mktemp("build")
    stubs = build / "toolkit/0.26.0-linux-aarch64/cuda/lib64/stubs"
    stubs.mkdir(parents=True)
    shutil.copyfile(tools.root / "lib64/stubs/libcuda.so", stubs / "libcuda.so")
    return Job(
        layout=dataclasses.replace(layout, build=build), stack_name="0.26.0", stack=stack,
        target=Target.make("linux-aarch64", python="3.12", glibc="2.39"), arch="12.1a",
        policy=load_policy(), memory=HashMemory(layout.cache / "abi-test-hashes.json"),
        ui=Ui(quiet=True), pythons=("3.12", "3.11"), fetch=True,
    )  # fmt: skip


def test_the_root_has_a_python_that_runs(target_root):
    python = Interpreter(
        how="emulated", version="3.11", program=target_root / "usr/bin/python3.11",
        emulator=("qemu-aarch64-static", "-L", str(target_root)),
    )  # fmt: skip
    version, problem = full_version(python.command())
    assert version.startswith("3.11."), problem


def test_extensions_are_imported_beside_the_real_torch(
    job, modules, tmp_path, target_root, monkeypatch
):
    """One run over three modules: torch first, a driver stub, one open symbol."""
    assert host_machine() != "aarch64", "on the target's own machine test_dynamic.py runs natively"
    monkeypatch.setenv("SM121_TARGET_ROOT", str(target_root))
    wheel = write_wheel(tmp_path, "vllm-0.26.0+sm121.smoke.1-cp311-abi3-linux_aarch64.whl", modules)
    report = prove(dataclasses.replace(job, targets=(wheel,)))
    ran = report.ran
    assert ran is not None, report.not_run
    assert (ran.how, ran.python[:5], ran.driver, ran.complete) == (
        "emulated",
        "3.11.",
        "stub",
        False,
    )
    assert ran.bare == ("vllm",)
    table = {row.module: row for row in ran.imports}
    assert {n: r.result for n, r in table.items()} == {
        "torch": "pass", "vllm.good": "pass", "vllm.driver": "pass", "vllm.broken": "fail",
    }  # fmt: skip
    assert "undefined symbol: cutlass_moe_mm_sm100" in table["vllm.broken"].text
    # The static part says the same of the same file, and nothing else is wrong.
    assert {(f.kind, f.file) for f in report.faults} == {
        ("symbol", "vllm/broken.abi3.so"), ("import", "vllm/broken.abi3.so"),
    }  # fmt: skip
    # Remembered: the second time nothing is unpacked or run.
    again = prove(dataclasses.replace(job, targets=(wheel,)))
    assert again == report
    assert not list((job.layout.build / "verify").iterdir())


def test_no_root_is_said(job, tmp_path, modules, monkeypatch):
    monkeypatch.delenv("SM121_TARGET_ROOT", raising=False)
    good = {p: d for p, d in modules.items() if "broken" not in p}
    wheel = write_wheel(tmp_path, "vllm-0.26.0+sm121.smoke.1-cp311-abi3-linux_aarch64.whl", good)
    report = prove(dataclasses.replace(job, targets=(wheel,)))
    assert report.result == "pass", report.faults
    assert report.ran is None
    assert [n.check for n in report.not_run] == ["imports"]
    assert "SM121_TARGET_ROOT" in report.not_run[0].reason


def test_a_stage_without_torch_in_the_cache(job, tmp_path, modules):
    """Only ours is not: said, and no fault."""
    empty = dataclasses.replace(
        job, layout=dataclasses.replace(job.layout, cache=tmp_path / "cache"), fetch=False, run=False
    )  # fmt: skip
    good = {p: d for p, d in modules.items() if "good" in p}
    wheel = write_wheel(tmp_path, "vllm-0.26.0+sm121.smoke.1-cp311-abi3-linux_aarch64.whl", good)
    report = prove(dataclasses.replace(empty, targets=(wheel,)))
    assert report.result == "pass"
    assert "torch 2.11.0" in report.not_run[0].reason
