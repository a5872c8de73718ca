"""FlashInfer's modules ahead of time, through the real stage: nvcc, wheel, FlashInfer's own lookup.

The smallest module of FlashInfer (10 s of CPU) stands for the listed ones, which take minutes:
`--jit-cache-listed` builds those.
"""

from __future__ import annotations

import json
import os
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from sm121.toolkit.machine import host_machine
from support.checkouts import Checkout
from support.tools import run, tool

pytestmark = pytest.mark.timeout(1800)

SMALLEST = {
    "generator": "flashinfer.jit.api_log_stats:gen_api_log_stats_module",
    "functions": ["api_log_print_tensor_stats"],
    "reason": "the smallest module that FlashInfer has",
    "source": "flashinfer/jit/api_log_stats.py",
}
# tvm-ffi's own loader, for a machine whose Python is not here.
LOADER = r"""
#include <tvm/ffi/extra/module.h>
#include <iostream>
int main(int argc, char **argv) {
  try {
    tvm::ffi::Module module = tvm::ffi::Module::LoadFromFile(argv[1]);
    for (int n = 2; n < argc; ++n)
      std::cout << argv[n] << (module->GetFunction(argv[n]).has_value() ? " yes\n" : " no\n");
    return 0;
  } catch (const std::exception &error) { std::cout << error.what() << "\n"; return 1; }
}
"""
# What FlashInfer does when it first needs a module, on a machine where nothing can be compiled.
LOOKUP = r"""
import importlib, json, os, sys
name, generator, function = sys.argv[1:]
import flashinfer
from flashinfer.jit import core, env
package, _, maker = generator.partition(":")
spec = getattr(importlib.import_module(package), maker)()
said = {"version": flashinfer.__version__, "path": str(spec.aot_path), "is_aot": spec.is_aot}
module = spec.build_and_load()
said["function"] = getattr(module, function) is not None
import flashinfer_jit_cache as cache
ours = cache.__version__
for given in (ours, "0.6.16+sm121.1", "0.6.1"):
    cache.__version__ = given
    try:
        said[given] = str(env._get_aot_dir())
    except RuntimeError as error:
        said[given] = f"RuntimeError: {error}"
os.environ["FLASHINFER_DISABLE_VERSION_CHECK"] = "1"
said["unchecked"] = str(env._get_aot_dir())
env.FLASHINFER_AOT_DIR = env._package_root / "data" / "aot"
for disabled in ("1", ""):
    os.environ["FLASHINFER_DISABLE_JIT"] = disabled
    try:
        said["without " + disabled] = str(spec.build_and_load())
    except Exception as error:
        said["without " + disabled] = type(error).__name__
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Made:
    """A wheelhouse with a JIT cache: where, of which modules, by which run."""

    house: Path
    modules: dict[str, Any]
    arguments: tuple[str, ...]

    @property
    def wheel(self) -> Path:
        (wheel,) = self.house.glob("flashinfer_jit_cache-*.whl")
        return wheel

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.house / "manifest.json").read_text())


@pytest.fixture(scope="module")
def pins(built: Checkout, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The modules that the checkout lists: the smallest, or what the stack really lists."""
    file = built.root / f"pins/{built.stack}/stack.toml"
    original = file.read_bytes()
    data = tomllib.loads(original.decode())
    if "jit-cache" not in data:
        pytest.skip(f"stack {built.stack} lists no modules")
    if not request.config.getoption("--jit-cache-listed"):
        data["jit-cache"]["modules"] = {"api_log_stats": SMALLEST}
        file.write_text(tomli_w.dumps(data))
    yield data["jit-cache"]["modules"]
    file.write_bytes(original)


def make(verb: str, built: Checkout, pins: dict[str, Any], target: str, house: Path) -> Made:
    arguments = (verb, "--profile", "smoke", "--target", target, "--jit-cache",
                 "--wheelhouse", str(house))  # fmt: skip
    built.run(*arguments)
    return Made(house, pins, arguments)


@pytest.fixture(scope="module")
def crossed(built: Checkout, pins, tmp_path_factory) -> Made:
    return make("build", built, pins, "linux-aarch64", tmp_path_factory.mktemp("arm") / "house")


