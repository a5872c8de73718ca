"""The steps with the service: start, answer, restart in any order, and nothing left behind."""

from __future__ import annotations

import json
import os
import shlex
import time

import httpx

from sm121.acceptance.model import NotRun, StepFailed
from sm121.acceptance.places import Place, last_line
from sm121.acceptance.steps import Bench
from sm121.serve.render import unit_name
from sm121.ui import human_seconds

# The other node's start helper looks every second, and ends vLLM within serve.toml's stop-seconds.
NOTICE_SECONDS = 45.0
_PROMPT = "The first ten prime numbers are"


def start(bench: Bench, *, limit: float) -> str:
    """Both services started, the worker first; until the head says that it is healthy."""
    _require(bench)
    for place in (bench.worker, bench.head):
        _systemctl(place, "restart")
    return f"healthy after {human_seconds(wait_healthy(bench, limit))}"


def completion(bench: Bench) -> str:
    """An answer, as a stream: time to the first token, and how fast the others come."""
    bench.head.require_gpu()
    first, count, seconds, text = stream(bench)
    if count < 8:
        raise StepFailed(f"only {count} token(s): {text!r}")
    rate = (count - 1) / max(seconds - first, 1e-6)
    return f"first token after {first * 1000:.0f} ms, then {rate:.1f}/s; {' '.join(text.split())[:60]!r}"


def restarts(bench: Bench, *, limit: float) -> str:
    """Each node's service restarted alone, then both with the head first; each time an answer."""
    _require(bench)
    times = []
    for places, word in (
        ((bench.worker,), "restart"), ((bench.head,), "restart"),
        ((bench.head, bench.worker), "stop"),
    ):  # fmt: skip
        for place in places:
            _systemctl(place, word)
        if word == "stop":
            for place in places:
                left = place.run("ps -eo pid,args | grep '[V]LLM::'")
                if left.returncode == 0:
                    raise StepFailed(f"left on {place.node.name}: {last_line(left.output)}")
            for place in places:
                _systemctl(place, "start")
        else:
            # Until the other one has noticed, health is that of the run before.
            time.sleep(NOTICE_SECONDS)
        times.append(wait_healthy(bench, limit))
        stream(bench)
    return "worker, head, both: answers after " + ", ".join(map(human_seconds, times))


def stream(bench: Bench) -> tuple[float, int, float, str]:
    """Seconds to the first piece, number of pieces, seconds in all, the text."""
    api = bench.nodes.api
    key = os.environ.get("VLLM_API_KEY", "")
    body = {
        "model": api.name,
        "prompt": _PROMPT,
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }
    begun, first, count, text = time.monotonic(), 0.0, 0, ""
    try:
        with httpx.stream(
            "POST", f"{_base(bench)}/v1/completions", json=body, timeout=300,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        ) as answer:  # fmt: skip
            if answer.status_code != 200:
                raise StepFailed(f"HTTP {answer.status_code}: {answer.read()[:200]!r}")
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                first = first or time.monotonic() - begun
                count += 1
                text += json.loads(data)["choices"][0]["text"]
    except httpx.ConnectError as error:
        raise NotRun(f"nothing answers at {_base(bench)}") from error
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise StepFailed(f"{type(error).__name__}: {error}") from error
    return first, count, time.monotonic() - begun, text


def wait_healthy(bench: Bench, limit: float) -> float:
    """Seconds until /health is 200. Raises StepFailed after `limit` seconds."""
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < limit:
        try:
            if httpx.get(f"{_base(bench)}/health", timeout=10).status_code == 200:
                return waited
        except httpx.HTTPError:
            pass
        time.sleep(min(2, limit / 10))
    raise StepFailed(f"not healthy after {human_seconds(limit)}: journalctl -u {unit_name(0)}")


def _base(bench: Bench) -> str:
    host = bench.nodes.api.host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{bench.nodes.api.port}"


def _require(bench: Bench) -> None:
    """GPUs, releases, units and the right to start them. Raises NotRun."""
    for place in (bench.head, bench.worker):
        place.require_gpu()
        place.require_release()
        if place.run("sudo -n systemctl --version").returncode:
            raise NotRun(f"sudo asks for a password on {place.node.name}")
        unit = unit_name(place.rank)
        if place.run(f"systemctl cat {unit}").returncode:
            raise NotRun(
                f"{unit} is not installed on {place.node.name}: sudo install -m 644 "
                f"{place.root}/current/serve/{unit} /etc/systemd/system/ && sudo systemctl daemon-reload"
            )


def _systemctl(place: Place, word: str) -> None:
    done = place.run(f"sudo -n systemctl {word} {shlex.quote(unit_name(place.rank))}")
    if done.returncode:
        raise StepFailed(f"systemctl {word} on {place.node.name}: {last_line(done.output)}")
