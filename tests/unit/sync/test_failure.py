"""What ssh and rsync say, and what we make of it; what is shown while files are sent."""

from __future__ import annotations

import io

import pytest

from sm121.errors import (
    DiskFull,
    EnvironmentFault,
    HostKeyFault,
    NetworkFault,
    Sm121Error,
    ToolFailed,
)  # fmt: skip
from sm121.sync.failure import explain
from sm121.sync.hosts import Way, nodes_of
from sm121.sync.transfer import _Meter
from sm121.ui import Ui

(NODE,) = nodes_of(["ada@spark2"], way=Way(), root="/opt/sm121")


@pytest.mark.parametrize(
    ("code", "text", "kind", "says"),
    [
        (255, "No ED25519 host key is known for spark2 and you have requested strict checking.\nHost key verification failed.", HostKeyFault, "is not known"),
        (255, "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.", HostKeyFault, "ssh-keygen -R spark2"),
        (11, 'rsync: [receiver] write failed on "/x": No space left on device (28)', DiskFull, "Free some space there below /opt/sm121"),
        (255, "ada@spark2: Permission denied (publickey).", EnvironmentFault, "ssh-copy-id"),
        (127, "sh: 1: rsync: not found\nrsync error: remote command not found (code 127)", EnvironmentFault, "apt-get install -y rsync python3"),
        (1, "sm121: the node's python3 is 3.10, and 3.11 or later is needed", EnvironmentFault, "the node's python3 is 3.10"),
        (255, "ssh: connect to host spark2 port 22: Connection timed out", NetworkFault, "Run the same command again"),
        (12, "rsync: connection unexpectedly closed (0 bytes received so far) [sender]", NetworkFault, "broke while sending"),
        (30, "", NetworkFault, "exit status 30"),
        (-15, "", NetworkFault, "ended from outside"),
        (1, "rsync: --bogus: unknown option", ToolFailed, "exit status 1"),
    ],
)  # fmt: skip
def test_each_has_its_cause_and_a_next_step(
    code: int, text: str, kind: type[Sm121Error], says: str
) -> None:
    error = explain(NODE, code, text.splitlines(), doing="sending")
    assert type(error) is kind
    assert "ada@spark2" in error.what
    assert error.remedy
    assert says in f"{error.what} {error.cause} {error.remedy}"


def test_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    now = [100.0]
    monkeypatch.setattr("sm121.sync.transfer.time.monotonic", lambda: now[0])
    with Ui(out=io.StringIO(), err=screen).progress("sync") as bar:
        meter = _Meter(bar=bar, total=3_000_000_000, streams=2)
        meter.line(0, "    100,000,000   3%   98.12MB/s    0:00:10 (xfr#1, to-chk=9/11)")
        meter.line(0, "receiving incremental file list")
        now[0] += 6
        meter.line(1, "    500,000,000  33%   98.12MB/s    0:00:10")
        now[0] += 6
        meter.line(0, "  1,300,000,000  87%   98.12MB/s    0:00:10")
    lines = screen.getvalue().splitlines()
    assert "600.0 MB of 3.00 GB, 83.3 MB/s, 29 s left, 2 stream(s)" in lines[1]
    assert "1.80 GB of 3.00 GB, 200.0 MB/s, 6.0 s left" in lines[2]  # of the last ten seconds
    assert len(lines) == 3