@pytest.fixture(scope="module")
def native(built: Checkout, pins, tmp_path_factory) -> Made:
    assert host_machine() == "x86_64"
    # Not `build`, which would import torch once more to verify.
    house = tmp_path_factory.mktemp("x86") / "house"
    return make("wheelhouse", built, pins, "linux-x86_64", house)


def unpacked(made: Made, folder: Path) -> Path:
    with zipfile.ZipFile(made.wheel) as archive:
        archive.extractall(folder)
    return folder


def workshop(built: Checkout, target: str) -> Path:
    (folder,) = (built.root / "build" / "work" / f"{built.stack}-{target}").glob("flashinfer-*")
    return folder


def test_the_wheel_is_in_the_wheelhouse_and_described(built: Checkout, crossed: Made) -> None:
    version = built.pins.family["flashinfer-python"].version
    assert crossed.wheel.name.startswith(f"flashinfer_jit_cache-{version}+sm121.")
    assert crossed.wheel.name.endswith("-py3-none-linux_aarch64.whl")
    told = crossed.manifest["jit_cache"]
    assert told["wheel"] == crossed.wheel.name
    assert told["flashinfer"] == version
    assert set(told["modules"]) == set(crossed.modules)
    for name, module in told["modules"].items():
        assert set(module["codes"]) == {"sm_121a"}
        assert "libcudart.so.13" in module["needed"]
        assert module["reason"] == crossed.modules[name]["reason"]
    assert "fused_moe_120" in told["at_first_use"]
    entry = next(w for w in crossed.manifest["wheels"] if w["filename"] == crossed.wheel.name)
    assert entry["origin"] == "built"
    # Judged by verify-abi: its symbols with tvm-ffi's and CUDA's wheels, its GPU code.
    name = f"{built.stack}-linux-aarch64-smoke"
    report = json.loads((built.root / f"build/reports/{name}.json").read_text())
    row = next(w for w in report["wheels"] if w["filename"] == crossed.wheel.name)
    assert row["faults"] == 0
    assert row["symbols"] > 20
    assert any(one.startswith("apache_tvm_ffi-") for one in report["against"])
    rows = [c for c in report["components"] if c["wheel"] == crossed.wheel.name]
    assert {c["verdict"] for c in rows} == {"native"}


def test_a_second_run_does_nothing(built: Checkout, crossed: Made) -> None:
    # The other target's build may have been in between; this one stands all the same.
    printed = built.run(*crossed.arguments)
    assert "skip  jit-cache" in printed
    assert "Nothing to do" in printed


def test_without_the_option_what_is_missing_is_named(built: Checkout) -> None:
    manifest = json.loads((built.root / "wheelhouse/manifest.json").read_text())
    told = manifest["jit_cache"]
    assert (told["wheel"], told["modules"]) == (None, {})
    assert told["at_first_use"]["sparse_mla_sm120"] == "no JIT cache in this build"


def test_on_the_target_tvm_ffi_loads_it(built: Checkout, crossed: Made, tmp_path: Path) -> None:
    """Under emulation: the target's dynamic loader and tvm-ffi, with the toolkit's libcudart."""
    lock = built.root / f"pins/{built.stack}/pylock.linux-aarch64-cp312.toml"
    packages = tomllib.loads(lock.read_text())["packages"]
    (ffi,) = (p for p in packages if p["name"] == "apache-tvm-ffi")
    (locked,) = ffi["wheels"]
    name = locked["path"].rpartition("/")[2]
    with zipfile.ZipFile(built.cache / "files" / locked["hashes"]["sha256"] / name) as archive:
        archive.extractall(tmp_path)
    source, loader, ffi_folder = tmp_path / "load.cpp", tmp_path / "load", tmp_path / "tvm_ffi"
    source.write_text(LOADER)
    run(
        tool("aarch64-linux-gnu-g++"), "-std=c++17", "-O0", source, "-o", loader,
        f"-I{ffi_folder}/include", f"-L{ffi_folder}/lib", "-ltvm_ffi",
    )  # fmt: skip
    cuda = built.root / f"build/toolkit/{built.stack}-linux-aarch64/cuda/lib64"
    site = unpacked(crossed, tmp_path / "site")
    emulator = (tool("qemu-aarch64-static", "qemu-user-static"), "-L", "/usr/aarch64-linux-gnu")
    for name, module in crossed.modules.items():
        library = site / f"flashinfer_jit_cache/jit_cache/{name}/{name}.so"
        asked = [*module["functions"], "no_such_function"]
        path = f"LD_LIBRARY_PATH={ffi_folder}/lib:{cuda}"
        done = run(*emulator, "-E", path, loader, library, *asked)
        wanted = [f"{function} yes" for function in module["functions"]]
        assert done.stdout.splitlines() == [*wanted, "no_such_function no"]


