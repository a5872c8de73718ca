"""What compiling costs: the same components stock and with our series, from the logs of two builds.

    python benchmarks/build_cost.py compare STOCK OURS [--component NAME ...] [--sample]
    python benchmarks/build_cost.py run FOLDER [--profile kernels]
    python benchmarks/build_cost.py costs BUILD --where TEXT >pins/STACK/costs.json
    python benchmarks/build_cost.py records BUILD >docs/builds/…/objects.jsonl

A log is a build folder (SM121_BUILD), its objects.jsonl, or a .ninja_log of a build without our
launcher. Of objects.jsonl the CPU seconds of each object's newest compile count; of a .ninja_log
its wall time, which on a busy machine is more. Where both logs are to be compared, both must be
of one kind. An object that one build took out of the compiler cache costs what its compile in
the other build did: the cache has found the two to be the same compile.

"Stock" is the release with the patches without which these components can't be chosen or packaged
at all (build-selection, requirements); `run` makes both builds, one after the other, with no
compiler cache. Where that takes too long, --sample compares the objects of SAMPLE alone. For the full
set: full_cost.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from sm121.compile.records import Record, component_of, read_records  # noqa: E402
from sm121.compile.schedule import Job, longest_first, wall_seconds  # noqa: E402
from sm121.compile.timeline import lanes  # noqa: E402

STOCK_PATCHES = ("build-selection.patch", "requirements.patch")
COMPONENTS = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
CORES = (2, 16, 20)
# A compile that has its core for itself takes hardly longer than its CPU time.
_QUIET = 1.1
# In an object's name: a third-party source that the pipeline made (sm121.source.places).
_MADE = re.compile(r"\.dir/\S*?/third-party/([\w.-]+)-[0-9a-f]{12}/tree/")
# The same of a source's own path, below the build folder; and vLLM's tree.
_TREE = re.compile(r"(?:source/third-party/([\w.-]+)-[0-9a-f]{12}/tree|work/[^/]+/src)/")
# An entry of stack.toml, up to the next table.
_LEFT_OUT = re.compile(r"^\[\[sources-left-out\]\]\n(?:(?!\[).*\n)*", re.MULTILINE)
# By component: the longest of each kind of kernel, and some of the many short ones.
SAMPLE = {
    "_C_stable_libtorch": (
        "quantization/w8a8/cutlass/scaled_mm_c2x.cu", "quantization/w8a8/cutlass/scaled_mm_entry.cu",
        "cooperative_topk.cu", "dsv3_fused_a_gemm.cu", "fp32_router_gemm.cu",
        "quantization/marlin/marlin.cu", "quantization/marlin/gptq_marlin_repack.cu",
        "mamba/selective_scan_fwd.cu", "quantization/gptq/q_gemm.cu", "layernorm_kernels.cu",
        "quantization/marlin/sm80_kernel_float16_fe2m1f_float16.cu", "cuda_utils_kernels.cu",
    ),
    "_moe_C_stable_libtorch": (
        "moe/dsv3_router_gemm_entry.cu", "moe/dsv3_router_gemm_float_out.cu",
        "moe/dsv3_router_gemm_bf16_out.cu", "moe/marlin_moe_wna16/ops.cu",
        "moe/topk_softmax_kernels.cu", "moe/moe_align_sum_kernels.cu",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Log:
    """Objects of a build by name: seconds, bytes; and the build's own run, if it is known."""

    name: str
    unit: str
    jobs: dict[str, Job]
    hits: frozenset[str]
    run: tuple[Record, ...]


def name_anywhere(name: str) -> str:
    """An object's name with `{NAME}` for the folder of a third-party source, as costs.json has it
    (sm121.compile.records.shipped_costs)."""
    return _MADE.sub(r".dir/{\1}/", name)


def log_of(path: Path) -> Path:
    """The newest log of a build folder; a log is its own."""
    if not path.is_dir():
        return path
    logs = sorted(path.glob("log/*/objects.jsonl"), key=lambda p: p.stat().st_mtime)
    logs = logs or sorted(path.glob("work/*/ninja-*/temp.*/.ninja_log"))
    if not logs:
        raise SystemExit(f"{path}: no log of a build in it")
    return logs[-1]


def read_log(path: Path) -> Log:
    """Read a build folder's log, an objects.jsonl, or a .ninja_log."""
    path = log_of(path)
    if path.suffix != ".jsonl":
        return _ninja_log(path)
    records = read_records(path)
    jobs, hits = {}, set()
    for record in records:
        name = name_anywhere(record.object)
        if record.compiled:
            jobs[name] = Job(name=name, seconds=record.cpu, memory=record.rss)
        elif record.cache == "hit":
            hits.add(name)
    by_run: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_run[record.run].append(record)
    run = max(by_run.values(), key=lambda group: sum(r.compiled for r in group), default=[])
    return Log(str(path), "CPU", jobs, frozenset(hits - set(jobs)), tuple(run))


