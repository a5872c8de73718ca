"""install.py as a node runs it: by a Python of its own, in a folder that was copied there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sm121 import proc
from sm121.repair.wheel import read_wheel
from support.environments import family, wheelhouse
from support.wheelhouses import HERE, PYTHON, finish, uv_wheel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    wheels = [*family(tmp_path / "wheels").values(), uv_wheel(tmp_path / "wheels")]
    made = wheelhouse(tmp_path / "wheelhouse", wheels, **HERE)
    return finish(made)


def install(folder: Path, env: Path, *options: str) -> tuple[int, str]:
    finished = proc.run(
        [sys.executable, "-I", folder / "install.py", env, *options], check=False,
        env={"PATH": "/usr/bin:/bin", "UV_DEFAULT_INDEX": "http://127.0.0.1:9/"},
    )  # fmt: skip
    return finished.returncode, finished.output


def test_new_environment_has_exactly_the_wheels(folder: Path, tmp_path: Path) -> None:
    """cases.md 10: no hand step, and `uv pip check` is part of it."""
    code, output = install(folder, tmp_path / "env")
    assert code == 0, output
    site = next((tmp_path / "env").glob("lib/python3*/site-packages"))
    found = {f.name for f in site.glob("*.dist-info")}
    assert found == {read_wheel(w).dist_info for w in folder.glob("*.whl")}
    assert (site / "cutlass/cute.py").read_text() == "cu13 = 1\n"
    assert (tmp_path / "env/sm121-manifest.json").is_file()
    # Nothing beside it is left.
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"target": "linux-riscv64"}, "this wheelhouse is for linux-riscv64, this machine is"),
        ({"glibc": "9.99"}, "needs glibc 9.99 or later"),
        ({"python": "3.8"}, "this wheelhouse is for CPython 3.8"),
        ({"partial": True, "profile": "smoke"}, "profile smoke, which is not a whole vLLM"),
        ({"complete": False}, "without its dependencies"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, facts: dict[str, object], says: str
) -> None:
    """cases.md 22, among others."""
    wheels = family(tmp_path / "wheels").values()
    made = finish(wheelhouse(tmp_path / "wheelhouse", wheels, **{**HERE, **facts}))
    code, output = install(made, tmp_path / "env")
    assert code == 3
    assert says in output
    assert "next:" in output
    assert not (tmp_path / "env").exists()


def test_interpreter_of_another_version_is_refused(folder: Path, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho cpython 3.8 0\n")
    fake.chmod(0o755)
    code, output = install(folder, tmp_path / "env", "--python", str(fake))
    assert code == 3
    assert f"is for CPython {PYTHON}, {fake} is cpython 3.8" in output


def test_partial_profile_on_request(folder: Path, tmp_path: Path) -> None:
    wheelhouse(folder, folder.glob("*.whl"), **HERE, partial=True, profile="smoke")
    assert install(finish(folder), tmp_path / "env", "--allow-partial")[0] == 0


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: cut(next(f.glob("torch-*.whl"))), "torch-2.11.0-py3-none-any.whl was altered"),
        (lambda f: next(f.glob("torch-*.whl")).unlink(), "torch-2.11.0-py3-none-any.whl is missing"),
        (lambda f: (f / "more-1-py3-none-any.whl").write_bytes(b""), "more-1-py3-none-any.whl is not listed"),
        (lambda f: (f / "pylock.toml").write_text(""), "pylock.toml was altered"),
        (lambda f: (f / "SHA256SUMS").unlink(), "SHA256SUMS cannot be read"),
    ],
)  # fmt: skip
def test_damaged_wheelhouse_is_refused(folder: Path, tmp_path: Path, damage, says: str) -> None:
    damage(folder)
    code, output = install(folder, tmp_path / "env")
    assert code == 1
    assert says in output
    assert not (tmp_path / "env").exists()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_folder_that_is_in_use_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env/precious").write_text("keep")
    code, output = install(folder, tmp_path / "env")
    assert code == 2
    assert "exists" in output
    assert (tmp_path / "env/precious").read_text() == "keep"


def test_what_an_interrupted_run_left_is_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env/sm121-unfinished").write_text("")
    assert install(folder, tmp_path / "env")[0] == 0
    assert not (tmp_path / "env/sm121-unfinished").exists()