def test_flashinfer_loads_it_and_compiles_nothing(built: Checkout, native: Made, tmp_path) -> None:
    """Its own lookup, with no nvcc, no ninja, no compiler and no GPU; and what it refuses."""
    site = unpacked(native, tmp_path / "site")
    work = workshop(built, "linux-x86_64")
    environment = {
        "PATH": str(tmp_path / "nothing"), "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(map(str, (site, work / "site"))),
        "CUDA_HOME": str(tmp_path / "nothing"), "CC": "/bin/false", "CXX": "/bin/false",
        "FLASHINFER_NVCC": "/bin/false", "FLASHINFER_CUDA_ARCH_LIST": "12.1a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "base"), "FLASHINFER_DISABLE_JIT": "1",
        "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    }  # fmt: skip
    ours = native.manifest["jit_cache"]
    version = next(w for w in native.manifest["wheels"] if w["filename"] == ours["wheel"])[
        "version"
    ]
    folder = site / "flashinfer_jit_cache/jit_cache"
    python = built.root / f"build/env/{built.stack}/bin/python"
    for name, module in native.modules.items():
        done = run(
            python, "-sP", "-W", "ignore", "-c", LOOKUP, name, module["generator"],
            module["functions"][0], env=environment,
        )  # fmt: skip
        said = json.loads(done.stdout.splitlines()[-1])
        assert said["version"] == built.pins.family["flashinfer-python"].version
        assert said["path"] == str(folder / name / f"{name}.so")
        assert said["is_aot"] is True
        assert said["function"] is True
        assert said[version] == str(folder)
        for other in ("0.6.16+sm121.1", "0.6.1"):
            assert f"flashinfer-jit-cache version ({other}) does not match" in said[other]
        assert said["unchecked"] == str(folder)
        # Without the cache the same call would compile, which is impossible here.
        assert said["without 1"] == "MissingJITCacheError"
        assert said["without "] in ("RuntimeError", "FileNotFoundError")
    assert not list((tmp_path / "base").rglob("*.so"))


def test_a_changed_list_runs_the_stage_and_flashinfer_has_a_say(
    built: Checkout, crossed: Made
) -> None:
    file = built.root / f"pins/{built.stack}/stack.toml"
    before = file.read_bytes()
    data = tomllib.loads(before.decode())
    modules = data["jit-cache"]["modules"]
    name = next(iter(modules))
    try:
        modules[name]["reason"] = "the same module, in other words"
        file.write_text(tomli_w.dumps(data))
        printed = built.run(*crossed.arguments, "--dry-run")
        assert "skip  jit-cache" in printed
        assert "would run: what is said of FlashInfer's modules changed" in printed
        modules[name]["functions"] = ["another_function"]
        modules["gone"] = SMALLEST | {"generator": "flashinfer.jit.api_log_stats:gen_gone_module"}
        file.write_text(tomli_w.dumps(data))
        printed = built.run(*crossed.arguments, code=1)
    finally:
        file.write_bytes(before)
    assert f"module {name} changed" in printed
    assert "module gone is new" in printed
    assert "has no attribute 'gen_gone_module'" in printed
    assert "docs/jit-cache.md" in printed
    assert crossed.wheel.is_file()  # the wheelhouse of the good list is as it was
