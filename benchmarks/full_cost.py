"""What compiling the full set costs, stock and ours, from samples compiled on one machine.

    python benchmarks/full_cost.py FOLDER [--jobs N] [--ours BUILD]

Stock is nine hours of CPU. So this configures both in copies of this checkout below FOLDER (stock:
with FA3, which upstream always builds), compiles vLLM's two kernel libraries and qutlass, and of FA2
and FA3 what SAMPLE names, and takes each kind of object as often as build.ninja has it.

It wants VLLM_FLASH_ATTN_SRC_DIR, a checkout of flash-attention at its pin with csrc/cutlass, since
stock uses more of it than we pin; qutlass comes from its remote or SM121_CLONES. What stands compiled in
FOLDER is not compiled again, and the compiler cache counts: what one side takes out of it
costs what the other side's compile did, and what neither compiled here is said and not counted.

--ours takes a whole build of ours, the build folder of profile `full` on this machine, in place of
samples.

Not in it: what has no objects of vLLM's CMake (DeepGEMM's one, Rust), FlashMLA (stock compiles only
three stand-ins of it for 12.x), and the small extensions.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from build_cost import COMPONENTS, Log, copy_of, environment_of, name_anywhere, read_log, row

from sm121.compile.build import run_configure
from sm121.compile.order import objects_of
from sm121.compile.records import component_of

SAMPLE = {
    # Of each kind a small and a large head dimension, both types, with and without a causal mask.
    "_vllm_fa2_C": (
        "src/flash_fwd_hdim64_fp16_sm80.cu", "src/flash_fwd_hdim192_bf16_causal_sm80.cu",
        "src/flash_fwd_split_hdim64_bf16_causal_sm80.cu", "src/flash_fwd_split_hdim192_fp16_sm80.cu",
        "src/flash_fwd_split_align_hdim64_fp16_sm80.cu",
        "src/flash_fwd_split_align_hdim192_bf16_causal_sm80.cu",
        "src/flash_fwd_sparse_hdim128_bf16_sm80.cu", "flash_attn/flash_api.cpp",
    ),
    "_vllm_fa3_C": (
        "hopper/instantiations/flash_fwd_hdim64_bf16_split_sm90.cu",
        "hopper/instantiations/flash_fwd_hdim192_fp16_paged_sm90.cu",
        "hopper/instantiations/flash_fwd_hdim96_e4m3_packgqa_sm90.cu",
        "hopper/instantiations/flash_fwd_hdim192_128_bf16_sm90.cu",
    ),
}  # fmt: skip
# What is alike within a component: the mean of the samples of a kind stands for all of the kind.
_KINDS = re.compile(r"flash_(fwd_split_align|fwd_split|fwd_sparse|fwd|api)(?=[_.])")
WHOLE = (*COMPONENTS, "_qutlass_C")
FULL = (*WHOLE, *SAMPLE)
# Beside the tree, as a build's own: the compiler cache knows paths by how deep they lie.
_OUTPUT = "sampled"
# What FULL's objects come from, and the profile that builds them.
_PROFILE = """
[profiles.sampled]
summary = "what benchmarks/full_cost.py compiles"
components = [{components}]
sources = ["cutlass", "vllm-flash-attn", "qutlass"]
memory-per-job-gib = 10
"""


def full_set(folder: Path, jobs: int, whole: Path | None) -> None:
    """Configure the full set stock and ours, compile the samples, print the table."""
    done = read_whole(whole) if whole else None  # before hours of stock
    stock, stock_all = measure(folder, "stock", FULL, jobs)
    ours, our_all = done or measure(folder, "ours", FULL[:-1], jobs)
    print(f"\n{'CPU minutes':34}{'stock':>12}{'ours':>12}{'ours/stock':>12}")
    told = {
        component: (
            told_minutes(component, stock, ours, stock_all),
            told_minutes(component, ours, stock, our_all),
        )
        for component in FULL
    }
    for component, (left, right) in told.items():
        counts = [sum(component_of(o) == component for o in side) for side in (stock_all, our_all)]
        row(f"{component}, objects", *map(float, counts), unit="")
        row(f"{component}, minutes", left, right)
    total = sum(left for left, _ in told.values())
    row("all, FA2 in ours", total, sum(right for _, right in told.values()))
    row("all, no FA2 in ours", total, sum(r for c, (_, r) in told.items() if c != "_vllm_fa2_C"))


def read_whole(build: Path) -> tuple[Log, list[str]]:
    """The log of a build folder with one stack and target, and the objects that it has."""
    outputs, logs = list(build.glob("work/*/ninja-*")), list(build.glob("log/*/objects.jsonl"))
    if len(outputs) != 1 or len(logs) != 1:
        raise SystemExit(
            f"{build}: {len(outputs)} configured trees and {len(logs)} logs, where one of each is wanted"
        )
    return read_log(logs[0]), objects_in(outputs[0])


def measure(folder: Path, name: str, components: Sequence[str], jobs: int) -> tuple[Log, list[str]]:
    """Compile the samples of one side; its log, and all objects that it would have."""
    copy = copy_of(folder, name)
    stack = next(copy.glob(f"pins/{(copy / 'pins/default').read_text().strip()}/stack.toml"))
    text = stack.read_text()
    for component in components:
        text = re.sub(rf'(?m)^{component} = "FA3 is .*\n', "", text)  # not left out here
    listed = ", ".join(f'"{c}"' for c in components)
    stack.write_text(text.rstrip("\n") + "\n" + _PROFILE.format(components=listed))
    print(f"# {name}: {copy}", flush=True)
    subprocess.run(
        [
            sys.executable, "-m", "sm121", "shell", "--profile", "sampled", "--",
            sys.executable, __file__, "--inside", str(copy / "build"), "--jobs", str(jobs),
        ],
        cwd=copy, env=environment_of(copy), check=True,
    )  # fmt: skip
    [output] = (copy / "build" / "work").glob(f"*/{_OUTPUT}")
    return read_log(copy / "build"), objects_in(output)


def told_minutes(component: str, log: Log, other: Log, objects: Sequence[str]) -> float:
    """CPU minutes of a component: each kind's samples, as often as there are objects of it."""
    seconds = {
        **{name: other.jobs[name].seconds for name in log.hits & other.jobs.keys()},
        **{name: job.seconds for name, job in log.jobs.items()},
    }
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in objects:
        if component_of(name) == component:
            found = _KINDS.search(name)
            kinds[found[1] if found else ""].append(name)
    total = 0.0
    for kind, names in kinds.items():
        known = [seconds[name] for name in names if name in seconds]
        if not known:
            print(f"{component}: nothing known of {len(names)} object(s) {kind or ''}: not counted")
            continue
        total += sum(known) / len(known) * len(names)
    return total / 60