def _ninja_log(path: Path) -> Log:
    jobs = {}
    for line in path.read_text().splitlines()[1:]:
        start, end, _, name, _ = line.split("\t")
        if name.endswith(".o"):
            jobs[name] = Job(name=name, seconds=(int(end) - int(start)) / 1000)
    return Log(str(path), "wall", jobs, frozenset(), ())


def chosen(
    log: Log, other: Log, components: Sequence[str], *, sample: bool
) -> tuple[list[Job], list[str]]:
    """The objects to compare, and those that nothing is known of."""
    jobs = dict(log.jobs)
    unknown = []
    for name in sorted(log.hits):
        if name in other.jobs:
            jobs[name] = other.jobs[name]
        else:
            unknown.append(name)
    wanted = [job for name, job in jobs.items() if component_of(name) in components]
    if sample:
        listed = [f"/libtorch_stable/{f}.o" for c in components for f in SAMPLE.get(c, ())]
        wanted = [job for job in wanted if job.name.endswith(tuple(listed))]
    return wanted, [name for name in unknown if component_of(name) in components]


def compare(stock: Log, ours: Log, components: Sequence[str], *, sample: bool) -> None:
    """Print the table."""
    if stock.unit != ours.unit:
        raise SystemExit(
            f"{stock.name} has {stock.unit} times and {ours.name} {ours.unit} times: no comparison"
        )
    sides = []
    for name, log, other in (("stock", stock, ours), ("ours", ours, stock)):
        jobs, unknown = chosen(log, other, components, sample=sample)
        if unknown:
            print(
                f"{name}: {len(unknown)} object(s) only ever came out of the cache: {unknown[:3]}"
            )
        if not jobs:
            raise SystemExit(f"{log.name}: no object of {', '.join(components)}")
        sides.append(jobs)
    what = "the sampled objects" if sample else "all objects"
    print(f"{stock.unit} time of {what}\n")
    print(f"{'':34}{'stock':>12}{'ours':>12}{'ours/stock':>12}")
    for component in components:
        part = [[j for j in side if component_of(j.name) == component] for side in sides]
        row(f"{component}, objects", *(float(len(p)) for p in part), unit="")
        row(f"{component}, minutes", *(minutes(p) for p in part))
    row("together, minutes", *map(minutes, sides))
    row("longest object, minutes", *(max(j.seconds for j in side) / 60 for side in sides))
    for cores in CORES:
        walls = [wall_seconds(longest_first(side), cores=cores) / 60 for side in sides]
        row(f"{cores} cores, minutes", *walls)
    print()
    for name, side in zip(("stock", "ours"), sides, strict=True):
        top = ", ".join(
            f"{Path(j.name).stem.removesuffix('.cu')} {j.seconds / 60:.1f}"
            for j in longest_first(side)[:5]
        )
        print(f"longest of {name} (minutes): {top}")
    for name, log in (("stock", stock), ("ours", ours)):
        if log.run:
            check(name, log.run)


def check(name: str, run: Sequence[Record]) -> None:
    """A real run against two schedules: of its compiles' own times in its own order, which tests
    the rule, and of their CPU seconds, longest first, which is how the table predicts."""
    ordered = sorted(run, key=lambda r: r.start)
    cores = 1 + max(lane for lane, _ in lanes(ordered))
    real = max(r.end for r in ordered) - ordered[0].start
    rule = wall_seconds([Job(name=r.object, seconds=r.end - r.start) for r in ordered], cores=cores)
    predicted = wall_seconds(
        longest_first(Job(name=r.object, seconds=r.cpu, memory=r.rss) for r in run), cores=cores
    )
    load = sum(r.end - r.start for r in run) / max(sum(r.cpu for r in run), 1e-9)
    hits = sum(r.cache == "hit" for r in ordered)
    print(
        f"check, {name}: {len(ordered)} objects ({hits} out of the cache) on {cores} cores took {real / 60:.1f} min; by the "
        f"schedule's rule {rule / 60:.1f} ({rule / real:.3f}); predicted from CPU seconds "
        f"{predicted / 60:.1f} ({predicted / real:.3f}); wall/CPU of its compiles {load:.2f}"
        f"{', so others used these cores too' if load > _QUIET else ''}"
    )


