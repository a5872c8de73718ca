"""The dynamic part under emulation: real extension modules for aarch64, built here.

Needs qemu-user-static and mmdebstrap (.ci/run), and a kernel that lets roots be entered.
"""

import dataclasses
import shutil

import pytest
from make import context, write_wheel

from sm121.abi.dynamic import run_imports, unpack_site
from sm121.abi.modules import Extension, extension_modules, import_roots
from sm121.abi.policy.load import load_policy
from sm121.abi.proof import Job, prove
from sm121.abi.rounds import import_all
from sm121.abi.scan import FactsCache, scan_wheels
from sm121.files import HashMemory
from sm121.lock.pylock import Target
from sm121.pins.load import load_stack
from sm121.target.place import find_place
from sm121.toolkit.machine import host_machine
from sm121.ui import Ui

pytestmark = [pytest.mark.network, pytest.mark.compiler, pytest.mark.timeout(900)]

WHEEL = "vllm-0.26.0+sm121.smoke.1-cp311-abi3-linux_aarch64.whl"
MODULE = """
extern "C" {{
void *PyModule_Create2(void *, int);
void abort(void);
{declared}
static struct {{ long head[5]; const char *name; const char *doc; long size; void *rest[5]; }}
  def = {{ {{1}}, "{name}", 0, -1, {{0}} }};
void *PyInit_{name}(void) {{ {call} return PyModule_Create2(&def, 3); }}
}}
"""


@pytest.fixture(scope="session")
def modules(tools, tmp_path_factory):
    """Extension modules for aarch64, by path in the wheel."""
    folder = tmp_path_factory.mktemp("modules")
    stub = folder / "torch"
    stub.mkdir()
    tools.shared(stub / "libtorch.so", "-Wl,-soname,libtorch.so", source="")
    made = {"vllm/__init__.py": b"raise RuntimeError('its own __init__ is not to be run')\n"}
    for name, function, call, flags in (
        ("good", "", "", []),
        ("torchlike", "", "", ["-Wl,--no-as-needed", f"-L{stub}", "-ltorch"]),
        ("driver", "cuMemRelease", "if (def.size == 7) cuMemRelease(0);", ["-lcuda"]),
        ("broken", "cutlass_moe_mm_sm100", "if (def.size == 7) cutlass_moe_mm_sm100(0);", []),
        ("failing", "", "return 0;", []),
        ("crash", "", "abort();", []),
        ("last", "", "", []),
    ):
        declared = f"int {function}(int);" if function else ""
        source = MODULE.format(name=name, declared=declared, call=call)
        out = tools.shared(folder / f"{name}.so", *flags, source=source)
        made[f"vllm/{name}.abi3.so"] = out.read_bytes()
    return made


@pytest.fixture(scope="session")
def place(layout, tools, tmp_path_factory):
    """A root of aarch64, entered for each program, with a driver stub."""
    assert host_machine() != "aarch64", "on the target's own machine test_dynamic.py runs natively"
    return find_place(
        Target.make("linux-aarch64", python="3.12", glibc="2.39"), ("3.12", "3.11"),
        folder=tmp_path_factory.mktemp("place"), seen=(), cache=layout.cache, ui=Ui(quiet=True),
        stub=tools.root / "lib64/stubs/libcuda.so",
    )  # fmt: skip


def test_every_module_has_a_verdict(place, modules):
    """Two that load, one of them by the driver stub; an open symbol; an init that fails; a crash."""
    folder = place.driver.parent
    wheel = write_wheel(folder, WHEEL, modules)
    site = folder / "site"
    unpack_site([wheel], site)
    asked = [
        Extension(name=f"vllm.{name}", file=f"vllm/{name}.abi3.so")
        for name in ("good", "driver", "broken", "failing", "crash", "last")
    ]
    python = place.interpreter(place.python).command([place.driver])
    bare = [("vllm", "vllm")]
    found = run_imports(python, site, asked, bare=bare)
    assert {n for n, row in found.items() if row.result == "pass"} == {
        "vllm.good", "vllm.driver", "vllm.last",
    }  # fmt: skip
    assert "undefined symbol: cutlass_moe_mm_sm100" in found["vllm.broken"].text
    assert "SystemError" in found["vllm.failing"].text
    assert "interpreter died" in found["vllm.crash"].text
    # Without the stub the loader says what is missing.
    python = place.interpreter(place.python).command()
    (row,) = run_imports(python, site, asked[1:2], bare=bare).values()
    assert "libcuda.so.1" in row.text


