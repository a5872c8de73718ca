"""The launcher with real processes: it must be as if it were not there, and remember the cost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm121.compile import launcher
from sm121.compile.budget import taken
from sm121.compile.records import Cost, CostFolder, known_costs, read_records, write_settings

GIB = 1 << 30


@dataclass
class Launch:
    folder: Path
    place: CostFolder

    def settings(
        self, *, memory: int = 100 * GIB, default: int = GIB, run: str = "one",
        shipped: Mapping[str, Cost] | None = None,
    ) -> None:  # fmt: skip
        costs = {**(shipped or {}), **known_costs(read_records(self.place.records))}
        write_settings(self.place, run=run, costs=costs, memory=memory, default=default)

    def argv(self, *command: object) -> list[str]:
        return [sys.executable, "-IS", launcher.__file__, *map(str, command)]

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "SM121_LAUNCH": str(self.place.settings), **more}

    def start(
        self, *command: object, stdin: int | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*command), cwd=self.folder, env=self.environment(**environment),
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*command), cwd=self.folder, env=self.environment(**environment),
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    @property
    def records(self):
        return read_records(self.place.records)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    (tmp_path / "x.c").write_text("int f(void) { return 1; }\n")
    launch = Launch(tmp_path, CostFolder(folder=tmp_path / "cost"))
    launch.settings()
    return launch


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("did not happen within 8 s")


def compiling(launched: int) -> list[int]:
    """The cc1plus below a launcher, if it compiles by now: ccache lets one preprocess before."""
    pid, words = launched, [""]
    try:
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has just ended
    return [pid] if words[0].endswith("/cc1plus") and "-E" not in words else []


def test_object_is_the_same_and_its_cost_is_recorded(launch: Launch) -> None:
    finished = launch.run("gcc", "-c", "x.c", "-o", "ours.o")
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    subprocess.run(["gcc", "-c", "x.c", "-o", "plain.o"], cwd=launch.folder, check=True)
    plain = (launch.folder / "plain.o").read_bytes()
    assert (launch.folder / "ours.o").read_bytes() == plain
    (record,) = launch.records
    assert (record.run, record.object, record.source) == ("one", "ours.o", "x.c")
    assert (record.exit, record.cache) == (0, "off")
    assert record.end > record.start > time.time() - 60
    assert 0 < record.cpu < 10
    assert 5e6 < record.rss < 1e9
    assert taken(str(launch.place.folder / "budget")) == []


def test_compilers_own_words_and_status_are_passed_on(launch: Launch) -> None:
    finished = launch.run("gcc", "-c", "none.c", "-o", "none.o")
    assert finished.returncode == 1
    assert "none.c: No such file" in finished.stderr
    finished = launch.run("sh", "-c", "exit 137", "-o", "x.o")
    assert finished.returncode == 137
    finished = launch.run("no-such-compiler", "-c", "x.c", "-o", "x.o")
    assert finished.returncode == 127
    assert "no-such-compiler: No such file" in finished.stderr
    assert [r.exit for r in launch.records] == [1, 137]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_compiler_that_was_killed_is_seen_as_killed(launch: Launch, number: signal.Signals) -> None:
    """The kernel's OOM killer sends SIGKILL; ninja and diagnose() must see it."""
    finished = launch.run("sh", "-c", f"kill -{number.value} $$", "-o", "x.o")
    assert finished.returncode == -number
    assert [r.exit for r in launch.records] == [-number]
    assert not list(launch.folder.glob("core*"))


