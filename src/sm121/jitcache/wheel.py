"""The wheel `flashinfer-jit-cache`: the package that FlashInfer asks for modules made ahead of time.

FlashInfer 0.6.17 (flashinfer/jit/env.py, `_get_aot_dir`): if a package `flashinfer_jit_cache` can
be found, it takes `get_jit_cache_dir()` of it, and raises unless its `__version__` starts with
FlashInfer's own. In that folder a module is `NAME/NAME.so` (jit/core.py, `aot_path`); neither GPU
architecture nor content is compared.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm121.compile.wheel import canonical_member, member_order
from sm121.files import write_atomic
from sm121.repair.wheel import Entry, record_digest, render_record

DISTRIBUTION, PACKAGE = "flashinfer-jit-cache", "flashinfer_jit_cache"
# In the dist-info, as an overlay has sm121-overlay.json.
NOTE = "sm121-jit-cache.json"
_FOLDER = "jit_cache"

_INIT = '''"""FlashInfer modules compiled ahead of time for {arch}; flashinfer/jit/env.py looks here."""

from pathlib import Path

__version__ = "{version}"


def get_jit_cache_dir() -> str:
    """Folder in which each module is NAME/NAME.so."""
    return str(Path(__file__).resolve().parent / "{folder}")
'''


def wheel_name(version: str, machine: str) -> str:
    """Of no particular Python: modules use tvm-ffi's C interface, not CPython's."""
    return f"{PACKAGE}-{version}-{_tag(machine)}.whl"


def _tag(machine: str) -> str:
    return f"py3-none-linux_{machine}"


def member_of(inside: str) -> str:
    """The wheel's member of a module. inside: its path in the cache folder."""
    return f"{PACKAGE}/{_FOLDER}/{inside}"


def write_wheel(
    output: Path, libraries: Mapping[str, bytes], *, version: str, machine: str, arch: str,
    requires: Sequence[str], note: Mapping[str, Any], epoch: int,
    license_expression: str = "", licenses: Mapping[str, bytes],
) -> None:  # fmt: skip
    """Write the wheel, canonical as compile.wheel has it: one content, one file.

    libraries: path that FlashInfer asks for inside the cache folder → content. requires:
    Requires-Dist. licenses: FlashInfer's, by file name. note: what it is made of, for a person who has only the wheel.
    """
    info = f"{PACKAGE}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.4",
        f"Name: {DISTRIBUTION}",
        f"Version: {version}",
        f"Summary: FlashInfer modules compiled ahead of time for {arch}",
        *([f"License-Expression: {license_expression}"] if license_expression else []),
        *(f"License-File: {name}" for name in sorted(licenses)),
        "Requires-Python: >=3.10",
        *(f"Requires-Dist: {line}" for line in requires),
    ]
    tags = [
        "Wheel-Version: 1.0",
        "Generator: sm121",
        "Root-Is-Purelib: false",
        f"Tag: {_tag(machine)}",
    ]
    members = {
        f"{PACKAGE}/__init__.py": _INIT.format(arch=arch, version=version, folder=_FOLDER).encode(),
        **{member_of(path): data for path, data in libraries.items()},
        **{f"{info}/licenses/{name}": data for name, data in licenses.items()},
        f"{info}/METADATA": ("\n".join(metadata) + "\n").encode(),
        f"{info}/WHEEL": ("\n".join(tags) + "\n").encode(),
        f"{info}/{NOTE}": (json.dumps(note, indent=1) + "\n").encode(),
    }
    names = sorted(members, key=member_order)
    lines = {n: Entry(digest=record_digest(members[n]), size=len(members[n])) for n in names}
    members[f"{info}/RECORD"] = render_record(lines, f"{info}/RECORD").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(members, key=member_order):
            archive.writestr(
                canonical_member(name, epoch, like=None), members[name], zipfile.ZIP_STORED
            )
    write_atomic(output, buffer.getvalue())


def unpack_package(wheel: Path, folder: Path) -> Path:
    """The package alone in a folder for a Python's path; returns the folder."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [n for n in archive.namelist() if n.startswith(f"{PACKAGE}/")])
    return folder
