"""Take files out of wheels."""

from __future__ import annotations

import calendar
import os
import shutil
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from sm121.errors import HashMismatch

_BLOCK = 1 << 20


def unpack(wheel: Path, destination: Path, rename: Callable[[str], str | None]) -> list[str]:
    """Unpack the members for which `rename` gives a path relative to `destination`.

    Executable bits and times are kept: a toolkit that is made again has headers of the same
    age, so that ninja does not compile everything again. Returns the paths written. Raises
    HashMismatch for a member that is damaged or would land outside.
    """
    written: list[str] = []
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = None if member.is_dir() else rename(member.filename)
                if name is None:
                    continue
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts:
                    raise HashMismatch(
                        f"{wheel.name} has a member outside itself: {member.filename}"
                    )
                out = destination / path
                out.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, out.open("wb") as target:
                    shutil.copyfileobj(source, target, _BLOCK)
                # ZIP times have no zone; read as UTC they are the same everywhere.
                moment = calendar.timegm((*member.date_time, 0, 0, 0))
                os.utime(out, (moment, moment))
                if (member.external_attr >> 16) & 0o111:
                    out.chmod(0o755)
                written.append(name)
    except zipfile.BadZipFile as error:
        raise HashMismatch(
            f"{wheel.name} is damaged.", cause=str(error), remedy=f"Remove {wheel.parent}."
        ) from error
    return written


def unpack_all(
    wheels: Iterable[Path], destination: Path, rename: Callable[[str], str | None]
) -> None:
    """Unpack several wheels at once (zlib releases the interpreter lock)."""
    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(unpack, w, destination, rename) for w in wheels]:
            job.result()