@pytest.mark.parametrize("cached", [False, True])
def test_part_of_a_compiler_that_was_killed_is_given_more_the_next_time(
    launch: Launch, cached: bool
) -> None:
    """The OOM killer takes the largest process, cc1plus; g++ and ccache end with 1 then."""
    (launch.folder / "x.cc").write_text(
        "constexpr long f() { long n = 0; while (n >= 0) n = n % 7 + 1; return n; }\n"
        "static_assert(f() > 0);\n"
    )
    endless = ("-fconstexpr-loop-limit=2147483647", "-fconstexpr-ops-limit=1000000000000")
    process = launch.start(
        *(["ccache"] if cached else []), "g++", *endless, "-c", "x.cc", "-o", "x.o",
        CCACHE_DIR=str(launch.folder / "ccache"), LC_ALL="C.UTF-8",
    )  # fmt: skip
    wait_for(lambda: compiling(process.pid))
    os.kill(compiling(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "Killed signal terminated program cc1plus" in err
    (record,) = launch.records
    assert known_costs([record])["x.o"].rss == int(record.rss * 1.5)
    assert (record.exit, record.killed) == (1, True)


def test_words_are_passed_on_whole_and_at_once(launch: Launch) -> None:
    script = "echo first >&2; read x; head -c 300000 /dev/zero | tr '\\0' y >&2; exit 3"
    process = launch.start("sh", "-c", script, "-o", "x.o", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    assert process.stderr.readline() == "first\n"
    process.stdin.write("on\n")
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (3, "y" * 300000)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_reaches_the_compiler(launch: Launch, number: signal.Signals) -> None:
    script = f"trap 'echo told; exit 7' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    process = launch.start("sh", "-c", script, "-o", "x.o")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("told\n", 7)


def test_one_that_waits_for_memory_can_be_interrupted(launch: Launch) -> None:
    launch.settings(memory=GIB)
    first = launch.start("sh", "-c", "sleep 30", "-o", "a.o")
    wait_for(lambda: list(launch.place.folder.glob("budget/*.share")))
    second = launch.start("sh", "-c", "exit 0", "-o", "b.o")
    time.sleep(0.3)
    second.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=20)
    assert (second.returncode, err) == (-signal.SIGINT, "")
    first.terminate()
    first.communicate()


def test_measured_memory_replaces_the_default(launch: Launch) -> None:
    """Two unknown objects of 1 GiB don't fit into 1.5 GiB; known to need less, they do."""
    launch.settings(memory=GIB * 3 // 2)
    slow = ("sh", "-c", "sleep 0.6", "-o")
    for process in [launch.start(*slow, "a.o"), launch.start(*slow, "b.o")]:
        process.communicate()
    first, second = sorted(launch.records, key=lambda r: r.start)
    assert second.start >= first.end
    assert second.waited > 0.2
    launch.settings(memory=GIB * 3 // 2, run="two")
    for process in [launch.start(*slow, "a.o"), launch.start(*slow, "b.o")]:
        process.communicate()
    first, second = sorted((r for r in launch.records if r.run == "two"), key=lambda r: r.start)
    assert second.start < first.end


def test_what_five_of_its_kind_took_replaces_the_default_too(launch: Launch) -> None:
    slow = ("sh", "-c", "sleep 0.6", "-o")
    objects = [f"CMakeFiles/_fa2.dir/{name}.cu.o" for name in "abcdefg"]
    for enough in (4, 5):
        shipped = {name: Cost(cpu=1, rss=GIB // 4) for name in objects[:enough]}
        launch.settings(memory=GIB * 3 // 2, run=str(enough), shipped=shipped)
        for process in [launch.start(*slow, name) for name in objects[5:]]:
            process.communicate()
        records = [r for r in launch.records if r.run == str(enough)]
        first, second = sorted(records, key=lambda r: r.start)
        assert (second.start < first.end) == (enough == 5)
        launch.place.records.unlink()


def test_memory_is_held_until_the_compiler_ends_even_if_the_launcher_was_killed(
    launch: Launch,
) -> None:
    process = launch.start("sh", "-c", "echo $$; exec sleep 30", "-o", "a.o")
    assert process.stdout is not None
    compiler = int(process.stdout.readline())
    process.kill()
    process.wait()
    budget = str(launch.place.folder / "budget")
    assert taken(budget) == [GIB]
    os.kill(compiler, signal.SIGKILL)
    wait_for(lambda: taken(budget) == [])
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()


def test_parallel_records_do_not_mix_and_a_torn_one_is_skipped(launch: Launch) -> None:
    for process in [
        launch.start("true", "-c", "x.c", "-o", f"{'x' * 300}{n}.o") for n in range(12)
    ]:
        process.communicate()
    with launch.place.records.open("a") as file:
        file.write('{"run":"one","object":"torn.o","sou')
    assert sorted(r.object[300:] for r in launch.records) == sorted(f"{n}.o" for n in range(12))


def test_a_torn_record_takes_none_of_the_next_ones_with_it(launch: Launch) -> None:
    launch.place.records.write_text('{"run":"one","object":"torn.o","sou')
    for name in ("a.o", "b.o"):
        launch.run("true", "-c", "x.c", "-o", name)
    assert [r.object for r in launch.records] == ["a.o", "b.o"]


def test_a_record_that_finds_no_room_is_said_to_be_lost(launch: Launch) -> None:
    launch.place.records.write_text("\n" * 1000)  # of the 1024 bytes that a file may have below
    argv = launch.argv("true", "-c", "x.c", "-o", "a.o")
    finished = subprocess.run(
        ["sh", "-c", 'ulimit -f 2; exec "$@"', "sh", *argv],
        cwd=launch.folder, env=launch.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0
    assert finished.stderr.count("cost of a.o not recorded") == 1
    assert "24 of" in finished.stderr
    launch.run("true", "-c", "x.c", "-o", "b.o")
    assert [r.object for r in launch.records] == ["b.o"]


def test_without_settings_and_for_links_it_is_the_command(launch: Launch) -> None:
    launch.run("gcc", "-c", "x.c", "-o", "x.o")
    assert launch.run("gcc", "-shared", "x.o", "-o", "x.so").returncode == 0
    assert launch.run("gcc", "-c", "x.c", "-o", "y.o", SM121_LAUNCH="").returncode == 0
    lost = launch.run("gcc", "-c", "x.c", "-o", "z.o", SM121_LAUNCH="/none/launch.json")
    assert lost.returncode == 0
    assert "not limited and not recorded" in lost.stderr
    assert [r.object for r in launch.records] == ["x.o"]


def test_full_or_broken_cost_folder_does_not_stop_a_build(launch: Launch) -> None:
    settings = json.loads(launch.place.settings.read_text())
    settings |= {"budget": str(launch.folder / "x.c/budget"), "records": str(launch.folder)}
    launch.place.settings.write_text(json.dumps(settings))
    finished = launch.run("gcc", "-c", "x.c", "-o", "x.o")
    assert finished.returncode == 0
    assert "x.o is compiled without a share of memory" in finished.stderr
    assert "cost of x.o not recorded" in finished.stderr


def test_ccache_answers_as_without_us_and_says_so(launch: Launch) -> None:
    """The launcher is outside of ccache's key: what was stored without it is found with it."""
    assert shutil.which("ccache"), "ccache is missing: .ci/run installs it"
    cache = {"CCACHE_DIR": str(launch.folder / "ccache")}
    argv = ("ccache", "gcc", "-c", "x.c", "-o", "x.o")
    subprocess.run(argv, cwd=launch.folder, env={**os.environ, **cache}, check=True)
    launch.run(*argv, **cache)
    (launch.folder / "x.c").write_text("int g(void) { return 2; }\n")
    launch.run(*argv, **cache)
    launch.run(*argv, CCACHE_DISABLE="1", **cache)
    assert [r.cache for r in launch.records] == ["hit", "miss", "off"]
    # A hit tells nothing of what a compile needs.
    assert known_costs(launch.records)["x.o"].cpu == launch.records[2].cpu
    assert not list((launch.place.folder / "budget").glob("*.ccache"))


def test_two_nodes_share_a_store(launch: Launch) -> None:
    """Each has a cache of its own; what the first one compiled, the second one gets from the store."""
    store = {"CCACHE_REMOTE_STORAGE": f"file:{launch.folder}/store"}
    for node in ("spark-1", "spark-2"):
        argv = ("ccache", "gcc", "-c", "x.c", "-o", "x.o")
        launch.run(*argv, CCACHE_DIR=str(launch.folder / node), **store)
    assert [r.cache for r in launch.records] == ["miss", "hit"]
