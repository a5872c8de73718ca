"""The smoke profile: from pins to a wheelhouse, on the real vLLM and the real torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest

from sm121.compile.wheel import read_library
from support.checkouts import Checkout

pytestmark = pytest.mark.timeout(900)
EXTENSIONS = ("spinloop", "fs_io_C", "cumem_allocator")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.stat().st_ino)
        for p in folder.rglob("*")
        if p.is_file() and p.name not in (".lock", ".lock-owner.json")
    }


def test_wheel_holds_target_code_without_build_paths(built: Checkout) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        libraries = {name: read_library(wheel.read(f"vllm/{name}.abi3.so")) for name in EXTENSIONS}
        compiled = [n for n in wheel.namelist() if n.endswith(".so")]
        patched = wheel.read("vllm/utils/nccl.py").decode()
        tags = wheel.read(next(n for n in wheel.namelist() if n.endswith("/WHEEL"))).decode()
        metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA"))).decode()
    assert {lib.machine for lib in libraries.values()} == {"aarch64"}
    assert {lib.paths for lib in libraries.values()} == {()}
    assert "libcuda.so.1" in libraries["cumem_allocator"].needed
    assert len(compiled) == len(EXTENSIONS)
    assert "def allow_cross_node_cudagraphs(" in patched
    assert "Tag: cp311-abi3-linux_aarch64" in tags
    family = built.pins.family
    for name in ("flashinfer-python", "nvidia-cutlass-dsl[cu13]"):
        version = family[name.removesuffix("[cu13]")].version
        assert f"Requires-Dist: {name}=={version}\n" in metadata


def test_readelf_agrees(built: Checkout, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        path = Path(wheel.extract("vllm/cumem_allocator.abi3.so", tmp_path))
    shown = subprocess.run(
        ["readelf", "-h", "-d", path], check=True, capture_output=True, text=True
    ).stdout
    assert "AArch64" in shown
    assert "Shared library: [libcuda.so.1]" in shown
    assert "RPATH" not in shown
    assert "RUNPATH" not in shown


def test_wheelhouse_says_what_is_in_it(built: Checkout) -> None:
    folder = built.root / "wheelhouse"
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    schema = json.loads((built.root / "src/sm121/wheelhouse/manifest.schema.json").read_text())
    jsonschema.validate(manifest, schema)
    assert manifest["components"]["built"] == list(EXTENSIONS)
    assert manifest["partial"] is True
    series = (built.patches / "series").read_text().splitlines()
    listed = [line.removesuffix(".patch") for line in series if not line.startswith("#")]
    assert [p["name"] for p in manifest["patches"]] == listed
    assert {"build-selection", "requirements", "nccl-guard"} < set(listed)
    assert manifest["wheels"][0]["sha256"] == digest(built.wheel)
    assert all(manifest["components"]["left_out"].values())
    assert manifest["components"]["sources_left_out"] == []  # nothing of these three


def test_second_run_does_nothing_and_says_so(built: Checkout) -> None:
    # Tests that share the checkout may have built in it with other options, as those of jit-cache.
    built.run("build", "--profile", "smoke")
    before = snapshot(built.root / "build"), snapshot(built.root / "wheelhouse")
    printed = built.run("build", "--profile", "smoke")
    assert "Nothing to do" in printed
    assert "run  " not in printed
    assert (snapshot(built.root / "build"), snapshot(built.root / "wheelhouse")) == before


def test_dry_run_says_why_and_changes_nothing(built: Checkout) -> None:
    series = built.patches / "nccl-guard.patch"
    original = series.read_bytes()
    before = snapshot(built.root / "build")
    try:
        series.write_bytes(original.replace(b"How tested", b"how tested") + b"\n")
        printed = built.run("build", "--profile", "smoke", "--dry-run")
    finally:
        series.write_bytes(original)
    assert "would run: patch nccl-guard changed" in printed
    assert snapshot(built.root / "build") == before


def edit_patch(built: Checkout, name: str, old: bytes, new: bytes) -> tuple[Path, bytes]:
    path = built.patches / f"{name}.patch"
    original = path.read_bytes()
    assert original.count(old) >= 1
    path.write_bytes(original.replace(old, new))
    return path, original


def test_editing_a_python_patch_compiles_no_object(built: Checkout) -> None:
    # A comment of the patched file: same number of lines, other text.
    path, original = edit_patch(
        built, "requirements", b"+# flashinfer-cubin is not listed: FlashInfer",
        b"+# flashinfer-cubin is not listed; FlashInfer",
    )  # fmt: skip
    try:
        printed = built.run("patch")
        assert "patch requirements changed" in printed
        # The requirement files changed, so the lock must be looked at again: said, not ignored.
        assert "Run `nox -s lock`" in built.run("build", "--profile", "smoke", code=1)
    finally:
        path.write_bytes(original)
    path, original = edit_patch(
        built, "nccl-guard", b"+    # One faulty rank is enough, whatever",
        b"+    # One faulty rank is enough; whatever",
    )  # fmt: skip
    try:
        printed = built.run("build", "--profile", "smoke")
    finally:
        path.write_bytes(original)
    assert "patch nccl-guard changed" in printed
    assert "objects     0 compiled" in printed


@contextlib.contextmanager
def patched_source(built: Checkout, line: str) -> Iterator[None]:
    """With a patch more, which puts a line in front of csrc/spinloop.cpp."""
    series, patch = built.patches / "series", built.patches / "touch-spinloop.patch"
    original = series.read_text()
    first = subprocess.run(
        ["git", "--git-dir", built.root / "build/source/vllm.git", "show",
         f"refs/sm121/base/{built.stack}:csrc/spinloop.cpp"],
        check=True, capture_output=True, text=True,
    ).stdout.splitlines()[:3]  # fmt: skip
    patch.write_text(
        "From: Test <test@localhost>\nDate: Sun, 29 Nov 2026 00:00:00 +0000\n"
        "Subject: [PATCH] Touch spinloop\n\nTest.\n\nUpstream-Status: Pending\n---\n"
        "diff --git a/csrc/spinloop.cpp b/csrc/spinloop.cpp\n--- a/csrc/spinloop.cpp\n"
        f"+++ b/csrc/spinloop.cpp\n@@ -1,3 +1,4 @@\n+{line}\n"
        + "".join(f" {line}\n" for line in first)
    )
    try:
        series.write_text(original + "touch-spinloop.patch\n")
        yield
    finally:
        series.write_text(original)
        patch.unlink()


def test_a_patch_on_one_source_file_compiles_one_object(built: Checkout) -> None:
    with patched_source(built, "// touched"):
        printed = built.run("build", "--profile", "smoke")
    assert "patch touch-spinloop is new" in printed
    assert "1 file(s) rewritten" in printed or "objects     1 compiled" in printed
    assert "objects     1 compiled" in printed


def test_a_build_that_fails_says_what_it_cost_too(built: Checkout) -> None:
    with patched_source(built, "#error on purpose"):
        printed = built.run("build", "--profile", "smoke", code=4)
    assert "#error on purpose" in printed
    assert "objects     0 compiled in " in printed
    assert "(Perfetto)" in printed


def test_nothing_left_over_from_another_tree_reaches_the_wheel(built: Checkout) -> None:
    built.run("build", "--profile", "smoke")
    wanted = digest(built.wheel)
    tree = built.root / "build/work" / f"{built.stack}-linux-aarch64/src"
    output = next((tree.parent).glob("ninja-*"))
    for place in (tree, next(output.glob("lib.*"))):
        leftover = place / "vllm/third_party/triton_kernels"
        leftover.mkdir(parents=True)
        (leftover / "__init__.py").write_text("stale = True\n")
    (tree / "vllm/stale.py").write_text("")
    (built.root / f"build/dist/{built.stack}-linux-aarch64-smoke" / built.wheel.name).unlink()
    printed = built.run("build", "--profile", "smoke")
    assert "its output is gone or was changed" in printed
    assert digest(built.wheel) == wanted


def wait_for(child: subprocess.Popen[str], text: str) -> str:
    """Read a child's output until a line has `text`."""
    seen = ""
    assert child.stdout is not None
    for line in child.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came:\n{seen}")