def ninja_objects(folder: Path) -> list[str]:
    """Every object that a configured tree would compile."""
    return objects_of(next(folder.glob("temp.*/build.ninja")).read_text())


def objects_in(folder: Path) -> list[str]:
    """The same, as costs.json names them."""
    return list(map(name_anywhere, ninja_objects(folder)))


def sample_inside(jobs: int) -> None:
    """In a build's shell: configure, and compile the samples that ninja has not, or not so."""
    output = Path.cwd().parent / _OUTPUT
    python = shutil.which("python")
    if python is None:
        raise SystemExit("no python on the shell's PATH")
    run_configure(
        tree=Path.cwd(), output=output, python=Path(python), environment=dict(os.environ),
        log=output.with_suffix(".log"),
    )  # fmt: skip
    wanted = [
        name
        for name in ninja_objects(output)
        if component_of(name) in WHOLE
        or name.endswith(tuple(f"/{f}.o" for f in SAMPLE.get(component_of(name), ())))
    ]
    subprocess.run(
        ["ninja", "-C", next(output.glob("temp.*")), "-j", str(jobs), *wanted], check=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--ours", type=Path, help="a whole full build of ours")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        sample_inside(arguments.jobs)
    else:
        full_set(arguments.folder.resolve(), arguments.jobs, arguments.ours)


if __name__ == "__main__":
    main()
