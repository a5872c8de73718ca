"""Differences between nodes, each with a name and what it means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sm121.doctor.facts import links
from sm121.sync.compare import find_differences
from sm121.sync.report import SCHEMA_FILE, Comparison, Deviation, NodeState, schema_text, to_json

LINK = {"name": "enp1s0f0np0", "mtu": 9000, "speed": 200000, "state": "up", "rdma": "mlx5_0:1",
        "rdma_state": "ACTIVE", "roce": ["RoCE v2"]}  # fmt: skip
FACTS: dict[str, Any] = {
    "kernel": "6.14.0", "machine": "aarch64", "glibc": "glibc 2.39", "driver": "580.95.05",
    "cuda_driver": "13.0", "nvcc": "/usr/local/cuda/bin/nvcc 13.0", "path": "/usr/bin",
    "memlock": "unlimited", "links": [LINK], "direct": "enp1s0f0np0", "cwd": "/home/ada", "shadow": [],
}  # fmt: skip
NODE = NodeState(
    name="one", release="a" * 16, files=9, digest="d" * 64, nccl="2.30.4, build id 12", python="3.12.3",
    altered=(), deviations=(), facts=FACTS,
)  # fmt: skip
OTHER = replace(NODE, name="two")


def differences(
    other: NodeState, files: dict[str, str] | None = None
) -> dict[str, tuple[str, str]]:
    """what → level, and what it says of `two`."""
    own = {"a.whl": "1"}
    found = find_differences([NODE, other], [own, own if files is None else files])
    return {one.what: (one.level, one.values.get("two", "")) for one in found}


def facts(**changed: Any) -> NodeState:
    return replace(OTHER, facts={**FACTS, **changed})


def test_equal_nodes() -> None:
    assert differences(OTHER) == {}


@pytest.mark.parametrize(
    ("other", "what", "level", "says"),
    [
        (facts(driver="580.82.07"), "driver", "fault", "580.82.07"),
        (facts(cuda_driver="12.9"), "CUDA of the driver", "fault", "12.9"),
        (facts(kernel="6.11.0"), "kernel", "warning", "6.11.0"),
        (facts(nvcc=""), "nvcc on PATH", "warning", "none"),
        (facts(memlock="8388608"), "ulimit -l", "warning", "8388608 bytes"),
        (facts(shadow=["vllm"]), "vllm in the way", "warning", "/home/ada/vllm"),
        (facts(links=[{**LINK, "mtu": 1500}]), "link MTU", "warning", "enp1s0f0np0 1500"),
        (facts(links=[{**LINK, "speed": 100000}]), "link speed", "warning", "100 Gb/s"),
        (facts(links=[{**LINK, "rdma_state": "DOWN"}]), "RoCE", "warning", "mlx5_0:1 DOWN"),
        (facts(links=[{**LINK, "roce": []}]), "RoCE", "warning", "no RoCE"),
        (replace(OTHER, nccl="2.30.4, build id 34"), "NCCL", "fault", "build id 34"),
        (replace(OTHER, python="3.12.4"), "Python", "warning", "3.12.4"),
        (replace(OTHER, release=""), "current", "fault", "no release"),
        (replace(OTHER, altered=("a.whl",)), "files of the release", "fault", "a.whl"),
        (replace(OTHER, digest="e" * 64), "digest of the installed files", "fault", "e" * 16),
        (
            replace(OTHER, deviations=(Deviation(distribution="torch", kind="files", found="1 file(s) differ", files={"torch/x.py": "other content"}),)),
            "installed files", "fault", "torch: 1 file(s) differ (torch/x.py)",
        ),
    ],
)  # fmt: skip
def test_each_difference_is_named(other: NodeState, what: str, level: str, says: str) -> None:
    found = differences(other)
    assert list(found) == [what]
    assert found[what][0] == level
    assert says in found[what][1]


def test_nodes_that_were_built_apart() -> None:
    """cases.md 17: the files that differ are named."""
    found = list(find_differences([NODE, replace(OTHER, release="b" * 16)], [{"a.whl": "1", "s": "1"}, {"a.whl": "2", "s": "1"}]))  # fmt: skip
    assert found[0].what == "release"
    assert "these files differ: a.whl" in found[0].why


def test_links_of_a_sysfs(tmp_path: Path) -> None:
    """A ConnectX-7 port as Linux shows it (ABI/testing/sysfs-class-infiniband), and no port."""
    net, port = tmp_path / "sys/class/net", tmp_path / "sys/class/infiniband/rocep1s0f0/ports/1"
    for name, values in {"lo": ("65536", "", "unknown"), "enp1s0f0np0": ("9000", "200000", "up"), "wlan0": ("1500", "-1", "down")}.items():  # fmt: skip
        (net / name).mkdir(parents=True)
        for file, text in zip(("mtu", "speed", "operstate"), values, strict=True):
            (net / name / file).write_text(text + "\n")
    for folder in ("gid_attrs/ndevs", "gid_attrs/types"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    for index, kind in enumerate(("IB/RoCE v1", "RoCE v2")):
        (port / f"gid_attrs/ndevs/{index}").write_text("enp1s0f0np0\n")
        (port / f"gid_attrs/types/{index}").write_text(f"{kind}\n")
    found = {link["name"]: link for link in links(tmp_path)}
    assert found.keys() == {"enp1s0f0np0", "wlan0"}
    assert found["enp1s0f0np0"] == {
        "name": "enp1s0f0np0", "mtu": 9000, "speed": 200000, "state": "up", "rdma": "rocep1s0f0:1",
        "rdma_state": "ACTIVE", "roce": ["IB/RoCE v1", "RoCE v2"],
    }  # fmt: skip
    assert found["wlan0"]["speed"] is None
    assert found["wlan0"]["rdma"] == ""


def test_report_and_schema() -> None:
    assert SCHEMA_FILE.read_text() == schema_text()
    report = Comparison(
        schema_version=1, result="fail", nodes=(NODE, OTHER),
        differences=tuple(find_differences([NODE, facts(driver="1")], [{}, {}])),
    )  # fmt: skip
    jsonschema.validate(json.loads(to_json(report)), json.loads(SCHEMA_FILE.read_text()))
