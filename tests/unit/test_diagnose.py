"""What a failed build says, and how ninja's output becomes progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm121.compile import progress as progress_module
from sm121.compile.build import count_objects, diagnose
from sm121.compile.progress import NinjaProgress
from sm121.errors import DiskFull, OutOfMemory, ToolFailed

LOG = Path("/build/log/compile.log")


def failed(*lines: str, returncode: int = 1, jobs: int = 8):
    error = diagnose(lines, ToolFailed("x", returncode=returncode), jobs=jobs, log=LOG)
    assert error.remedy
    return error


@pytest.mark.parametrize(
    "line",
    [
        "g++: fatal error: Killed signal terminated program cc1plus",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "FAILED: [code=137] CMakeFiles/x.o",
        "/bin/sh: line 1: 12345 Killed                  nvcc -c x.cu",
        "subprocess.CalledProcessError: Command 'cmake' returned non-zero exit status 137.",
        "error: command failed with exit code: 137",
        "ninja: job exited with code 137",
    ],
)
def test_killed_compiler_is_memory(line: str) -> None:
    """cases.md 12: the message names memory and the lower --jobs to use."""
    error = failed("[sm121 1/9] Building", line)
    assert isinstance(error, OutOfMemory)
    assert error.exit_code == 3
    assert "memory" in error.what
    assert "137" in error.what
    assert "`--jobs 4`" in error.remedy
    assert error.details == (line,)


@pytest.mark.parametrize("returncode", [137, -9])
def test_setup_itself_killed_is_memory(returncode: int) -> None:
    assert isinstance(failed("nothing to see", returncode=returncode), OutOfMemory)


@pytest.mark.parametrize(("jobs", "fewer"), [(2, 1), (3, 1), (20, 10)])
def test_half_of_the_jobs_is_proposed(jobs: int, fewer: int) -> None:
    assert f"`--jobs {fewer}`" in failed(returncode=137, jobs=jobs).remedy


def test_with_one_job_fewer_are_not_proposed() -> None:
    error = failed(returncode=137, jobs=1)
    assert "--jobs" not in error.remedy
    assert "close other programs" in error.remedy


@pytest.mark.parametrize(
    "line",
    [
        'csrc/mla/sm100_mla_decode.cu(137): error: identifier "x" is undefined',
        "csrc/decode.cpp:137:5: error: expected ';'",
        "csrc/my_status.h:137: error: no",
        "x.cpp:3: error: static assertion failed: KilledByReviewer",
        "x.cpp:1370: error: code 1370",
    ],
)
def test_line_137_of_a_source_is_not_memory(line: str) -> None:
    error = failed(line)
    assert isinstance(error, ToolFailed)
    assert error.details == (line,)


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/ld: final link failed: No space left on device",
        "cc1plus: fatal error: error writing to /tmp/x.s: Disk quota exceeded",
    ],
)
def test_full_disk_is_named(line: str) -> None:
    error = failed("[sm121 1/9] Building", line)
    assert isinstance(error, DiskFull)
    assert error.cause == line
    assert "nox -s clean" in error.remedy


def test_ordinary_compile_error_shows_the_compilers_lines() -> None:
    error = failed(
        "[sm121 1/3] Building CXX object x.o",
        "csrc/x.cpp:10:5: error: 'foo' was not declared in this scope",
        "   10 |     foo();",
        *(f"noise {n}" for n in range(50)),
        "ninja: build stopped: subcommand failed.",
    )
    assert isinstance(error, ToolFailed)
    assert error.exit_code == 4
    assert error.details == ("csrc/x.cpp:10:5: error: 'foo' was not declared in this scope",)
    assert str(LOG) in error.cause
    assert "nox -s shell" in error.remedy


def test_cmake_error_is_shown() -> None:
    error = failed("-- ok", "CMake Error at CMakeLists.txt:5 (message):", "  No torch.")
    assert error.details == ("CMake Error at CMakeLists.txt:5 (message):",)


def test_without_an_error_line_the_end_of_the_output_is_shown() -> None:
    error = failed(*(f"line {n}" for n in range(40)))
    assert error.details == tuple(f"line {n}" for n in range(25, 40))


def test_not_the_whole_flood_of_errors_is_shown() -> None:
    assert len(failed(*(f"x.cpp:{n}: error: no" for n in range(500))).details) == 8


# --- progress -----------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(progress_module.time, "monotonic", lambda: Clock.now)
    return Clock


class Bar:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, bool]] = []

    def update(self, text: str, *, final: bool = False) -> None:
        self.texts.append((text, final))


def test_ninja_lines_become_done_total_and_time_left(clock) -> None:
    bar = Bar()
    ninja = NinjaProgress(bar, _started=0.0)
    clock.now = 30.0
    ninja("[sm121 1/4] Building CXX object a.o")
    clock.now = 60.0
    ninja("[sm121 4/4] Linking CXX shared module x.so")
    assert bar.texts == [
        ("1/4 objects, 30 s gone, about 1 min 30 s left", False),
        ("4/4 objects, 1 min 00 s gone, about 0.0 s left", True),
    ]


def test_time_left_is_by_what_the_objects_left_cost(clock) -> None:
    """The long ones come first: of 100 s of work, 90 are done after the first of three."""
    bar = Bar()
    costs = {"long.o": 90.0, "b.o": 6.0, "c.o": 4.0}
    ninja = NinjaProgress(bar, costs, lambda: ["b.o", "c.o"], _started=0.0)
    clock.now = 180.0
    ninja("[sm121 1/3] Building CUDA object long.o")
    ninja("[sm121 2/3] Building CUDA object b.o")
    assert [text.split("about ")[1] for text, _ in bar.texts] == ["20 s left", "7.5 s left"]


def test_objects_that_were_never_measured_count_as_the_mean(clock) -> None:
    """Left out of the sum, 71 of FA2's 79 objects made a build of 90 minutes one of 22."""
    bar = Bar()
    ninja = NinjaProgress(bar, {"a.o": 30.0, "b.o": 10.0}, lambda: ["b.o", "new.o"], _started=0.0)
    clock.now = 60.0
    ninja("[sm121 1/4] Building CUDA object a.o")
    ninja("[sm121 2/4] Building CUDA object b.o")
    ninja("[sm121 3/4] Building CUDA object new.o")
    assert [text.split("about ")[1] for text, _ in bar.texts] == [
        "1 min 00 s left", "30 s left", "0.0 s left",
    ]  # fmt: skip


