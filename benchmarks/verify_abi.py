"""Benchmark: verify-abi over a wheelhouse, against auditwheel + nm -D and cuobjdump on the same files.

    python benchmarks/verify_abi.py WHEELHOUSE [--others] [--cuobjdump PATH]

Prints cold and warm times and peak memory of our check, each in a fresh process, and with
--others the time of the usual tools: `auditwheel show` per wheel, and `nm -D` (and cuobjdump,
where there is one) on every library, unpacked beforehand, and the ratio. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path


def ours(house: Path, cache: Path) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak MiB) in a fresh process. On a busy machine CPU time counts."""
    code = (
        "import sys, json, time, resource; from pathlib import Path; started = time.perf_counter()\n"
        "from sm121.abi.verify import verify; from sm121.abi.policy.load import load_policy\n"
        "from sm121.lock.pylock import Target\n"
        "target = Target.make('linux-aarch64', python='3.12', glibc='2.39')\n"
        "report = verify([Path(sys.argv[1])], policy=load_policy(), target=target, arch='12.1a', cache=Path(sys.argv[2]))\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF); cpu = usage.ru_utime + usage.ru_stime\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "print(json.dumps([time.perf_counter() - started, cpu, peak, report.result, len(report.wheels)]))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, house, cache], check=True, capture_output=True
    )
    seconds, cpu, peak, _, _ = json.loads(out.stdout)
    return seconds, cpu, peak


def theirs(house: Path, cuobjdump: Path | None) -> dict[str, float]:
    """Seconds per tool over all wheels that hold libraries. Unpacking is not counted."""
    times = {"auditwheel show": 0.0, "nm -D": 0.0}
    if cuobjdump:
        times["cuobjdump -lelf"] = 0.0
    wheels = sorted(house.glob("*.whl"))
    for place, wheel in enumerate(wheels, 1):
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
            libraries = [n for n in archive.namelist() if ".so" in n.rpartition("/")[2]]
            if not libraries:
                continue
            started = time.perf_counter()
            subprocess.run(["auditwheel", "show", wheel], capture_output=True, check=False)
            times["auditwheel show"] += time.perf_counter() - started
            for name in libraries:
                file = archive.extract(name, scratch)
                for tool, argv in (
                    ("nm -D", ["nm", "-D", file]),
                    ("cuobjdump -lelf", [cuobjdump, "-lelf", file]),
                ):
                    if tool in times:
                        started = time.perf_counter()
                        subprocess.run(argv, capture_output=True, check=False)
                        times[tool] += time.perf_counter() - started
                Path(file).unlink()
        print(f"\r{place}/{len(wheels)}", end="", file=sys.stderr)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheelhouse", type=Path)
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--cuobjdump", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch)
        cold = ours(options.wheelhouse, cache)
        same = ours(options.wheelhouse, cache)
        shutil.rmtree(cache / "abi/reports")
        facts = ours(options.wheelhouse, cache)
    for name, (seconds, cpu, peak) in (
        ("cold", cold),
        ("facts known", facts),
        ("nothing changed", same),
    ):
        print(f"verify-abi, {name:<15} {seconds:7.1f} s  {cpu:6.1f} CPU-s  {peak:5.0f} MiB")
    if options.others:
        times = theirs(options.wheelhouse, options.cuobjdump)
        for tool, seconds in times.items():
            print(f"{tool:<27} {seconds:7.1f} s")
        print(f"ratio: {sum(times.values()) / cold[0]:.1f} times ours, cold")
    print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
