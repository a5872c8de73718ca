"""The steps, in their order. Each returns its figures, or raises NotRun or StepFailed."""

from __future__ import annotations

import json
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm121 import proc
from sm121.acceptance.model import NotRun, StepFailed
from sm121.acceptance.places import Place, last_line, own
from sm121.cli import VERBS
from sm121.serve.nodes import Nodes
from sm121.ui import human_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What the steps work with. root: of this checkout, for our verbs. scratch: for their reports.
    port: for the all-reduce."""

    nodes: Nodes
    head: Place
    worker: Place
    stack: str
    wheelhouse: Path
    root: Path
    scratch: Path
    port: int
    nodes_file: Path
    ssh_config: Path | None = None

    def verb(self, *words: str) -> proc.Finished:
        """One of our verbs, its output in the log. Raises NotRun if this checkout has it not."""
        if words[0] not in VERBS:
            raise NotRun(f"this checkout has no verb {words[0]}")
        done = proc.run(own(*words), cwd=self.root, check=False)
        with self.head.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {proc.pasteable(own(*words))}\n{done.output}\n# exit {done.returncode}\n")
        return done

    def sync(self, *words: str) -> proc.Finished:
        config = ["--ssh-config", str(self.ssh_config)] if self.ssh_config else []
        done = self.verb(
            "sync", "here", self.nodes.worker.name, "--root", self.nodes.root,
            "--wheelhouse", str(self.wheelhouse), *config, *words,
        )  # fmt: skip
        if done.returncode == 3:
            raise NotRun(_what(done))
        return done


def doctor(bench: Bench) -> str:
    """This machine can run the stack."""
    report = bench.scratch / "doctor.json"
    report.unlink(missing_ok=True)
    done = bench.verb(
        "doctor", "--for", "run", "--offline", "--stack", bench.stack, f"--json={report}"
    )
    checks = _read(report)["checks"]
    faults = [check["name"] for check in checks if check["run"] == "fault"]
    bench.head.require_gpu()
    if done.returncode:
        raise StepFailed(", ".join(faults) or _what(done))
    warned = [check["name"] for check in checks if check["run"] == "warning"]
    return f"{len(checks)} checks" + (f"; warnings: {', '.join(warned)}" if warned else "")


def sync(bench: Bench) -> str:
    """Both nodes have the wheelhouse's release; a second run finds nothing to do."""
    if not (bench.wheelhouse / "manifest.json").is_file():
        raise NotRun(f"no wheelhouse in {bench.wheelhouse}")
    times = []
    for _ in range(2):
        start = time.monotonic()
        done = bench.sync("--nodes", str(bench.nodes_file))
        if done.returncode:
            raise StepFailed(_what(done))
        times.append(time.monotonic() - start)
    return f"{human_seconds(times[0])}; again {human_seconds(times[1])}"


def compare(bench: Bench) -> str:
    """Both nodes run the same bytes, and nothing that matters differs."""
    report = bench.scratch / "compare.json"
    report.unlink(missing_ok=True)
    done = bench.sync("--compare", f"--json={report}")
    if done.returncode:
        raise StepFailed(_what(done))
    data = _read(report)
    files = " and ".join(str(node["files"]) for node in data["nodes"])
    warned = [one["what"] for one in data["differences"]]
    return f"{files} files" + (f"; differ: {', '.join(warned)}" if warned else "")


def extensions(place: Place) -> str:
    """Every extension of vLLM imports with the real driver."""
    gpu = place.require_gpu()
    release = place.require_release()
    done = place.python("extensions.py")
    found = _json_of(done)
    if found["failed"]:
        name, why = next(iter(found["failed"].items()))
        raise StepFailed(f"{len(found['failed'])} of {len(found['failed']) + len(found['imported'])}, first {name}: {why}")  # fmt: skip
    if not found["gpu"]:
        raise StepFailed("torch sees no GPU")
    return f"{len(found['imported'])} of release {release} on {gpu}"


def verify_abi(bench: Bench) -> str:
    """Every binary of the installed environment fits."""
    bench.head.require_release()
    report = bench.scratch / "verify.json"
    report.unlink(missing_ok=True)
    done = bench.verb("verify-abi", "--env", f"{bench.nodes.root}/current/env", "--stack", bench.stack, f"--json={report}")  # fmt: skip
    if done.returncode:
        raise StepFailed(_what(done))
    return last_line(done.output)


def all_reduce(bench: Bench) -> str:
    """NCCL between the nodes: right sums, by CUDA graph too, and how fast."""
    for place in (bench.head, bench.worker):
        place.require_gpu()
        place.require_release()
    # Without it NCCL would take an index of its own, and the start of the service none.
    check = f"{shlex.quote(bench.nodes.root)}/current/wheelhouse/serve_check.py"
    index = (
        f"NCCL_IB_GID_INDEX=$(/usr/bin/python3 -I {check} --gid-index 2>&1) || "
        '{ echo "$NCCL_IB_GID_INDEX" | grep -v "^ *next:"; exit 3; }'
    )
    first = index if bench.nodes.head.hca else ":"

    def one(place: Place) -> Any:
        words = (str(place.rank), bench.nodes.head.address, str(bench.port))
        return _json_of(place.python("allreduce.py", *words, first=first))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, (bench.head, bench.worker)))
    if not all(rank["right"] and rank["replayed"] for rank in found):
        raise StepFailed("a sum is wrong")
    if len({rank["nccl"] for rank in found}) != 1:
        raise StepFailed(f"NCCL {' and '.join(rank['nccl'] for rank in found)}")
    return f"{min(r['gbytes_per_s'] for r in found):.1f} GB/s with 256 MiB, 500 graph replays, NCCL {found[0]['nccl']}"  # fmt: skip


def rollback(bench: Bench) -> str:
    """The release before is current again on both, and back."""
    places = (bench.head, bench.worker)
    before = [place.require_release() for place in places]
    if bench.head.run(f"test -L {shlex.quote(bench.nodes.root)}/previous").returncode:
        raise NotRun("there is no previous release; sync another one first")
    times, seen = [], []
    for _ in range(2):
        start = time.monotonic()
        done = bench.sync("--rollback")
        times.append(time.monotonic() - start)
        if done.returncode:
            raise StepFailed(_what(done))
        seen.append([place.require_release() for place in places])
    if seen[1] != before or any(a == b for a, b in zip(seen[0], before, strict=True)):
        raise StepFailed(f"{before} became {seen[0]}, then {seen[1]}")
    return f"{before[0]} to {seen[0][0]} in {human_seconds(times[0])}, and back"


def _read(report: Path) -> Any:
    try:
        return json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StepFailed(f"no report was written: {error}") from error


def _json_of(done: proc.Finished) -> Any:
    """The line of JSON among what a payload printed. Raises StepFailed."""
    for line in reversed(done.output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise StepFailed(last_line(done.output))


def _what(done: proc.Finished) -> str:
    """The first line of our error message, else the last of all."""
    for line in done.output.splitlines():
        if line.startswith("error:"):
            return line.removeprefix("error:").strip()
    return last_line(done.output)
