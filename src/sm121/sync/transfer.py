"""Send objects by rsync over ssh, several streams at once, each with a connection of its own.

Files travel under the names of their digests (`incoming/<sha256>`), so a name can lead nowhere, and
`--append` goes on with what a broken transfer left: sizes decide what is sent and digests, on the
node, whether it is right. No time decides anything.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm121 import proc
from sm121.files import remove_tree
from sm121.sync.failure import explain
from sm121.sync.hosts import Node
from sm121.sync.streams import divide
from sm121.ui import Progress, Ui, human_bytes, human_seconds

_DONE = re.compile(r"\s*([\d,.]+)\s+\d+%\s")
_WINDOW_S = 10.0
# A stream that moves nothing for so long is given up (rsync(1), --timeout).
_TIMEOUT_S = 30


@dataclass(slots=True)
class _Meter:
    """Bytes done by stream, and the rate over the last seconds."""

    bar: Progress
    total: int
    streams: int
    done: dict[int, int] = field(default_factory=dict)
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def line(self, stream: int, text: str) -> None:
        if match := _DONE.match(text):
            with self.lock:
                self.done[stream] = int(re.sub(r"\D", "", match[1]))
                self._show()

    def _show(self) -> None:
        now, done = time.monotonic(), sum(self.done.values())
        self.samples.append((now, done))
        while now - self.samples[0][0] > _WINDOW_S:
            self.samples.popleft()
        then, before = self.samples[0]
        rate = (done - before) / (now - then) if now > then else 0.0
        left = human_seconds((self.total - done) / rate) if rate else "?"
        self.bar.update(
            f"{human_bytes(done)} of {human_bytes(self.total)}, {human_bytes(rate)}/s, {left} left, "
            f"{self.streams} stream(s)",
        )


def send(
    node: Node,
    objects: Mapping[str, Path],
    *,
    streams: int,
    limit_kib: int | None,
    scratch: Path,
    log: Path,
    ui: Ui,
) -> float:
    """Send digest → file into the node's `incoming/`; returns seconds.

    limit_kib: KiB/s of each stream at most. If one stream fails the others are ended and the first
    failure is raised (NetworkFault, DiskFull, HostKeyFault …); what arrived stays.
    """
    remove_tree(scratch)
    scratch.mkdir(parents=True)
    for digest, path in objects.items():
        (scratch / digest).symlink_to(path.resolve())
    sizes = {digest: path.stat().st_size for digest, path in objects.items()}
    shares = divide(sizes, streams)
    began = time.monotonic()
    with ui.progress("sync") as bar:
        meter = _Meter(bar=bar, total=sum(sizes.values()), streams=len(shares))
        _run([_command(node, scratch, share, n, limit_kib) for n, share in enumerate(shares)],
             node=node, meter=meter, log=log)  # fmt: skip
    remove_tree(scratch)
    return time.monotonic() - began


def _command(
    node: Node, scratch: Path, share: Sequence[str], number: int, limit_kib: int | None
) -> list[str]:
    listing = scratch / f"stream-{number}.txt"
    listing.write_text("".join(f"{digest}\n" for digest in share), encoding="utf-8")
    remote, destination = node.rsync("incoming")
    limit = [f"--bwlimit={limit_kib}"] if limit_kib else []
    # If we are killed, they end too: a sync that nobody hears of must not go on (setpriv(1)).
    return [
        "setpriv", "--pdeathsig", "TERM", "rsync", "--copy-links", "--append", "--no-whole-file", f"--files-from={listing}",
        "--info=progress2", "--outbuf=L", f"--timeout={_TIMEOUT_S}", *limit, *remote,
        f"{scratch}/", destination,
    ]  # fmt: skip


def _run(commands: Sequence[list[str]], *, node: Node, meter: _Meter, log: Path) -> None:
    running = [proc.start(command, log=log) for command in commands]
    said: list[list[str]] = [[] for _ in running]
    failed: list[int] = []

    def follow(number: int) -> None:
        process = running[number]
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.rstrip("\n")
            if not _DONE.match(line):
                said[number].append(line)
            meter.line(number, line)
        if process.wait() != 0:
            failed.append(number)
            _end(running)

    threads = [threading.Thread(target=follow, args=(n,), daemon=True) for n in range(len(running))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _end(running)
        for process in running:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe:
                    pipe.close()
    with log.open("a", encoding="utf-8", errors="replace") as file:
        file.writelines(f"[{n}] {line}\n" for n, lines in enumerate(said) for line in lines)
    if failed:
        first = failed[0]
        raise explain(node, running[first].returncode, said[first], doing="files were sent")


def _end(running: Sequence[subprocess.Popen[str]]) -> None:
    for process in running:
        if process.poll() is None:
            process.terminate()
