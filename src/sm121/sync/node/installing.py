"""Install a release with the wheelhouse's own install.py, offline, and check its signature."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sm121.sync.node.listing import NAMESPACE
from sm121.sync.node.refusal import CHECK, DISK, ENVIRONMENT, TOOL, Refused
from sm121.sync.node.releases import VERIFIED

SIGNERS = "allowed_signers"
_child: subprocess.Popen[str] | None = None


def install(
    folder: Path,
    environment: Path,
    options: list[str],
    *,
    say: Callable[[str], None],
    verify: Callable[[], list[dict[str, object]]],
) -> list[dict[str, object]]:
    """Make an environment where none stands; returns what verify() finds deviating in it.

    Then, and if install.py fails, nothing of it is left. Raises Refused with install.py's own words.
    """
    shutil.rmtree(environment, ignore_errors=True)
    argv = [sys.executable, "-u", "-I", str(folder / "install.py"), str(environment), *options]
    code, lines = run(argv, say)
    found = verify() if code == 0 else []
    if code == 0 and not found:
        (environment / VERIFIED).write_text("every file is as in its wheel\n")
        return []
    shutil.rmtree(environment, ignore_errors=True)
    if code == 0:
        return found
    full = any("No space left" in line or "os error 28" in line for line in lines)
    raise Refused(
        DISK if full else {1: CHECK, 3: ENVIRONMENT}.get(code, TOOL),
        "No space left on this node while installing." if full
        else f"install.py failed on this node with exit status {code}.",
        details=lines[-25:],
        remedy="Free some space there and run the same command again." if full
        else "Its own message is above; run the same command again when that is mended.",
    )  # fmt: skip


def run(argv: list[str], say: Callable[[str], None]) -> tuple[int, list[str]]:
    """Run a program to its end, each line said; it is ended with us (stop)."""
    global _child
    _child = subprocess.Popen(
        argv, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    lines = []
    assert _child.stdout is not None
    with _child.stdout:
        for line in _child.stdout:
            lines.append(line.rstrip("\n"))
            say(lines[-1])
    code = _child.wait()
    _child = None
    return code, lines


def stop() -> None:
    """Kill what `run` runs, and its children."""
    child = _child
    if child is not None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def check_signature(root: Path, text: str, signature: str) -> str:
    """Who signed the release's list; '' if this node asks for no signature (it has no file
    `allowed_signers`, ssh-keygen(1), ALLOWED SIGNERS). Raises Refused if it asks and none fits."""
    signers = root / SIGNERS
    if not signers.exists():
        return ""
    if not signature:
        raise Refused(
            CHECK, "This node takes signed releases only, and this one is not signed.",
            cause=f"{signers} exists there", remedy="Sync with --sign KEY.",
        )  # fmt: skip
    place = root / f".signature.{os.getpid()}"
    try:
        place.write_text(signature)
        who = subprocess.run(
            ["ssh-keygen", "-Y", "find-principals", "-f", str(signers), "-s", str(place)],
            capture_output=True, text=True, errors="replace",
        ).stdout.split()  # fmt: skip
        for principal in who:
            checked = subprocess.run(
                ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", principal, "-n", NAMESPACE,
                 "-s", str(place)],
                input=text, capture_output=True, text=True, errors="replace",
            )  # fmt: skip
            if checked.returncode == 0:
                return principal
    except FileNotFoundError as error:
        raise Refused(CHECK, "The signature can't be checked: there is no ssh-keygen.") from error
    finally:
        place.unlink(missing_ok=True)
    raise Refused(
        CHECK, "The release's signature is not one that this node takes.",
        cause="not in allowed_signers for namespace sm121, or made over another list",
        details=[str(signers)], remedy="Sync with --sign and the key of a signer listed there.",
    )  # fmt: skip
