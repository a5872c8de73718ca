"""How long `rebase --check` takes, against `git am -3` in a loop over the same.

    PYTHONPATH=src python benchmarks/rebase_check.py [--onto RELEASE ...] [--folder DIR]

All patches of the default stack × four releases, with the real sdists, which are downloaded
first and not counted. sm121 is run twice as a user runs it: with nothing imported, and again.
git gets the imported trees for nothing; per release it checks one out and tries each patch with
`git am -3`, and `git am --skip` where that stops. Prints seconds, the ratio git / sm121, and what
each of the two could say about the patches.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ONTO = ["0.27.0", "0.28.0", "0.30.0", "0.33.0"]


def git(*arguments: str | Path, cwd: Path) -> int:
    identity = {f"GIT_COMMITTER_{key}": "bench" for key in ("NAME", "EMAIL")}
    return subprocess.run(
        ["git", "-c", "core.hooksPath=/dev/null", *map(str, arguments)],
        cwd=cwd, env={**os.environ, **identity}, capture_output=True, check=False,
    ).returncode  # fmt: skip


def by_git(repository: Path, commits: list[str], patches: list[Path], folder: Path) -> Counter[str]:
    said: Counter[str] = Counter()
    for number, commit in enumerate(commits):
        tree = folder / str(number)
        git("worktree", "add", "--quiet", "--detach", tree, commit, cwd=repository)
        for patch in patches:
            if git("am", "-3", "-q", patch, cwd=tree) == 0:
                said["exit 0"] += 1
            else:
                said["stopped"] += 1
                git("am", "--skip", cwd=tree)
    return said


def by_sm121(onto: list[str], folder: Path) -> dict[str, list[dict[str, object]]]:
    report = folder / "report.json"
    words = [word for label in onto for word in ("--onto", label)]
    done = subprocess.run(
        [sys.executable, "-m", "sm121", "rebase", "--check", *words, f"--json={report}"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "SM121_BUILD": str(folder / "build"),
             "SM121_CACHE": os.environ.get("SM121_CACHE", str(ROOT / "build/cache"))},
    )  # fmt: skip
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    return json.loads(report.read_text())["onto"]


class Clock:
    """Wall and processor seconds of everything that a block starts."""

    def __enter__(self) -> Clock:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.wall, self.cpu = time.monotonic(), used.ru_utime + used.ru_stime
        return self

    def __exit__(self, *_: object) -> None:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.wall = time.monotonic() - self.wall
        self.cpu = used.ru_utime + used.ru_stime - self.cpu

    def __str__(self) -> str:
        return f"{self.wall:6.1f} s, {self.cpu:6.1f} s of processor time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--onto", action="append", metavar="RELEASE", help="default: four releases")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    options = parser.parse_args()
    onto = options.onto or ONTO
    stack = (ROOT / "pins/default").read_text().strip()
    series = ROOT / "patches/vllm" / stack
    patches = [
        series / line.strip()
        for line in (series / "series").read_text().splitlines()
        if line.strip().endswith(".patch")
    ]
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        (folder / "fetch").mkdir()
        by_sm121(onto, folder / "fetch")  # the downloads
        with Clock() as importing:
            by_sm121(onto, folder)
        with Clock() as imported:
            rows = by_sm121(onto, folder)
        repository = folder / "build/source/vllm.git"
        with Clock() as plain:
            said = by_git(repository, [str(row["commit"]) for row in rows], patches, folder / "am")
    verdicts = Counter(patch["verdict"] for row in rows for patch in row["patches"])  # type: ignore[attr-defined, index]
    print(f"{len(patches)} patches x {len(onto)} releases, {os.cpu_count()} cores")
    print(f"sm121 rebase --check, sdists imported: {imported}")
    print(f"                      importing them:  {importing}")
    print(f"git am -3 in a loop:                   {plain}")
    print(
        f"ratio git / sm121: {plain.wall / imported.wall:.2f} (processor {plain.cpu / imported.cpu:.2f})"
    )
    print(f"sm121 says: {', '.join(f'{n} {v}' for v, n in verdicts.most_common())}")
    print(f"git says:   {', '.join(f'{n} {v}' for v, n in said.most_common())}")


if __name__ == "__main__":
    main()
