"""Run vLLM's setup.py and read its failures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.compile.launcher import SAYS_KILLED
from sm121.compile.order import objects_of
from sm121.compile.progress import NinjaProgress
from sm121.compile.records import component_of
from sm121.errors import OutOfMemory, Sm121Error, ToolFailed, disk_full
from sm121.files import remove_tree
from sm121.ui import Ui

# What gcc, nvcc, ninja and the shell print when the kernel killed a compiler.
_KILLED = re.compile(rf"{SAYS_KILLED}|\bKilled\b|\b(?:exit|status|code)[ :=]{{1,3}}137\b")
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
_ERROR = re.compile(r"(?:\b(?:fatal )?error\b[:\s]|CMake Error|^FAILED:|ValueError:|RuntimeError:)")


# vLLM's own configure step, without the build that follows it: `build_ext` as setup.py defines it.
_CONFIGURE = """
import pathlib, sys
import setuptools, distutils.core
command = distutils.core.run_setup("setup.py", sys.argv[1:], stop_after="commandline")
command = command.get_command_obj("build_ext")
command.ensure_finalized()
pathlib.Path(command.build_temp).mkdir(parents=True, exist_ok=True)
for extension in command.extensions:
    command.configure(extension)
print("sm121 configured", pathlib.Path(command.build_temp).resolve())
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What a run of setup.py made: the wheel, objects compiled (not those up to date)."""

    wheel: Path
    objects: int


def run_setup(
    *,
    tree: Path,
    output: Path,
    python: Path,
    environment: Mapping[str, str],
    abi: str,
    machine: str,
    jobs: int,
    log: Path,
    ui: Ui,
    shell_options: str,
    seconds: Mapping[str, float],
) -> Built:
    """`setup.py build … bdist_wheel` in the patched tree; objects stay in `output` for ninja.

    abi: python tag of the limited API, as 'cp311'. seconds: object → CPU seconds, of those that
    were measured; for the time left. Raises OutOfMemory, DiskFull, or
    ToolFailed with the compiler's own error lines.
    """
    # Python files of an earlier tree or profile must not be packaged again.
    for leftover in [*output.glob("lib.*"), output / "dist", output / "bdist"]:
        remove_tree(leftover)
    lines: list[str] = []
    with ui.progress("compile") as progress:
        ninja = NinjaProgress(progress, seconds, lambda: _missing(output))

        def on_line(line: str) -> None:
            lines.append(line)
            ninja(line)

        try:
            proc.run(
                [
                    python, "setup.py", *_build_arguments(output),
                    "bdist_wheel", "--dist-dir", output / "dist", "--bdist-dir", output / "bdist",
                    "--py-limited-api", abi, "--plat-name", f"linux_{machine}",
                    # What is read and written anew right after (compile/wheel.py) is not deflated.
                    "--compression", "stored",
                ],
                cwd=tree, env=environment, log=log, on_line=on_line,
            )  # fmt: skip
        except ToolFailed as failure:
            raise diagnose(
                lines, failure, jobs=jobs, log=log, shell_options=shell_options
            ) from failure
    wheels = list((output / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise ToolFailed(
            f"setup.py ended well but made {len(wheels)} wheels.", returncode=0, log=log
        )
    return Built(wheel=wheels[0], objects=ninja.built)


def run_configure(
    *, tree: Path, output: Path, python: Path, environment: Mapping[str, str], log: Path
) -> dict[str, int]:
    """Only what setup.py does before it compiles: CMake's configure and generate, in `output`.

    Returns the number of objects of each target that has any. Raises ToolFailed with CMake's or
    setup.py's own error lines.
    """
    lines: list[str] = []
    try:
        proc.run(
            [python, "-c", _CONFIGURE, *_build_arguments(output)],
            cwd=tree, env=environment, log=log, on_line=lines.append,
        )  # fmt: skip
    except ToolFailed as failure:
        raise ToolFailed(
            "vLLM's configure failed.",
            returncode=failure.returncode,
            tail=[line for line in lines if _ERROR.search(line)][:8] or lines[-15:],
            log=log,
            cause=f"the whole output is in {log}",
        ) from failure
    folder = Path(lines[-1].removeprefix("sm121 configured "))
    return count_objects((folder / "build.ninja").read_text())


def count_objects(rules: str) -> dict[str, int]:
    """Number of compiled objects of each target in a build.ninja of CMake's, those of projects
    in subdirectories included."""
    return dict(sorted(Counter(map(component_of, objects_of(rules))).items()))


def configured_objects(output: Path) -> dict[str, Path]:
    """The objects that CMake's rules in `output` (setup.py's --build-base) name, and their files."""
    return {
        name: rules.parent / name
        for rules in output.glob("temp.*/build.ninja")
        for name in objects_of(rules.read_text())
    }


def _missing(output: Path) -> list[str]:
    return [name for name, file in configured_objects(output).items() if not file.exists()]


def _build_arguments(output: Path) -> list[str | Path]:
    # -q: else a line for each of 3,000 copied files
    return ["-q", "build", "--build-base", output]


def diagnose(
    lines: Sequence[str], failure: ToolFailed, *, jobs: int, log: Path, shell_options: str = ""
) -> Sm121Error:
    """Turn a failed build's output into the error that helps."""
    text = "\n".join(lines)
    if failure.returncode in (137, -9) or _KILLED.search(text):
        return OutOfMemory(
            f"A compiler was killed, most likely for memory (exit 137), with {jobs} job(s).",
            cause="one nvcc can take 10 GB, and the kernel kills when memory ends",
            remedy=f"Run the same command with `--jobs {max(1, jobs // 2)}`: objects already "
            "built are kept." if jobs > 1 else
            "One job is the least: close other programs, or build on a machine with more memory.",
            details=[line for line in lines if _KILLED.search(line)][:3],
        )  # fmt: skip
    if _NO_SPACE.search(text):
        return disk_full(
            "compiling",
            next(line for line in lines if _NO_SPACE.search(line)).strip(),
            kept="objects already built are kept",
        )
    errors = [line for line in lines if _ERROR.search(line)][:8]
    return ToolFailed(
        "vLLM's build failed.",
        returncode=failure.returncode,
        tail=errors or lines[-15:],
        log=log,
        cause=f"the whole output is in {log}",
        remedy=f"`nox -s shell -- {shell_options}` opens a shell with the same tools and the "
        "patched tree.",
    )
