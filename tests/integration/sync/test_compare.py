"""`sync --compare`: nodes that were changed by hand, or made apart."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sm121.sync.report import SCHEMA_FILE
from support.hosts import Hosts
from support.wheels import make_wheel


@pytest.fixture
def both(hosts: Hosts, old: str, old_house: Path) -> Hosts:
    """The same release on the head and on the worker."""
    hosts.seed(old_house, "head")
    hosts.sync("here", "--wheelhouse", str(old_house))
    assert hosts.current("head") == hosts.current("worker") == old
    return hosts


def compare(
    hosts: Hosts, code: int, *names: str
) -> tuple[str, dict[str, Any], dict[str, dict[str, str]]]:
    """(what it said, the report, what differs → node → value)."""
    file = hosts.folder / "report.json"
    said = hosts.sync(*(names or ("here", "worker")), "--compare", f"--json={file}", code=code)
    report = json.loads(file.read_text())
    jsonschema.validate(report, json.loads(SCHEMA_FILE.read_text()))
    return said, report, {one["what"]: one["values"] for one in report["differences"]}


def add_by_hand(hosts: Hosts, wheel: Path) -> None:
    """A real installer puts a wheel into the worker's environment."""
    env = hosts.root / "current/env"
    hosts.on(
        "worker", env / "bin/uv", "pip", "install", "-q", "--offline", "--no-deps",
        "--python", env / "bin/python", wheel,
    )  # fmt: skip


def test_equal_nodes_and_what_changes_by_hand(both: Hosts, old_house: Path, tmp_path: Path) -> None:
    said, report, found = compare(both, 0)
    assert report["result"] == "pass"
    here, worker = report["nodes"]
    assert here["release"] == worker["release"]
    assert here["digest"] == worker["digest"]
    assert worker["facts"]["direct"] == "direct0"
    (link,) = (one for one in worker["facts"]["links"] if one["name"] == "direct0")
    assert link["mtu"] == 9000
    assert "link MTU" not in found
    assert worker["nccl"].startswith("2.30.4+cuda13.0, build id ")

    # One file edited, its size kept.
    site = both.site()
    script = site / "cutlass/cute.py"
    script.write_text("cu13 = 2\n")
    said, _, found = compare(both, 1)
    assert (
        "nvidia-cutlass-dsl-libs-cu13: 1 file(s) differ (cutlass/cute.py)"
        in found["installed files"]["worker"]
    )
    assert "here" not in found["installed files"]
    assert "cutlass/cute.py" in said.partition("error:")[2]

    # A package upgraded, by a real installer (cases.md 1).
    newer = make_wheel(
        tmp_path,
        {"torchvision/version.py": "__version__ = '0.27.0'\n"},
        name="torchvision",
        version="0.27.0",
    )
    add_by_hand(both, newer)
    _, _, found = compare(both, 1)
    assert (
        "torchvision: found torchvision-0.27.0.dist-info, wanted 0.26.0"
        in found["installed files"]["worker"]
    )

    # dist-info gone (cases.md 19), a package of no wheel, and a module that is imported first.
    shutil.rmtree(site / "torch-2.11.0.dist-info")
    more = make_wheel(tmp_path, {"intruder/__init__.py": ""}, name="intruder")
    add_by_hand(both, more)
    (site / "sitecustomize.py").write_text("")
    _, report, found = compare(both, 1)
    text = found["installed files"]["worker"]
    assert "torch: torch-2.11.0.dist-info is not there" in text
    assert "intruder: intruder-1.0.dist-info is not of the release" in text
    assert "sitecustomize.py" in text
    kinds = {d["distribution"]: d["kind"] for d in report["nodes"][1]["deviations"]}
    assert kinds == {
        "nvidia-cutlass-dsl-libs-cu13": "files",
        "torch": "no dist-info",
        "torchvision": "version",
        "intruder": "extra",
        "": "stray",
    }

    # And all of it mended, without any other sync of the two.
    assert "skip" in both.sync("worker", "--wheelhouse", str(old_house), code=0)
    both.sync("worker", "--wheelhouse", str(old_house), "--reinstall")
    _, report, found = compare(both, 0)
    assert "installed files" not in found


def test_wheel_cut_short_on_a_node(both: Hosts) -> None:
    """cases.md 18: found by reading, even if size and time are as before."""
    wheel = next((both.disk("worker") / "current/wheelhouse").glob("torchvision-*.whl"))
    stat = wheel.stat()
    data = wheel.read_bytes()
    wheel.write_bytes(data[:-1] + b"!")
    os.utime(wheel, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    _, _, found = compare(both, 1)
    assert found["files of the release"] == {"worker": f"wheelhouse/{wheel.name}"}


def test_made_apart(hosts: Hosts, old: str, new: Path) -> None:
    """cases.md 17: two wheelhouses of one stack."""
    hosts.seed(new, "head")
    hosts.sync("here", "--wheelhouse", str(new))
    said, report, found = compare(hosts, 1)
    assert found["release"] == {"here": hosts.current("head"), "worker": old}
    (one,) = (one for one in report["differences"] if one["what"] == "release")
    assert "model-1.0-py3-none-any.whl" in one["why"]
    assert "2 thing(s)" not in said
    assert not [d for node in report["nodes"] for d in node["deviations"]]


def test_what_a_service_would_see(hosts: Hosts, old: str) -> None:
    """cases.md 20 and 24, and links: by a non-interactive ssh, as on a node."""
    programs = hosts.folder / "cuda"
    programs.mkdir(exist_ok=True)
    nvcc = programs / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    # Only interactive shells read it.
    (hosts.home("worker") / ".bashrc").write_text(f"PATH={programs}:$PATH\n")
    (hosts.home("worker") / "vllm").mkdir()
    _, report, found = compare(hosts, 0, "worker")
    assert report["nodes"][0]["facts"]["nvcc"] == ""
    assert found["vllm in the way"] == {"worker": f"{hosts.home('worker')}/vllm"}
    assert "no RDMA port" in found["RoCE"]["worker"]
    hosts.serve(PATH=f"{programs}:{hosts.path}")
    hosts.set_mtu(1500)
    try:
        _, report, found = compare(hosts, 0, "worker")
    finally:
        hosts.set_mtu(9000)
    assert report["nodes"][0]["facts"]["nvcc"] == f"{nvcc} 13.0"
    assert found["link MTU"] == {"worker": "direct0 1500"}


def test_a_node_that_does_not_answer(hosts: Hosts) -> None:
    said = hosts.sync("worker", "--compare", "--address", "198.51.100.9", code=3)
    assert "The link to worker broke" in said
    assert "nothing was synced" not in said
