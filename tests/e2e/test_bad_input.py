"""Bad input: one clear message with cause and next step, the right exit code, nothing lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.checkouts import Checkout

pytestmark = pytest.mark.timeout(600)


@contextmanager
def edited(path: Path, old: str, new: str) -> Iterator[None]:
    original = path.read_text()
    assert old in original
    path.write_text(original.replace(old, new))
    try:
        yield
    finally:
        path.write_text(original)


def stack_toml(built: Checkout) -> Path:
    return built.root / "pins" / built.stack / "stack.toml"


def assert_one_message(printed: str) -> None:
    assert printed.count("error:") == 1, printed
    assert "why:" in printed or "next:" in printed
    assert "next:" in printed
    assert "Traceback" not in printed


def assert_nothing_lost(built: Checkout) -> None:
    assert "Nothing to do" in built.run("build", "--profile", "smoke")


@pytest.fixture(autouse=True)
def _finished(built: Checkout) -> None:
    built.run("build", "--profile", "smoke")


def test_unknown_key_in_stack(built: Checkout) -> None:
    with edited(stack_toml(built), "sdist-sha256", "sdist-sha265"):
        printed = built.run("build", "--profile", "smoke", code=2)
    assert_one_message(printed)
    assert "vllm.sdist-sha265: unknown key; did you mean 'sdist-sha256'?" in printed
    assert_nothing_lost(built)


def test_wrong_sha256_of_the_sdist(built: Checkout) -> None:
    sha256 = built.pins.vllm.sdist_sha256
    wrong = f"00{sha256[2:]}"
    with edited(stack_toml(built), sha256, wrong):
        printed = built.run("build", "--profile", "smoke", code=1)
    assert_one_message(printed)
    assert wrong[:10] in printed
    assert_nothing_lost(built)


def test_truncated_sdist_is_noticed_and_fetched_again(built: Checkout) -> None:
    pin = built.pins.vllm
    name = f"vllm-{pin.version}.tar.gz"
    sdist = built.cache / "files" / pin.sdist_sha256 / name
    whole = sdist.read_bytes()
    source = built.root / "build/source/vllm.git"
    subprocess.run(["rm", "-rf", source], check=True)
    sdist.write_bytes(whole[: len(whole) // 2])
    try:
        offline = built.run("source", "--offline", code=3)
        assert f"{name} in the cache is damaged" in offline
        assert_one_message(offline)
        built.run("source")
        assert sdist.read_bytes() == whole
    finally:
        sdist.parent.mkdir(parents=True, exist_ok=True)
        sdist.write_bytes(whole)
    built.run("build", "--profile", "smoke")  # the repository was removed, so `patch` runs again
    assert_nothing_lost(built)


def test_patch_that_does_not_apply(built: Checkout) -> None:
    patch = built.patches / "requirements.patch"
    tilelang = built.pins.family["tilelang"].version
    with edited(patch, f" tilelang=={tilelang}\n", " tilelang==0.1.8\n"):
        printed = built.run("build", "--profile", "smoke", code=1)
    assert_one_message(printed)
    assert "requirements.patch" in printed
    assert "patch failed: requirements/cuda.txt:" in printed
    assert "tilelang==0.1.8" in printed
    assert "these after it apply without it: " in printed
    assert "nccl-guard" in printed.split("apply without it: ")[1]
    assert_nothing_lost(built)


def test_patch_that_does_not_configure(built: Checkout) -> None:
    """It applies, and no Python in it is wrong: only CMake itself notices."""
    patch = built.root / f"patches/vllm/{built.stack}/build-selection.patch"
    with edited(
        patch, "+function (vllm_component_enabled OUT)", "+function (vllm_component_enabled"
    ):
        printed = built.run("patch", "--check", code=1)
    assert_one_message(printed)
    answers, _, error = printed.partition("error:")
    assert "Python files pass upstream's ruff" in answers
    assert "build-selection.patch leaves a tree that does not configure for 12.1a" in error
    assert "CMake Error" in error
    assert "build/log/configure.log" in error
    assert "skip  compile" in built.run("build", "--profile", "smoke")


def test_no_network(built: Checkout, tmp_path: Path) -> None:
    printed = built.run(
        "build", "--profile", "smoke", code=3,
        prefix=("unshare", "--net", "--map-root-user"),
        SM121_CACHE=str(tmp_path / "empty"), SM121_BUILD=str(tmp_path / "build"),
        UV_CACHE_DIR=str(tmp_path / "uv"),
    )  # fmt: skip
    assert_one_message(printed)
    assert "index could not be reached" in printed
    assert_nothing_lost(built)


def test_no_space(built: Checkout, tmp_path: Path) -> None:
    """The build folder on a 40 MB file system."""
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=40m none {small} && exec "$@"'
    printed = built.run(
        "build", "--profile", "smoke", code=3,
        prefix=("unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"),
        SM121_BUILD=str(small),
    )  # fmt: skip
    assert_one_message(printed)
    assert "No space left" in printed
    assert "nox -s clean" in printed
    assert_nothing_lost(built)


def test_missing_compiler(built: Checkout, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("git", "apt-get"):
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True)
        (tools / name).symlink_to(found.stdout.strip())
    printed = built.run("build", "--profile", "smoke", code=3, PATH=str(tools))
    assert_one_message(printed)
    assert "aarch64-linux-gnu-gcc was not found" in printed
    assert "apt-get install -y g++-aarch64-linux-gnu" in printed
    assert_nothing_lost(built)


def test_plain_arch_is_refused_early(built: Checkout) -> None:
    """Case 21."""
    printed = built.run("build", "--profile", "smoke", "--arch", "12.1", code=2)
    assert_one_message(printed)
    assert "e2m1x2 not supported on .target sm_121" in printed
    assert "--arch 12.1a" in printed


def test_compiler_killed_for_memory(built: Checkout, tmp_path: Path) -> None:
    """Case 12: a compiler that ends with 137, as the kernel's OOM killer makes it."""
    real = "/usr/bin/aarch64-linux-gnu-g++"
    fake = tmp_path / "aarch64-linux-gnu-g++"
    fake.write_text(
        f'#!/bin/sh\ncase "$*" in *cumem_allocator*) kill -9 $$;; esac\nexec {real} "$@"\n'
    )
    fake.chmod(0o755)
    subprocess.run(["rm", "-rf", built.root / "build/dist"], check=True)
    printed = built.run("build", "--profile", "smoke", "--jobs", "2", code=3, SM121_CXX=str(fake))
    assert_one_message(printed)
    assert "memory" in printed
    assert "--jobs 1" in printed
    built.run("build", "--profile", "smoke")
    assert_nothing_lost(built)