def minutes(jobs: Iterable[Job]) -> float:
    return sum(job.seconds for job in jobs) / 60


def row(name: str, stock: float, ours: float, *, unit: str = "f") -> None:
    shown = f"{stock:12.1f}{ours:12.1f}" if unit else f"{stock:12.0f}{ours:12.0f}"
    print(f"{name:34}{shown}{ours / stock if stock else float('nan'):12.2f}")


def costs_file(log: Log, where: str) -> str:
    """What a stack ships for first builds: object = [CPU seconds, bytes of the largest process]."""
    for name in log.jobs:
        source = Path("/", name.partition(".dir/")[2].removesuffix(".o"))
        if source.exists():
            raise SystemExit(
                f"{name} is of a source in a folder of this machine's ({source}), which says nothing "
                "elsewhere: measure with sources that the pipeline made (--clone)"
            )
    lines = [
        f'  "{name}": [{job.seconds:.1f}, {job.memory}]' for name, job in sorted(log.jobs.items())
    ]
    objects = ",\n".join(lines)
    return f'{{\n "measured": {json.dumps(where)},\n "objects": {{\n{objects}\n }}\n}}'


def records_file(build: Path) -> str:
    """A build's objects.jsonl, to be kept: no path of the machine is in it, and compare reads it."""
    if not build.is_dir():
        raise SystemExit(f"{build} is no build folder")
    lines = []
    for record in read_records(log_of(build)):
        path = record.source.removeprefix(f"{build.resolve()}/")
        tree = _TREE.match(path)
        if not tree:
            raise SystemExit(f"{record.source} is of no tree below {build}")
        source = f"{{{tree[1] or 'vllm'}}}/{path[tree.end() :]}"
        kept = replace(record, object=name_anywhere(record.object), source=source)
        lines.append(json.dumps(asdict(kept), separators=(",", ":")))
    return "\n".join(lines)


def copy_of(folder: Path, name: str) -> Path:
    """This checkout as it is now, for stock with the patches of STOCK_PATCHES alone; what was
    built in the copy before stays."""
    copy = folder / name
    for part in ("benchmarks", "patches", "pins", "src"):
        shutil.rmtree(copy / part, ignore_errors=True)
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    if name == "stock":
        for series in copy.glob("patches/vllm/*/series"):
            lines = [x for x in series.read_text().splitlines() if x in STOCK_PATCHES]
            series.write_text("".join(f"{x}\n" for x in lines))
            for patch in series.parent.glob("*.patch"):
                if patch.name not in lines:
                    patch.unlink()
        for stack in copy.glob("pins/*/stack.toml"):
            # What these leave out is of patches that are not there now.
            stack.write_text(_LEFT_OUT.sub("", stack.read_text()))
    return copy


def environment_of(copy: Path) -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": str(copy / "src"), "SM121_BUILD": str(copy / "build"),
        "SM121_CACHE": os.environ.get("SM121_CACHE", str(ROOT / "build/cache")),
    }  # fmt: skip


def run_both(folder: Path, profile: str) -> None:
    """Build stock and ours in copies of this checkout, nothing out of the compiler cache."""
    for name in ("stock", "ours"):
        copy = copy_of(folder, name)
        print(f"# {name}: {copy}", flush=True)
        subprocess.run(
            [sys.executable, "-m", "sm121", "compile", "--profile", profile],
            cwd=copy, env={**environment_of(copy), "CCACHE_DISABLE": "1"}, check=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    comparing = verbs.add_parser("compare")
    comparing.add_argument("stock", type=Path)
    comparing.add_argument("ours", type=Path)
    running = verbs.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--profile", default="kernels")
    for verb in (comparing, running):
        verb.add_argument("--component", action="append", default=None)
        verb.add_argument("--sample", action="store_true")
    telling = verbs.add_parser("costs")
    telling.add_argument("build", type=Path)
    telling.add_argument("--where", required=True, help="machine, release, date")
    keeping = verbs.add_parser("records")
    keeping.add_argument("build", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "records":
        print(records_file(arguments.build))
        return
    if arguments.verb == "costs":
        print(costs_file(read_log(arguments.build), arguments.where))
        return
    if arguments.verb == "run":
        run_both(arguments.folder, arguments.profile)
        arguments.stock, arguments.ours = (
            arguments.folder / name / "build" for name in ("stock", "ours")
        )
    compare(
        read_log(arguments.stock), read_log(arguments.ours),
        arguments.component or COMPONENTS, sample=arguments.sample,
    )  # fmt: skip


if __name__ == "__main__":
    main()
