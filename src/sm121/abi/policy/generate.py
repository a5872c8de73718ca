"""Make the symbol lists anew: `python -m sm121.abi.policy.generate --help`.

Run by a maintainer when a newer glibc, driver or CPython comes into reach; the pipeline
never runs it. Sources of the lists that are checked in: libc6 2.41, libstdc++6 and
libgcc-s1 14.2 of Debian 13 for arm64 and amd64; cuda.h of nvidia-cuda-runtime 13.0.96;
libpython of CPython 3.11.7, 3.12.1 and 3.13.0.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from sm121.abi import report
from sm121.abi.elf import Elf, read_elf
from sm121.abi.policy import model
from sm121.abi.source import FileSource
from sm121.files import write_atomic
from sm121.toolkit.driver_stub import exported_names

_HERE = Path(__file__).parent
LIBRARIES = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
             "libutil.so.1", "libresolv.so.2", "libanl.so.1", "libstdc++.so.6",
             "libgcc_s.so.1", "libgomp.so.1", "libz.so.1",
             "ld-linux-aarch64.so.1", "ld-linux-x86-64.so.2")  # fmt: skip


def read(path: Path) -> Elf:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_elf(FileSource(fd))
    finally:
        os.close(fd)


def system_list(folder: Path) -> dict[str, dict[str, list[str]]]:
    """library → version → names. GLIBC_PRIVATE is left out: no wheel may use it."""
    out: dict[str, dict[str, list[str]]] = {}
    for name in LIBRARIES:
        if not (folder / name).exists():
            continue
        exports = read(folder / name).exports
        versions: dict[str, list[str]] = {}
        for text in exports.exact:
            symbol, _, version = text.rpartition("@")
            if version != "GLIBC_PRIVATE":
                versions.setdefault(version, []).append(symbol)
        if exports.base:
            versions[""] = list(exports.base)
        out[name] = {v: sorted(versions[v]) for v in sorted(versions)}
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", nargs=3, action="append", default=[],
                        metavar=("MACHINE", "FOLDER", "ORIGIN"))  # fmt: skip
    parser.add_argument("--cuda-h", nargs=2, metavar=("FILE", "ORIGIN"))
    parser.add_argument("--python", nargs=2, action="append", default=[],
                        metavar=("VERSION", "LIBPYTHON"))  # fmt: skip
    parser.add_argument("--schemas", action="store_true", help="write the two JSON schemas")
    options = parser.parse_args(argv)
    if options.schemas:
        write_atomic(model.SCHEMA_FILE, model.schema_text())
        write_atomic(report.SCHEMA_FILE, report.schema_text())
    for machine, folder, origin in options.system:
        _write(f"system-{machine}.json", {"origin": origin, "libraries": system_list(Path(folder))})
    if options.cuda_h:
        names = exported_names(Path(options.cuda_h[0]).read_text("utf-8"))
        _write("libcuda.json", {"origin": options.cuda_h[1], "names": names})
    if options.python:
        versions = {
            version: sorted(
                n for n in read(Path(path)).exports.plain if n.startswith(("Py", "_Py"))
            )
            for version, path in options.python
        }
        _write("libpython.json", {"origin": "libpythonX.Y.so.1.0 of CPython", "versions": versions})


def _write(name: str, content: object) -> None:
    write_atomic(_HERE / name, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
