"""How long filling a wheelhouse takes, against the plain way: `pip download --require-hashes`.

    PYTHONPATH=src python benchmarks/fetch.py [--target linux-aarch64] [--smaller-than MB]

Both fetch the same files of the target's lock from the same index into an empty folder that
is removed after (about 3.6 GB each, one after the other). Prints seconds and the ratio
pip / sm121.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sm121.fetch import Cache, fetch_locked
from sm121.files import HashMemory
from sm121.lock.pylock import LockedFile, Target, lock_path, locked_files, read_lock
from sm121.pins.load import default_stack, load_stack
from sm121.ui import Ui, human_bytes

PINS = Path(__file__).parents[1] / "pins"


def by_sm121(files: list[LockedFile], target: Target, folder: Path) -> None:
    cache = Cache(folder / "cache", HashMemory(folder / "hashes.json"))
    fetch_locked(files, target=target, cache=cache, offline=False, ui=Ui())


def by_pip(files: list[LockedFile], target: Target, folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(
        "".join(f"{f.distribution}=={f.version} --hash=sha256:{f.sha256}\n" for f in files)
    )
    platforms = [p for p in dict.fromkeys(t.platform for t in target.tags()) if p != "any"]
    short = f"cp{target.python.replace('.', '')}"
    subprocess.run(
        [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir",
            "--require-hashes", "--only-binary", ":all:", "--python-version", target.python,
            "--implementation", "cp", "--abi", short, "--abi", "abi3", "--abi", "none",
            *(word for p in platforms for word in ("--platform", p)),
            "-r", str(requirements), "-d", str(folder / "files"),
        ],
        check=True, env={**os.environ, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--target", default="linux-aarch64")
    parser.add_argument("--smaller-than", type=float, metavar="MB", help="only files below this")
    parser.add_argument("--folder", type=Path, help="where the temporary folders are made")
    options = parser.parse_args()
    name = default_stack(PINS)
    pin = load_stack(PINS, name).targets[options.target]
    target = Target.make(options.target, python=pin.pythons[0], glibc=pin.glibc)
    files = list(locked_files(read_lock(lock_path(PINS, name, "family", target)), target))
    if options.smaller_than:
        files = [f for f in files if f.size < options.smaller_than * 1e6]
    print(f"{len(files)} files, {human_bytes(sum(f.size for f in files))}, {target.tag}")
    seconds = {}
    for way, fetch in (("sm121", by_sm121), ("pip", by_pip)):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            started = time.monotonic()
            fetch(files, target, Path(folder))
            seconds[way] = time.monotonic() - started
        print(f"{way:6} {seconds[way]:7.1f} s")
    print(f"ratio  {seconds['pip'] / seconds['sm121']:7.2f} (pip / sm121)")


if __name__ == "__main__":
    main()
