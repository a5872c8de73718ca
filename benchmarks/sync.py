"""How fast `sync` sends, against `rsync -a`; and whether more streams help where each is capped.

    PYTHONPATH=src:tests python benchmarks/sync.py [--megabytes N] [--wheelhouse DIR] [--folder DIR]

Two hosts of network namespaces with a real sshd (root, openssh-server, rsync, iproute2; nothing but
this machine is reached). Without --wheelhouse, random files with the sizes of the real wheelhouse,
scaled. Three parts: plain `rsync -a` over one ssh connection and our transfer, in turns; our
transfer with each stream capped at --cap MiB/s; with --wheelhouse, the whole verb: first sync,
second, one wheel changed, rollback, compare.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sm121.sync.hosts import Way, nodes_of
from sm121.sync.transfer import send
from sm121.ui import Ui
from support.hosts import NAME, Hosts, pair
from support.stacks import minimal
from support.upstream import make_checkout

# The largest wheels of the real wheelhouse for x86-64 and the mean of the other 187 (MB).
SIZES = [531, 423, 366, 214, 213, 201, 188, 170, 146, *[5.7] * 187]


def random_files(folder: Path, megabytes: float) -> Path:
    folder.mkdir()
    for number, size in enumerate(SIZES):
        with (folder / f"file{number:03}").open("wb") as file:
            left = int(size * megabytes / sum(SIZES) * 1e6)
            while left > 0:
                left -= file.write(os.urandom(min(left, 1 << 24)))
    return folder


def inside(work: Path, root: str, streams: int, cap: float) -> float:
    """On the head: one transfer of all files; MB/s. Prints nothing."""
    objects = {hashlib.sha256(f.name.encode()).hexdigest(): f for f in (work / "files").iterdir()}
    way = Way(config=work / "hosts/ssh_config")
    (node,) = nodes_of([NAME], way=way, root=root)
    subprocess.run(
        node.command("sh", "-c", f"rm -rf {root}/incoming; mkdir {root}/incoming"), check=True
    )
    seconds = send(
        node, objects, streams=streams, limit_kib=round(cap * 1024) or None, scratch=work / "scratch",
        log=work / "log", ui=Ui(out=io.StringIO(), err=io.StringIO()),
    )  # fmt: skip
    return sum(f.stat().st_size for f in objects.values()) / seconds / 1e6


def ours(hosts: Hosts, streams: int, cap: float = 0) -> float:
    words = [
        sys.executable,
        __file__,
        "--inside",
        str(hosts.folder.parent),
        str(hosts.root),
        str(streams),
        str(cap),
    ]
    done = subprocess.run(
        hosts.shell("head", 'exec "$@"', *words), check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return float(json.loads(done.stdout))


def plain(hosts: Hosts) -> float:
    """`rsync -a` as a person would type it, into an empty folder; MB/s."""
    files = hosts.folder.parent / "files"
    shutil.rmtree(hosts.disk("worker") / "plain", ignore_errors=True)
    command = ["rsync", "-a", "-e", shlex.join(["ssh", "-F", str(hosts.folder / "ssh_config")]), f"{files}/", f"{NAME}:{hosts.root}/plain/"]  # fmt: skip
    began = time.monotonic()
    hosts.on("head", *command)
    seconds = time.monotonic() - began
    shutil.rmtree(hosts.disk("worker") / "plain")
    return sum(f.stat().st_size for f in files.iterdir()) / seconds / 1e6


def verb(hosts: Hosts, wheelhouse: Path, options: list[str]) -> None:
    """The whole verb on a real wheelhouse. The changed wheel: the smallest."""

    def timed(what: str, *words: str, code: int = 0) -> str:
        began, used = time.monotonic(), cpu()
        said = hosts.sync(*words, code=code, timeout=3600)
        print(
            f"  {what:34} {time.monotonic() - began:7.1f} s, {cpu() - used:6.1f} CPU s on the head"
        )
        for line in said.splitlines():
            if "MB/s;" in line or "file(s)" in line:
                print(f"      {line.strip()}")
        return said

    first = ["worker", "--wheelhouse", str(wheelhouse), *options]
    timed("first sync, with install", *first)
    for _ in range(3):
        timed("again, nothing changed", *first)
    changed = hosts.folder.parent / "changed"
    shutil.copytree(wheelhouse, changed, copy_function=os.link)
    wheel = min(changed.glob("*-py3-none-any.whl"), key=lambda f: f.stat().st_size)
    touch(wheel)
    renew(changed, wheel.name)
    timed(f"{wheel.name} changed", "worker", "--wheelhouse", str(changed), *options)
    timed("rollback", "worker", "--rollback")
    print(hosts.on("worker", hosts.root / "current/env/bin/python", "-I", "-c", "import importlib.metadata as m; print('     ', 'vllm', m.version('vllm'), 'of the old release')"), end="")  # fmt: skip
    timed("compare: every installed file", "worker", "--compare")


def cpu() -> float:
    """CPU seconds of children so far: the head's side, since the worker's sshd is still running."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def touch(wheel: Path) -> None:
    """Another wheel of the same size with the same files: the time of one differs by two seconds."""
    data = bytearray(wheel.read_bytes())
    data[data.rfind(b"PK\x01\x02") + 12] ^= 1  # central directory, last modification time
    wheel.unlink()
    wheel.write_bytes(data)