def test_measured_objects_of_another_profile_do_not_count(clock) -> None:
    """Taken for the cheapest that are left, they made a build seem shorter than it was."""
    bar = Bar()
    costs = {"a.o": 30.0, "b.o": 30.0, "of-another.o": 1.0}
    ninja = NinjaProgress(bar, costs, lambda: ["b.o"], _started=0.0)
    clock.now = 60.0
    ninja("[sm121 1/2] Building CUDA object a.o")
    assert "about 1 min 00 s left" in bar.texts[0][0]


def test_objects_made_again_after_an_edit_are_counted_by_number(clock) -> None:
    """Which of those that are there ninja makes again is not known before."""
    bar = Bar()
    costs = {f"{n}.o": 180.0 for n in range(6)} | {f"s{n}.o": 0.3 for n in range(90)}
    ninja = NinjaProgress(bar, costs, list, _started=0.0)
    clock.now = 180.0
    ninja("[sm121 1/6] Building CUDA object 0.o")
    assert "about 15 min 00 s left" in bar.texts[0][0]


def test_nothing_measured_leaves_the_estimate_by_number(clock) -> None:
    bar = Bar()
    ninja = NinjaProgress(bar, {}, lambda: ["a.o", "b.o"], _started=0.0)
    clock.now = 30.0
    ninja("[sm121 1/4] Building CXX object a.o")
    assert "about 1 min 30 s left" in bar.texts[0][0]


def test_only_compiled_objects_are_counted(clock) -> None:
    ninja = NinjaProgress(Bar())
    for line in (
        "[sm121 1/5] Building CXX object a.o",
        "[sm121 2/5] Building CUDA object b.o",
        "[sm121 3/5] Linking CXX shared module x.so",
        "[sm121 4/5] Generating y",
        "Building wheel",
        "[1/5] Building CXX object of somebody else's ninja",
        "  [sm121 1/5] Building in an error message",
    ):
        ninja(line)
    assert ninja.built == 2


def test_nothing_done_yet_divides_by_nothing(clock) -> None:
    bar = Bar()
    NinjaProgress(bar)("[sm121 0/4] Building CXX object a.o")
    assert bar.texts[0][0].startswith("0/4 objects")


def test_configure_is_told(clock) -> None:
    bar = Bar()
    NinjaProgress(bar)("-- Configuring done (54.0s)")
    assert bar.texts == [("Configuring done (54.0s)", False)]


# --- what configuring would compile ---------------------------------------------------

RULES = """\
build CMakeFiles/_C.dir/csrc/a.cu.o: CUDA_COMPILER___C_unscanned_Release ../csrc/a.cu
  FLAGS = -gencode arch=compute_120,code=sm_120
build CMakeFiles/_C.dir/csrc/b.cpp.o: CXX_COMPILER___C_unscanned_Release ../csrc/b.cpp
build fa/CMakeFiles/_fa3.dir/hopper/c.cu.o: CUDA_COMPILER___fa3_unscanned_Release /x/c.cu
build CMakeFiles/triton_kernels: CUSTOM_COMMAND
build _C.abi3.so: CXX_MODULE_LIBRARY_LINKER___C_Release CMakeFiles/_C.dir/csrc/a.cu.o
"""


def test_objects_are_counted_by_target_subprojects_included() -> None:
    assert count_objects(RULES) == {"_C": 2, "_fa3": 1}