def test_killed_anywhere_a_rerun_completes_and_the_wheel_is_the_same(
    built: Checkout, new_checkout: Callable[[str], Checkout]
) -> None:
    """SIGKILL in each stage of a build in another folder; then it is byte for byte the same."""
    other = new_checkout("second")
    # How long after what it prints: so that a stage is in the middle of its work, and not done.
    for sign, delay in (
        ("run  source", 0.5), ("run  patch", 0.05), ("run  environment", 3.0),
        ("run  toolkit", 3.0), ("run  compile", 1.0), ("compile     Configuring done", 0.5),
        ("run  wheelhouse", 0.0),
    ):  # fmt: skip
        child = subprocess.Popen(
            other.command("build", "--profile", "smoke"),
            cwd=other.root, env=other.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            seen = wait_for(child, sign)
            time.sleep(delay)
        finally:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        for done in ("source", "patch", "environment", "toolkit"):
            if f"done  {done}" in seen:
                assert f"skip  {done}" in other.run("build", "--profile", "smoke", "--dry-run")
    other.run("build", "--profile", "smoke")
    built.run("build", "--profile", "smoke")
    assert other.wheel.name == built.wheel.name
    assert digest(other.wheel) == digest(built.wheel)
    assert not list(other.root.glob("wheelhouse.*"))
    assert not list((other.root / "build").rglob("*.partial"))
    shutil.rmtree(other.root)  # 8 GB that nothing needs any more


def test_second_run_at_the_same_time_is_refused(built: Checkout) -> None:
    holder = subprocess.Popen(
        built.command("shell", "--profile", "smoke", "sleep", "60"),
        cwd=built.root, env=built.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        wait_for(holder, "In the patched tree")
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    script = (
        "import sys, time; from pathlib import Path; from sm121.state import exclusive\n"
        "with exclusive(Path(sys.argv[1]), 'the first build'):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [built.command()[0], "-c", script, built.root / "build"],
        env=built.environment(), text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_for(holder, "held")
        printed = built.run("build", "--profile", "smoke", code=3)
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    assert "the first build" in printed
    assert str(holder.pid) in printed


def test_no_network_is_needed_once_the_inputs_are_here(built: Checkout) -> None:
    """Case 14: sources are ready before configure; `--offline` in a network-less namespace."""
    wanted = digest(built.wheel)
    subprocess.run(["rm", "-rf", built.root / "build/work", built.root / "build/dist"], check=True)
    printed = built.run(
        "build", "--profile", "smoke", "--offline", prefix=("unshare", "--net", "--map-root-user")
    )
    assert "objects     3 compiled" in printed
    assert digest(built.wheel) == wanted
    # cases.md 23: the rate is printed, with where to look.
    assert "; 3 of 3 objects out of ccache (100.0%)" in printed
    (timeline,) = re.findall(r"timeline    (\S+) \(Perfetto\), (\S+)", printed)
    assert [Path(name).stat().st_size > 0 for name in timeline] == [True, True]


def test_native_build_imports_on_this_machine(built: Checkout, tmp_path: Path) -> None:
    """`--target linux-x86_64`: the three extensions import, cumem_allocator with the driver stub."""
    assert os.uname().machine == "x86_64"
    house = tmp_path / "house"
    built.run("build", "--profile", "smoke", "--target", "linux-x86_64", "--wheelhouse", str(house))
    (wheel,) = house.glob("*.whl")
    site, stub = tmp_path / "site", tmp_path / "stub"
    with zipfile.ZipFile(wheel) as archive:
        for name in EXTENSIONS:
            archive.extract(f"vllm/{name}.abi3.so", site)
    stub.mkdir()
    toolkit = built.root / f"build/toolkit/{built.stack}-linux-x86_64"
    (stub / "libcuda.so.1").write_bytes((toolkit / "cuda/lib64/stubs/libcuda.so").read_bytes())
    code = (
        f"import sys, warnings; warnings.simplefilter('ignore'); sys.path.insert(0, {str(site)!r})\n"
        "import torch\nfrom vllm import spinloop, fs_io_C, cumem_allocator\n"
        "print(callable(spinloop.spinloop), callable(fs_io_C.batch_lookup),"
        " callable(cumem_allocator.python_create_and_map))"
    )
    finished = subprocess.run(
        [built.root / "build/env" / built.stack / "bin/python", "-I", "-c", code],
        env={"LD_LIBRARY_PATH": str(stub), "PATH": os.defpath},
        cwd=tmp_path, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert finished.stdout.split() == ["True", "True", "True"], finished.stderr