def renew(folder: Path, name: str) -> None:
    """Write what lists a changed wheel: pylock.toml, manifest.json, SHA256SUMS."""
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    old = next(line[:64] for line in lines if line.endswith(f"  {name}"))
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    for file in ("pylock.toml", "manifest.json"):
        text = (folder / file).read_text().replace(old, digest)
        (folder / file).unlink()
        (folder / file).write_text(text)
    sums = {
        n: hashlib.sha256((folder / n).read_bytes()).hexdigest()
        for n in (name, "pylock.toml", "manifest.json")
    }
    (folder / "SHA256SUMS").unlink()
    (folder / "SHA256SUMS").write_text(
        "".join(f"{sums.get(line[66:], line[:64])}  {line[66:]}\n" for line in lines)
    )


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        work, root, streams, cap = sys.argv[2:]
        print(json.dumps(inside(Path(work), root, int(streams), float(cap))))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--megabytes", type=float, default=600, help="of random files (default: 600)"
    )
    parser.add_argument(
        "--cap", type=float, default=8, metavar="MIB", help="of each stream in the second part"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--wheelhouse", type=Path, metavar="DIR", help="a real one, for this machine"
    )
    parser.add_argument(
        "--option", action="append", default=[], help="of sync, e.g. --option=--allow-partial"
    )
    parser.add_argument("--folder", type=Path, help="where the temporary folders are made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="sync-") as name:
        work = Path(name)
        (work / "hosts").mkdir()
        make_checkout(work / "hosts/checkout", minimal())
        for hosts in pair(work / "hosts", f"smb{os.getpid()}"):
            if options.wheelhouse:
                verb(hosts, options.wheelhouse.resolve(), options.option)
                continue
            random_files(work / "files", options.megabytes)
            for _ in range(options.rounds):
                rates = {
                    "rsync -a": plain(hosts),
                    **{f"{n} stream(s)": ours(hosts, n) for n in (1, 2, 4)},
                }
                print("   ".join(f"{what} {rate:6.1f} MB/s" for what, rate in rates.items()))
            shutil.rmtree(work / "files")
            random_files(work / "files", options.cap * 1.048576 * 24)
            base = 0.0
            for streams in (1, 2, 4, 6):
                rate = ours(hosts, streams, options.cap)
                base = base or rate
                print(
                    f"{streams} stream(s) of {options.cap:g} MiB/s: {rate:6.1f} MB/s, {rate / base / streams:.2f} of {streams} times one"
                )


if __name__ == "__main__":
    main()
