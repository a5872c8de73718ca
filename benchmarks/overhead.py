"""What sm121's compile stage costs over vLLM's own `setup.py bdist_wheel` run by hand.

    python benchmarks/overhead.py [--rounds 3]

Both build the smoke components for aarch64 (crossed, on x86-64) from an empty ninja tree, in
the same environment (`nox -s shell`), with no compiler cache, alternating, in one run. The
other stages' times are printed apart. Needs the downloads in the cache (SM121_CACHE) or a
network for the first round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGES = ("source", "patch", "environment", "toolkit", "wheelhouse")
PLAIN = (
    'rm -rf "$0" && start=$(date +%s.%N) && '
    'python setup.py -q build --build-base "$0" bdist_wheel --dist-dir "$0/dist" '
    '--bdist-dir "$0/bdist" --py-limited-api cp311 --plat-name linux_aarch64 >"$0.log" 2>&1 && '
    "end=$(date +%s.%N) && echo $start $end"
)


def sm121(build: Path, *arguments: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "SM121_BUILD": str(build),
        "CCACHE_DISABLE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "sm121", *arguments],
        cwd=ROOT, env=environment, check=True, text=True, stdout=subprocess.PIPE,
    ).stdout  # fmt: skip


def stage_seconds(build: Path) -> dict[str, float]:
    stages = json.loads((build / "state.json").read_text())["stages"]
    return {key.split("/")[0]: record["seconds"] for key, record in stages.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="sm121-overhead-") as scratch:
        build, house = Path(scratch) / "build", Path(scratch) / "wheelhouse"
        sm121(build, "build", "--profile", "smoke", "--wheelhouse", str(house))
        others = {name: stage_seconds(build)[name] for name in STAGES}
        ours, plain = [], []
        for _ in range(rounds):
            for old in [*build.glob("work/*/ninja-*"), build / "dist"]:
                shutil.rmtree(old)
            sm121(build, "compile", "--profile", "smoke")
            ours.append(stage_seconds(build)["compile"])
            printed = sm121(
                build, "shell", "--profile", "smoke", "--", "sh", "-c", PLAIN, str(build / "plain")
            )
            start, end = (float(word) for word in printed.split()[-2:])
            plain.append(end - start)
    print(f"setup.py bdist_wheel by hand   {statistics.median(plain):6.2f} s  {fmt(plain)}")
    print(f"sm121's compile stage          {statistics.median(ours):6.2f} s  {fmt(ours)}")
    print(
        f"ratio of the medians           {statistics.median(ours) / statistics.median(plain):6.3f}"
    )
    for name, seconds in others.items():
        print(f"stage {name:<24} {seconds:6.2f} s")


def fmt(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:.2f}" for value in values) + ")"


if __name__ == "__main__":
    main()
