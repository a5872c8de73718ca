"""Unit tests run no program and open no connection: neither is possible here.

Whatever needs one of them is an integration test.
"""

from __future__ import annotations

import socket
import subprocess
from typing import NoReturn

import httpx
import pytest

# gitrepo: importing GitPython runs git once, so it must have happened before.
from sm121 import gitrepo, proc  # noqa: F401


@pytest.fixture(autouse=True)
def _nothing_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **_: object) -> NoReturn:
        raise AssertionError(f"a unit test tried to do something expensive: {arguments}")

    monkeypatch.setattr(proc, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(httpx, "stream", refuse)
    monkeypatch.setattr(httpx.Client, "send", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
