"""Tiny real wheels, and tiny real ELF files for them."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.tools import run, tool

CROSS = "aarch64-linux-gnu-gcc"


def make_wheel(
    folder: Path,
    files: Mapping[str, bytes | str],
    *,
    name: str = "tiny",
    version: str = "1.0",
    tag: str = "py3-none-any",
    requires: Sequence[str] = (),
    executable: Sequence[str] = (),
    date: tuple[int, int, int, int, int, int] = (2020, 1, 2, 3, 4, 6),
    order: int = 1,
    umask: int = 0o022,
) -> Path:
    """Write a valid wheel. order -1: members in reverse order."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    content = {k: v.encode() if isinstance(v, str) else v for k, v in files.items()}
    content[f"{info}/METADATA"] = "".join(
        [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            *(f"Requires-Dist: {r}\n" for r in requires),
        ]
    ).encode()
    content[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    )
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")  # vLLM's files have commas in their names
    for member, data in sorted(content.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow((member, f"sha256={digest}", len(data)))
    content[f"{info}/RECORD"] = f"{record.getvalue()}{info}/RECORD,,\n".encode()
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member in list(content)[::order]:
            entry = zipfile.ZipInfo(member, date)
            mode = 0o777 if member in executable else 0o666
            entry.external_attr = (0o100000 | (mode & ~umask)) << 16
            archive.writestr(entry, content[member], zipfile.ZIP_DEFLATED)
    return wheel


def compile_library(
    output: Path,
    source: str = "int answer(void) { return 42; }\n",
    *,
    compiler: str = CROSS,
    flags: Sequence[str | Path] = (),
) -> bytes:
    """Compile a shared library for aarch64 (or with another compiler); returns its bytes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    code = output.with_suffix(".c")
    code.write_text(source)
    package = "gcc-aarch64-linux-gnu" if compiler == CROSS else compiler
    run(
        tool(compiler, package), "-shared", "-fPIC", "-nostdlib", "-o", output, code, *flags
    )  # fmt: skip
    return output.read_bytes()
