"""Everything that breaks a sync: a clear message, `current` as it was, and a rerun completes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from support.hosts import Hosts, make_key
from support.tools import run
from support.wheels import make_wheel

SLOW = 400  # KiB/s of each of two streams: the 3 MB wheel takes 8 s


def arrived(hosts: Hosts) -> int:
    """Bytes of files that are on their way to the worker."""
    return sum(f.stat().st_size for f in (hosts.disk("worker") / "incoming").iterdir())


def begin(hosts: Hosts, house: Path, *, speed: int = SLOW) -> subprocess.Popen[bytes]:
    """Start a sync, and wait until something more than before has arrived."""
    before = arrived(hosts)
    process = hosts.begin(
        "worker", "--wheelhouse", str(house), "--streams", "2", "--bwlimit", str(speed)
    )
    hosts.wait_for("bytes", lambda: arrived(hosts) > before + 500 * speed)
    return process


def processes(namespace: str, word: str) -> Iterator[int]:
    """Processes on a host whose command line has a word."""
    for pid in run("ip", "netns", "pids", namespace).stdout.split():
        try:
            if word in Path(f"/proc/{pid}/cmdline").read_text():
                yield int(pid)
        except OSError:
            continue


def works(hosts: Hosts, release: str) -> None:
    """`current` is this release, and its environment runs."""
    assert hosts.current() == release
    python = hosts.root / "current/env/bin/python"
    assert hosts.on("worker", python, "-I", "-c", "import torch.version; print(1)") == "1\n"


def completes(hosts: Hosts, house: Path, old: str) -> str:
    """The same command again."""
    said = hosts.sync("worker", "--wheelhouse", str(house))
    assert hosts.current() not in ("", old)
    works(hosts, hosts.current())
    return said


def test_link_cut(hosts: Hosts, old: str, new: Path) -> None:
    process = begin(hosts, new)
    hosts.cable(False)
    said = hosts.ended(process, code=3)
    assert "The link to worker broke while files were sent" in said
    assert "Run the same command again" in said
    hosts.cable(True)
    works(hosts, old)
    assert arrived(hosts) > 200_000
    said = completes(hosts, new, old)
    assert "of a broken transfer" in said


def test_receiver_killed(hosts: Hosts, old: str, new: Path) -> None:
    process = begin(hosts, new)
    for pid in processes(hosts.worker, "--server"):
        os.kill(pid, signal.SIGKILL)
    said = hosts.ended(process, code=3)
    assert "link to worker broke" in said or "ended from outside" in said
    works(hosts, old)
    assert "of a broken transfer" in completes(hosts, new, old)


def test_sender_killed_and_node_side_killed(hosts: Hosts, old: str, new: Path) -> None:
    process = begin(hosts, new)
    process.kill()
    process.wait()
    # All that it started ends with it, and the node's lock: nothing has to be cleaned up by hand.
    hosts.wait_for("its end", lambda: not list(processes(hosts.worker, "--server")))
    process = begin(hosts, new)
    for pid in processes(hosts.worker, "sm121"):
        os.kill(pid, signal.SIGKILL)
    said = hosts.ended(process, code=3)
    assert "The link to worker broke" in said
    works(hosts, old)
    completes(hosts, new, old)


def test_two_at_once(hosts: Hosts, old: str, new: Path) -> None:
    process = begin(hosts, new, speed=50)  # a minute, were it not ended
    said = hosts.sync("worker", "--wheelhouse", str(new), code=3)
    assert "Another sync is at work on this node: root@" in said
    assert f"process {process.pid}" in said
    assert "Another sync" in hosts.sync("worker", "--rollback", code=3)
    # The first one goes on; Ctrl-C ends it, and all that it started.
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert "Run the same command again" in hosts.ended(process, code=4)
    assert not list(processes(hosts.head, "rsync"))
    works(hosts, old)
    completes(hosts, new, old)


def test_disk_full(hosts: Hosts, new: Path) -> None:
    """Told before anything is sent; and, if others fill it meanwhile, while it is sent."""
    house = str(new)
    size = sum(f.stat().st_size for f in new.iterdir())
    mount = f"mount -t tmpfs -o mode=755,size={{}} tmpfs {hosts.root}"
    hosts.serve(disk=mount.format(size // 4))
    said = hosts.sync("worker", "--wheelhouse", house, code=3)
    assert "not enough space on this node" in said
    assert "to send" not in said
    hosts.serve(disk=mount.format(size * 5))
    process = hosts.begin("worker", "--wheelhouse", house, "--bwlimit", "8000", "--streams", "2")
    root = next(
        place for pid in processes(hosts.worker, "sshd")
        for place in [Path(f"/proc/{pid}/root{hosts.root}")] if place.is_dir()
    )  # fmt: skip
    hosts.wait_for(
        "bytes", lambda: (root / "incoming").is_dir() and any((root / "incoming").iterdir())
    )
    with (root / "foreign").open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError:
            pass
    said = hosts.ended(process, code=3)
    assert "worker: not enough space on this node: 0 B are free" in said or "No space left" in said
    assert "Free some space there" in said
    assert not (root / "current").exists()
    (root / "foreign").unlink()
    hosts.sync("worker", "--wheelhouse", house)
    assert (root / "current").is_symlink()


def test_disk_full_while_installing(hosts: Hosts, new: Path) -> None:
    """By number of files, which nobody sees beforehand."""
    mount = f"mount -t tmpfs -o mode=755,nr_inodes={{}} tmpfs {hosts.root}"
    hosts.serve(disk=mount.format(46))
    said = hosts.sync("worker", "--wheelhouse", str(new), code=3)
    assert "No space left on this node while installing" in said
    place = next(Path(f"/proc/{pid}/root{hosts.root}") for pid in processes(hosts.worker, "sshd"))
    assert not (place / "current").exists()
    run("nsenter", "-m", "-t", str(next(processes(hosts.worker, "sshd"))), "mount", "-o",
        "remount,nr_inodes=9999", hosts.root)  # fmt: skip
    hosts.sync("worker", "--wheelhouse", str(new))
    assert (place / "current").is_symlink()


def test_wheel_altered_on_the_node(hosts: Hosts, old: str, old_house: Path, new: Path) -> None:
    """cases.md 18: what is cut short or changed there is found before anything is switched."""
    listing = (hosts.disk("worker") / "releases" / old / "RELEASE").read_text()
    for name, damage in (("torch-", lambda b: b[:-9]), ("torchvision-", lambda b: b[:-1] + b"!")):
        digest = next(line[:64] for line in listing.splitlines() if f"  wheelhouse/{name}" in line)
        stored = hosts.disk("worker") / "store" / digest
        good = stored.read_bytes()
        stored.write_bytes(damage(good))
        said = hosts.sync("worker", "--wheelhouse", str(old_house))
        assert f"{name}" in said
        assert "was altered there; it is sent anew" in said
        assert stored.read_bytes() == good
        released = next((hosts.disk("worker") / "releases" / old / "wheelhouse").glob(f"{name}*"))
        assert released.samefile(stored)
        works(hosts, old)
    # What lies in incoming/ from before, and is something else.
    digest = next(
        line[:64] for line in (new / "SHA256SUMS").read_text().splitlines() if "  model-" in line
    )
    (hosts.disk("worker") / "incoming" / digest).write_bytes(bytes(1000))
    assert "not what was sent; once more" in completes(hosts, new, old)


def test_install_fails(hosts: Hosts, old: str, make_house, parts: dict[str, Path], tmp_path: Path) -> None:  # fmt: skip
    bad = make_house("bad", glibc="9.99")
    said = hosts.sync("worker", "--wheelhouse", str(bad), code=3)
    assert "install.py failed" in said
    assert "needs glibc 9.99 or later" in said
    works(hosts, old)
    # uv takes a wheel whose RECORD names a file that it does not hold; the comparison does not.
    wheel = make_wheel(tmp_path / "w", {"halved/a.py": "1", "halved/b.py": "2"}, name="halved")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(tmp_path / "x.whl", "w") as half:
        for info in whole.infolist():
            if info.filename != "halved/b.py":
                half.writestr(info, whole.read(info))
    (tmp_path / "x.whl").replace(wheel)
    for _ in range(2):  # the rerun does not take it either
        said = hosts.sync("worker", "--wheelhouse", str(make_house("halved", wheel)), code=1)
        assert "what was installed is not what the wheels hold; nothing was switched" in said
        assert "halved/b.py: missing" in said
        works(hosts, old)


def test_host_keys(hosts: Hosts, old: str, new: Path) -> None:
    make_key(hosts.folder / "other_key")
    for known, says in (("other", "is not the known one"), ("", "is not known")):
        (hosts.folder / "known_hosts").write_text("")
        if known:
            hosts.know(hosts.folder / "other_key.pub")
        before = (hosts.folder / "known_hosts").read_text()
        said = hosts.sync("worker", "--wheelhouse", str(new), code=3)
        assert f"host key of worker {says}; nothing was sent" in said
        assert (hosts.folder / "known_hosts").read_text() == before
        works(hosts, old)
    (hosts.folder / "other_key").unlink()
    hosts.know(hosts.folder / "host_key.pub")
    (hosts.folder / "authorized_keys").rename(hosts.folder / "away")
    try:
        assert "does not let this user in" in hosts.sync("worker", "--compare", code=3)
    finally:
        (hosts.folder / "away").rename(hosts.folder / "authorized_keys")
    completes(hosts, new, old)


def set_clock(hosts: Hosts, offset: str) -> None:
    """Every program of a session on the worker sees a wall clock that is off."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    assert library, "libfaketime is not there: apt-get install faketime (see .ci/run)"
    hosts.serve(LD_PRELOAD=str(library), FAKETIME=offset, FAKETIME_DONT_FAKE_MONOTONIC="1")


def test_wrong_clocks(hosts: Hosts, old_house: Path, new: Path) -> None:
    """The node's clock is years off in every program there, files have times of the future, and
    the same size and time with other content is still told apart."""
    hosts.seed(old_house)
    future = time.time() + 400 * 86400
    for file in old_house.iterdir():
        os.utime(file, (future, future))
    set_clock(hosts, "-3000d")
    assert int(hosts.remote("date +%Y")) < 2022
    hosts.sync("worker", "--wheelhouse", str(old_house))
    first = hosts.current()
    set_clock(hosts, "+3000d")
    for file in new.iterdir():
        os.utime(file, (0, 0))
    stored = next(f for f in (hosts.disk("worker") / "store").iterdir() if f.stat().st_size > 1000)
    os.utime(stored, (future, future))
    hosts.sync("worker", "--wheelhouse", str(new))
    works(hosts, hosts.current())
    assert hosts.current() != first
    assert "skip" in hosts.sync("worker", "--wheelhouse", str(new))
    hosts.sync("worker", "--rollback")
    works(hosts, first)
