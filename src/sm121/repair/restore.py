"""Bring an environment back to a wheelhouse: remove what deviates, install that, offline.

Removing is done here and not by the installer, which can't uninstall what has no RECORD and
would follow the RECORD of a wrong wheel into files of right ones. An interrupted run leaves
files missing, which the next run finds.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sm121 import proc
from sm121.files import remove_tree
from sm121.index import uv_binary
from sm121.repair.compare import Comparison
from sm121.repair.installed import Environment
from sm121.repair.wheel import Wheel


def files_to_remove(
    environment: Environment, comparison: Comparison, wheels: Mapping[str, Wheel]
) -> list[Path]:
    """What is in the way of a clean install of the deviating distributions.

    All that the wrong ones recorded, all that the right ones will bring, and leftovers; but
    nothing that a distribution which does not deviate owns, or an extra one.
    """
    doomed = {deviation.distribution for deviation in comparison.deviations}
    kept: set[str] = {
        path for name, wheel in wheels.items() if name not in doomed for path in wheel.installed()
    }
    kept |= {path for one in comparison.extras for path in one.record}
    paths: set[str] = set()
    for deviation in comparison.deviations:
        paths |= set(wheels[deviation.distribution].installed()) | set(deviation.leftovers)
    for one in comparison.installed:
        if one.distribution in doomed:
            paths |= set(one.record)
    files = (environment.inside(path) for path in sorted(paths - kept))
    return [file for file in files if file is not None and (file.is_file() or file.is_symlink())]


def restore(
    environment: Environment,
    comparison: Comparison,
    wheels: Mapping[str, Wheel],
    folder: Path,
    *,
    log: Path,
) -> None:
    """Remove and reinstall what deviates, from the wheels in `folder`, without a network.

    Raises ToolFailed with uv's own words.
    """
    doomed = {deviation.distribution for deviation in comparison.deviations}
    remove(environment, files_to_remove(environment, comparison, wheels))
    for one in comparison.installed:
        if one.distribution in doomed:
            remove_tree(one.folder)
    install(environment, [folder / wheels[name].filename for name in sorted(doomed)], log=log)


def install(environment: Environment, files: Sequence[Path], *, log: Path) -> None:
    # The cache beside the environment, so that uv links from it; it is thrown away after.
    with tempfile.TemporaryDirectory(
        prefix=f".{environment.root.name}-", dir=environment.root.parent
    ) as scratch:
        listing = Path(scratch) / "wheels.txt"
        listing.write_text("".join(f"{file}\n" for file in files), encoding="utf-8")
        proc.run(
            [
                uv_binary(), "pip", "install", "--python", environment.interpreter, "--offline",
                "--no-index", "--no-deps", "--no-config", "--link-mode", "hardlink",
                "-r", listing,
            ],
            env={**os.environ, "UV_CACHE_DIR": str(Path(scratch) / "cache")},
            log=log,
        )  # fmt: skip


def remove(environment: Environment, files: Iterable[Path]) -> None:
    """Remove files, the bytecode made of them, and folders that become empty."""
    folders: set[Path] = set()
    for file in files:
        file.unlink(missing_ok=True)
        folders.add(file.parent)
        if file.suffix == ".py":
            cache = file.parent / "__pycache__"
            for compiled in cache.glob(f"{file.stem}.*.pyc"):
                compiled.unlink(missing_ok=True)
            folders.add(cache)
    for folder in sorted(folders, key=lambda f: -len(f.parts)):
        while folder != environment.site and folder.is_relative_to(environment.site):
            with contextlib.suppress(FileNotFoundError):
                try:
                    folder.rmdir()
                except OSError:
                    break
            folder = folder.parent


def pip_check(environment: Environment) -> list[str]:
    """What `uv pip check` complains about; [] if nothing."""
    finished = proc.run(
        [uv_binary(), "pip", "check", "--python", environment.interpreter, "--no-config"],
        check=False,
    )
    return [] if finished.returncode == 0 else finished.output.splitlines()
