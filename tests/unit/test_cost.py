"""What builds cost: records read back, summed up, drawn, and scheduled on other machines."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from sm121.compile.launcher import kind_of, was_killed
from sm121.compile.page import to_html
from sm121.compile.records import (
    Cost,
    Record,
    kinds_of,
    known_costs,
    read_records,
    shipped_costs,
)
from sm121.compile.schedule import Job, longest_first, wall_seconds
from sm121.compile.timeline import Link, lanes, read_links, summarise, trace
from sm121.patches.series import load_series
from sm121.pins.load import load_stack, stack_names
from sm121.source.places import place_of

GIB = 1 << 30


def record(name: str = "a", **changes: object) -> Record:
    values: dict[str, object] = {
        "run": "one", "object": f"CMakeFiles/_C.dir/csrc/{name}.cu.o", "source": f"/s/{name}.cu",
        "start": 100.0, "end": 110.0, "waited": 0.0, "cpu": 9.0, "rss": GIB, "cache": "miss",
        "exit": 0, **changes,
    }  # fmt: skip
    return Record(**values)  # type: ignore[arg-type]


# --- records ------------------------------------------------------------------------


def test_records_are_read_by_run_and_what_is_torn_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "objects.jsonl"
    assert read_records(file) == []
    one, two = record("a"), record("b", run="two")
    lines = [json.dumps(asdict(r)) for r in (one, two)]
    file.write_text(f"{lines[0]}\n{lines[1][:40]}\n{lines[1]}\nnull\n{{}}\n\n{lines[0][:9]}")
    assert read_records(file) == [one, two]
    assert read_records(file, run="two") == [two]


def test_component_is_the_cmake_target() -> None:
    assert record().component == "_C"
    nested = "_deps/x-build/CMakeFiles/_vllm_fa2_C.dir/a.cu.o"
    assert record(object=nested).component == "_vllm_fa2_C"
    assert record(object="x.o").component == "(other)"


def test_newest_compile_is_what_an_object_costs() -> None:
    name = record().object
    assert known_costs([record(rss=3), record(rss=2, cpu=4.0)]) == {name: Cost(cpu=4.0, rss=2)}


@pytest.mark.parametrize(
    "later", [{"cache": "hit", "rss": 1}, {"exit": 1, "rss": 1}, {"cache": "unknown", "rss": 1}]
)
def test_hits_and_failures_say_nothing_of_it(later: dict[str, object]) -> None:
    assert known_costs([record(rss=7), record(**later)])[record().object].rss == 7


def test_killed_compile_is_given_more_next_time() -> None:
    name, killed = record().object, record(rss=4 * GIB, exit=1, killed=True)
    assert known_costs([killed])[name].rss == 6 * GIB
    assert known_costs([record(rss=GIB), killed])[name].rss == 6 * GIB
    assert known_costs([record(rss=8 * GIB), killed])[name].rss == 8 * GIB


@pytest.mark.parametrize(("status", "killed"), [(0, False), (1, False), (-9, True), (137, True)])
def test_older_records_tell_by_their_status(tmp_path: Path, status: int, killed: bool) -> None:
    older = asdict(record(exit=status))
    del older["killed"]
    (tmp_path / "objects.jsonl").write_text(json.dumps(older) + "\n")
    assert [r.killed for r in read_records(tmp_path / "objects.jsonl")] == [killed]


@pytest.mark.parametrize(
    ("status", "said", "killed"),
    [
        (1, "g++: fatal error: Killed signal terminated program cc1plus", True),
        (4, "g++: internal compiler error: Killed (program cc1plus)", True),
        (1, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)", True),
        (1, "x.cu(7): error: identifier Killed is undefined", False),
        (0, "x.cu(7): warning: died due to signal 9", False),
        (-15, "", False),
    ],
)
def test_a_killed_part_is_known_by_what_its_driver_says(
    status: int, said: str, killed: bool
) -> None:
    assert was_killed(status, said) == killed


def test_costs_that_come_with_a_stack(tmp_path: Path) -> None:
    assert shipped_costs(tmp_path, {}) == {}
    objects = {"a.o": [1.5, 7], "CMakeFiles/_fa2.dir/{flash}/b.cu.o": [2.5, 8]}
    (tmp_path / "costs.json").write_text(json.dumps({"objects": objects}))
    here = {"flash": Path("/build/third-party/flash-0123/tree")}
    assert shipped_costs(tmp_path, here) == {
        "a.o": Cost(cpu=1.5, rss=7),
        "CMakeFiles/_fa2.dir/build/third-party/flash-0123/tree/b.cu.o": Cost(cpu=2.5, rss=8),
    }


def test_an_object_that_was_not_measured_is_taken_for_the_largest_of_its_kind() -> None:
    def costs(suffix: str, *gib: int) -> dict[str, Cost]:
        folder = "sub/CMakeFiles/_fa2.dir/home/x.dir/src"
        return {f"{folder}/{n}.{suffix}.o": Cost(cpu=1, rss=n * GIB) for n in gib}

    cu, cpp = costs("cu", 1, 2, 5, 3, 4), costs("cpp", 1, 2, 3, 4)
    assert kinds_of({**cu, **cpp}) == {"_fa2 .cu": 5 * GIB}  # of .cpp there are too few
    assert kind_of("CMakeFiles/_fa2.dir/a.b.cu.o") == "_fa2 .cu"


def test_the_stock_checkout_has_pins_that_fit_its_series(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    from build_cost import STOCK_PATCHES, copy_of

    copy = copy_of(tmp_path, "stock")
    for name in stack_names(root / "pins"):
        series = load_series(copy / "patches/vllm" / name)
        assert tuple(patch.path.name for patch in series) == STOCK_PATCHES
        ours, stock = (load_stack(folder / "pins", name) for folder in (root, copy))
        assert stock == ours.model_copy(update={"sources_left_out": ()})


def test_a_cost_measured_here_is_found_in_another_folder(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """benchmarks/build_cost.py costs, what a stack ships, and names as the launcher sees them."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    from build_cost import costs_file, read_log

    pin = load_stack(root / "pins", "0.26.0").sources["qutlass"]
    here, there = (
        place_of("qutlass", pin, tmp_path / name / "source/third-party", {})
        for name in ("here", "there")
    )
    objects = [f"CMakeFiles/_q.dir{place}/qutlass/a.cu.o" for place in (here, there)]
    log = tmp_path / "objects.jsonl"
    log.write_text(json.dumps(asdict(record(object=objects[0]))) + "\n")
    (tmp_path / "costs.json").write_text(costs_file(read_log(log), "here"))
    assert shipped_costs(tmp_path, {"qutlass": there}).keys() == {objects[1]}

    (tmp_path / "own").mkdir()
    (tmp_path / "own/a.cu").touch()
    log.write_text(
        json.dumps(asdict(record(object=f"CMakeFiles/_q.dir{tmp_path}/own/a.cu.o"))) + "\n"
    )
    with pytest.raises(SystemExit, match="says nothing elsewhere"):
        costs_file(read_log(log), "here")


