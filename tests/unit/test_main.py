"""`python -m sm121`: every failure is one message and one exit code."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm121 import cli, errors
from sm121.__main__ import main
from sm121.errors import (
    Busy,
    CheckFailed,
    CompilerMissing,
    DiskFull,
    EnvironmentFault,
    HashMismatch,
    Interrupted,
    LockStale,
    NetworkFault,
    OutOfMemory,
    PatchFailed,
    PinsFault,
    Sm121Error,
    SourceDrift,
    ToolFailed,
    UsageFault,
    WheelFault,
    from_oserror,
)


@pytest.fixture(autouse=True)
def _in_this_checkout(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.chdir(root)
    monkeypatch.setenv("SM121_BUILD", str(tmp_path / "build"))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def refused(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    """Run it; it must fail with this code and one message on standard error only."""
    assert main(list(argv)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("error: ") == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_a_verb_is_written_for_nox(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main([verb, "--help"])
    assert raised.value.code == 0
    assert f"nox -s {verb} --" in capsys.readouterr().out


def test_unknown_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "biuld")
    assert "'biuld'" in err
    assert "next: Did you mean build?" in err
    assert "why:" in err


def test_unknown_option_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "build", "--profil=smoke")
    assert "--profil" in err
    assert "next: Did you mean --profile?" in err
    assert "nox -s build -- --help" in err


def test_unknown_option_far_from_all_gets_no_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "Did you mean" not in refused(capsys, "build", "--zzzzzz")


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--dry" in refused(capsys, "build", "--dry")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["build", "--jobs", "many"], "many"),
        (["build", "--target", "windows"], "windows"),
        (["clean", "everything"], "everything"),
    ],
)
def test_wrong_value_is_not_answered_with_another_option(
    capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    err = refused(capsys, *argv)
    assert says in err
    assert "Did you mean" not in err


def test_plain_arch_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """cases.md 21."""
    err = refused(capsys, "build", "--profile=smoke", "--arch", "12.1")
    assert "error: --arch 12.1 " in err
    assert ".e2m1x2 not supported on .target sm_121" in err.split("why:")[1]
    assert "--arch 12.1a" in err.split("next:")[1]


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_no_jobs_is_refused(capsys: pytest.CaptureFixture[str], jobs: str) -> None:
    assert f"--jobs {jobs}" in refused(capsys, "build", "--profile=smoke", f"--jobs={jobs}")


def test_unknown_profile_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "build", "--profile", "everything")
    assert "'everything'" in err
    assert "smoke: " in err.split("why:")[1]


def test_unknown_stack_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "build", "--stack", "0.26.1")
    assert "--stack 0.26.0" in err.split("next:")[1]


def test_refused_usage_leaves_no_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused(capsys, "build", "--arch", "12.1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckFailed("x"), 1), (HashMismatch("x"), 1), (PatchFailed("x"), 1), (SourceDrift("x"), 1),
        (LockStale("x"), 1), (WheelFault("x"), 1), (UsageFault("x"), 2), (PinsFault("x"), 2),
        (EnvironmentFault("x"), 3), (NetworkFault("x"), 3), (DiskFull("x"), 3),
        (CompilerMissing("x"), 3), (OutOfMemory("x"), 3), (Busy("x"), 3),
        (ToolFailed("x", returncode=1), 4), (Interrupted("x"), 4), (Sm121Error("x"), 4),
        (KeyboardInterrupt(), 4),
        (OSError(errno.ENOSPC, "No space left on device", "/b/f"), 3),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/b/f"), 3),
        (PermissionError(errno.EACCES, "Permission denied", "/b/f"), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)  # fmt: skip
def test_exit_code_of_each_failure(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def failing(*_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "run", failing)
    refused(capsys, "build", code=code)


def test_every_failure_class_has_a_documented_exit_code() -> None:
    def below(cls: type[Sm121Error]) -> list[type[Sm121Error]]:
        return [cls, *(deep for sub in cls.__subclasses__() for deep in below(sub))]

    documented = str(errors.__doc__)
    for cls in below(Sm121Error):
        assert f"\n{cls.exit_code}     " in documented, cls


def test_full_disk_says_where_and_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "/build/x")

    monkeypatch.setattr(cli, "run", full)
    err = refused(capsys, "build", code=3)
    assert "No space left while writing /build/x." in err
    assert "nox -s clean" in err.split("next:")[1]


def test_other_operating_system_errors_keep_their_text() -> None:
    error = from_oserror(PermissionError(errno.EACCES, "Permission denied", "/build/x"))
    assert "Permission denied" in error.what
    assert "/build/x" in error.cause
    assert not isinstance(error, DiskFull)


def test_sigterm_is_an_interruption_and_not_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(*_: object) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    monkeypatch.setattr(cli, "run", terminated)
    err = refused(capsys, "build", code=4)
    assert "Interrupted" in err
    assert "finished stages and objects are kept" in err


def test_outside_of_a_checkout_it_works_on_the_packages_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    from sm121.layout import Layout

    monkeypatch.chdir(tmp_path)
    assert Layout.find().root == root


# --- a dry run ----------------------------------------------------------------------


def test_dry_run_of_nothing_says_what_would_run_and_makes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["build", "--profile", "smoke", "--dry-run"]) == 0
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == ["run", "source", "would run: first run"]
    assert [words[1] for words in lines] == [
        "source", "patch", "environment", "toolkit", "compile", "wheelhouse", "verify",
    ]  # fmt: skip
    assert all("depends on source" in words[2] for words in lines[1:])
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_one_stage_stops_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "--dry-run"]) == 0
    lines = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["source", "patch"]
