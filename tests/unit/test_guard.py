"""The guard of the unit tests itself."""

from __future__ import annotations

import socket
import subprocess

import httpx
import pytest

from sm121 import proc


def connect() -> None:
    with socket.socket() as sock:
        sock.connect(("127.0.0.1", 9))


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: proc.run(["true"]),
        lambda: subprocess.run(["true"], check=False),
        lambda: httpx.get("http://127.0.0.1:9/"),
        lambda: httpx.stream("GET", "http://127.0.0.1:9/").__enter__(),
        connect,
    ],
    ids=["proc", "subprocess", "httpx", "httpx-stream", "socket"],
)
def test_a_unit_test_cannot_do_expensive_things(attempt) -> None:
    with pytest.raises(AssertionError, match="expensive"):
        attempt()