def test_real_wheels_that_are_not_imported_by_name(place, indexed, layout):
    """cv2 loads its file itself; PyNvVideoCodec wants a library of the driver's. Nothing else of
    them fails, and nothing passes that was not run."""
    versions = ("numpy==2.3.5", "opencv-python-headless==5.0.0.93", "pynvvideocodec==2.0.4")
    wheels = [indexed(version, python=place.version) for version in versions]
    site = place.driver.parent / "real"
    unpack_site(wheels, site)
    memory = HashMemory(layout.cache / "abi-test-hashes.json")
    facts = scan_wheels(wheels[1:], cache=FactsCache(layout.cache), memory=memory)
    policy = load_policy()
    ctx = context(
        *facts, policy=policy,
        target=Target.make("linux-aarch64", python=place.version, glibc=place.glibc),
    )  # fmt: skip
    asked = extension_modules(ctx, import_roots(site))
    python = place.interpreter(place.python).command([place.driver])
    rows = import_all(python, site, asked, policy, driver="stub", emulated=True)
    assert {name: row.result for name, row in rows.items()} == {
        "cv2.cv2": "pass", "PyNvVideoCodec.PyNvVideoCodec_121": "not run",
        "PyNvVideoCodec.PyNvVideoCodec_130": "not run", "PyNvVideoCodec.VersionCheck": "not run",
    }  # fmt: skip
    assert rows["cv2.cv2"].text == "loaded by its package, as cv2._native"
    for name in ("121", "130"):
        text = rows[f"PyNvVideoCodec.PyNvVideoCodec_{name}"].text
        assert "needs libnvidia-encode.so.1 of the GPU's driver" in text
        assert text.endswith("every symbol found")


def test_a_program_that_starts_programs_and_no_network(place):
    code = (
        "import platform, subprocess, socket, sys; print(platform.machine());"
        "print(subprocess.run([sys.executable, '-I', '-c', 'print(6 * 7)'], capture_output=True,"
        " text=True).stdout.strip());"
        "s = socket.socket(); s.settimeout(5); print(s.connect_ex(('192.0.2.1', 80)))"
    )
    finished = place.run([str(place.python), "-I", "-c", code])
    machine, product, error = finished.output.splitlines()[-3:]
    assert (machine, product) == ("aarch64", "42")
    assert int(error) != 0


def test_the_root_is_not_written_to(place):
    before = sorted(p.name for p in place.container.root.path.iterdir())
    assert place.run(["/bin/sh", "-c", "echo x > /written && cat /written"]).output == "x"
    assert sorted(p.name for p in place.container.root.path.iterdir()) == before


def test_a_program_that_does_not_end_is_killed(place):
    finished = place.run(["/bin/sh", "-c", "echo begun; while :; do :; done"], limit=5)
    assert finished.late
    assert finished.returncode < 0


@pytest.fixture(scope="session")
def job(layout, tools, tmp_path_factory):
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


def test_who_imports_them_is_said(job, tmp_path, modules):
    good = {p: d for p, d in modules.items() if p == "vllm/good.abi3.so"}
    wheel = write_wheel(tmp_path, WHEEL, good)
    report = prove(dataclasses.replace(job, targets=(wheel,)))
    assert report.result == "pass", report.faults
    assert report.ran is None
    assert [n.check for n in report.not_run] == ["imports"]
    assert "nox -s verify-target" in report.not_run[0].reason


def test_a_stage_without_torch_in_the_cache(job, tmp_path, modules):
    """Only ours is not: said, and no fault."""
    empty = dataclasses.replace(
        job, layout=dataclasses.replace(job.layout, cache=tmp_path / "cache"), fetch=False, run=False
    )  # fmt: skip
    good = {p: d for p, d in modules.items() if "torchlike" in p}
    wheel = write_wheel(tmp_path, WHEEL, good)
    report = prove(dataclasses.replace(empty, targets=(wheel,)))
    assert report.result == "pass"
    assert "torch 2.11.0" in report.not_run[0].reason