def test_records_that_are_kept_name_no_folder_of_this_machine(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    from build_cost import read_log, records_file

    tree = tmp_path / "source/third-party/qutlass-0123456789ab/tree"
    name, source = f"CMakeFiles/_q.dir{tree}/a.cu.o", f"{tree}/a.cu"
    log = tmp_path / "log/one/objects.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps(asdict(record(object=name, source=source))) + "\n")
    kept = tmp_path / "kept.jsonl"
    kept.write_text(records_file(tmp_path))
    assert json.loads(kept.read_text())["source"] == "{qutlass}/a.cu"
    assert str(tmp_path) not in kept.read_text()
    assert read_log(kept).jobs == read_log(log).jobs
    log.write_text(
        json.dumps(asdict(record(source=str(tmp_path / "work/one/src/csrc/b.cu")))) + "\n"
    )
    assert json.loads(records_file(tmp_path))["source"] == "{vllm}/csrc/b.cu"

    log.write_text(json.dumps(asdict(record(source="/elsewhere/a.cu"))) + "\n")
    with pytest.raises(SystemExit, match=r"/elsewhere/a\.cu is of no tree below"):
        records_file(tmp_path)


def test_two_builds_are_compared_and_held_against_their_own_runs(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    from build_cost import compare, read_log

    stock = [
        record("a", start=0, end=600, cpu=600), record("b", start=0, end=66, cpu=60),
        record("c", start=66, end=132, cpu=60),
    ]  # fmt: skip
    ours = [  # b is the same compile as stock's
        record("a", start=0, end=330, cpu=300), record("b", start=0, end=1, cpu=0.1, cache="hit"),
        record("d", start=1, end=2, cpu=0.1, cache="hit"),
    ]  # fmt: skip
    for name, run in (("stock", stock), ("ours", ours)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(asdict(one)) + "\n" for one in run)
        )
    compare(*(read_log(tmp_path / f"{n}.jsonl") for n in ("stock", "ours")), ["_C"], sample=False)
    printed = capsys.readouterr().out
    rows = {line[:34].strip(): line[34:].split() for line in printed.splitlines()}
    assert rows["together, minutes"] == ["12.0", "6.0", "0.50"]
    assert rows["longest object, minutes"] == ["10.0", "5.0", "0.50"]
    assert rows["2 cores, minutes"] == ["10.0", "5.0", "0.50"]
    assert "ours: 1 object(s) only ever came out of the cache" in printed
    assert "check, stock: 3 objects (0 out of the cache) on 2 cores took 10.0 min" in printed
    assert "predicted from CPU seconds 10.0 (1.000); wall/CPU of its compiles 1.02\n" in printed
    assert "others used these cores too" not in printed.partition("check, ours")[0]


# --- timeline -----------------------------------------------------------------------

RUN = [
    record("a", start=100, end=110, cpu=9.0, waited=1.0),
    record("b", start=100, end=104, cpu=3.0, rss=2 * GIB),
    record("c", start=104, end=109, cpu=0.0, cache="hit", object="CMakeFiles/_moe.dir/c.cu.o"),
]


def test_summary_says_where_the_minutes_went() -> None:
    cost = summarise(RUN)
    assert (cost.objects, cost.hits, cost.asked, cost.cpu, cost.wall) == (3, 1, 3, 12.0, 11.0)
    assert (cost.peak, cost.waited) == (2 * GIB, 1.0)
    assert [(c.name, c.objects, c.hits, c.cpu) for c in cost.components] == [
        ("_C", 2, 0, 12.0), ("_moe", 1, 1, 0.0),
    ]  # fmt: skip
    assert [r.source for r in cost.longest] == ["/s/a.cu", "/s/b.cu", "/s/c.cu"]
    assert summarise([]).objects == 0


def test_lanes_never_overlap() -> None:
    assert [(lane, r.source) for lane, r in lanes(RUN)] == [
        (0, "/s/a.cu"), (1, "/s/b.cu"), (1, "/s/c.cu"),
    ]  # fmt: skip


def test_trace_is_chromes_format() -> None:
    """Trace Event Format: complete events in microseconds, counters, metadata."""
    data = json.loads(trace(RUN, [Link(library="_C.so", start=110, end=112)]))
    events = data["traceEvents"]
    compiles = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert {(e["name"], e["tid"], e["ts"], e["dur"], e["cat"]) for e in compiles} == {
        ("a.cu", 1, 1_000_000, 10_000_000, "_C"), ("b.cu", 2, 1_000_000, 4_000_000, "_C"),
        ("c.cu", 2, 5_000_000, 5_000_000, "_moe"),
    }  # fmt: skip
    memory = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(memory) == 3 * GIB
    assert memory[-1] == 0
    (link,) = (e for e in events if e.get("cat") == "link")
    assert (link["name"], link["ts"], link["dur"]) == ("_C.so", 11_000_000, 2_000_000)


def test_links_of_this_run_are_read_from_ninjas_log(tmp_path: Path) -> None:
    """The third column is not asked: of ninja 1.13 it is the start of a link (test_rebuild.py)."""
    log = tmp_path / ".ninja_log"
    log.write_text(
        "# ninja log v7\n0\t900\t50000000000\told.so\tabc\n"
        "0\t9000\t50000000000\t_C.so\tabc\n1000\t3500\t117500000000\t_C.so\tabc\n"
        "0\t900\t119000000000\tgone.so\tabc\n0\t900\t119000000000\ta.cu.o\tabc\n5\t6\n"
    )
    for name, when in (("old.so", 50), ("_C.so", 120), ("a.cu.o", 119)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (when, when))
    assert read_links(log, since=100.0) == [Link(library="_C.so", start=117.5, end=120.0)]
    assert read_links(tmp_path / "none", since=0) == []


def test_page_shows_the_picture_and_trusts_no_name() -> None:
    page = to_html([*RUN, record("<script>", start=111, end=112)], title="0.26.0 & kernels")
    assert page.count("<rect ") == 4
    assert page.count('opacity="0.3"') == 1
    assert "1 of 4 objects out of ccache (25.0%)" in page
    assert "0.26.0 &amp; kernels" in page
    assert "<script>" not in page
    widths = [float(w) for w in re.findall(r'<rect x="[\d.]+" y="\d+" width="([\d.]+)"', page)]
    assert max(widths) == pytest.approx(1040 * 10 / 12, abs=0.1)
    assert "no compiler cache" in to_html([record(cache="off")], title="x")


# --- list scheduling ----------------------------------------------------------------


def jobs(*seconds: float, memory: int = 0) -> list[Job]:
    return [Job(name=str(n), seconds=s, memory=memory) for n, s in enumerate(seconds)]


@pytest.mark.parametrize(
    ("seconds", "cores", "wall"),
    [
        ((), 2, 0),
        ((5,), 20, 5),
        ((4, 3, 2, 1), 1, 10),
        ((4, 3, 2, 1), 2, 5),
        ((1, 1, 1, 9), 2, 10.0),  # the longest last: one core is idle for 8
        ((9, 1, 1, 1), 2, 9),
        ((3, 3, 2, 2, 2), 2, 7.0),  # Graham's example: 6 would do
    ],
)
def test_wall_time_by_list_scheduling(seconds: tuple[float, ...], cores: int, wall: float) -> None:
    assert wall_seconds(jobs(*seconds), cores=cores) == wall


def test_memory_limits_how_many_run() -> None:
    four = jobs(1, 1, 1, 1, memory=4)
    assert wall_seconds(four, cores=4, memory=8) == 2
    assert wall_seconds(four, cores=4, memory=1) == 4  # alone, whatever it needs
    assert wall_seconds(four, cores=4) == 1


def test_longest_first_is_never_worse_than_a_third_over_the_best() -> None:
    """Graham 1969: 4/3 - 1/(3 cores) of the best, which is at least work / cores."""
    mixed = jobs(*(1 + (n * 37) % 11 for n in range(30)))
    work = sum(j.seconds for j in mixed)
    for cores in (2, 16, 20):
        best = max(work / cores, 11)
        assert wall_seconds(longest_first(mixed), cores=cores) <= best * 4 / 3
