"""SHA256SUMS of a wheelhouse, in the format of sha256sum(1): write and verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sm121.context import Context

SUMS = "SHA256SUMS"


def write_sums(context: Context, folder: Path) -> None:
    """List every file of the folder except README.md, which belongs to the repository."""
    files = sorted(
        (f for f in folder.iterdir() if f.name not in (SUMS, "README.md")), key=lambda f: f.name
    )
    lines = [f"{context.memory.sha256(file)}  {file.name}\n" for file in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def listed(folder: Path) -> set[str]:
    """Names that a folder's SHA256SUMS lists; none if there is no such file."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {line.partition("  ")[2] for line in lines}


def verify_sums(context: Context, folder: Path) -> list[str]:
    """Faults of a wheelhouse against its own SHA256SUMS: missing, altered and extra files."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return [f"{SUMS} is missing"]
    wanted = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    faults = []
    for name, digest in wanted.items():
        file = folder / Path(name).name  # never outside the folder
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif context.memory.sha256(file) != digest:
            faults.append(f"{name} was altered")
    faults += [f"{p.name} is not listed" for p in folder.glob("*.whl") if p.name not in wanted]
    return faults
