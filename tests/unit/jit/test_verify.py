"""Each verdict, from what recipes told; nothing is silently absent."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sm121.jit import verify as module
from sm121.jit.drive import Told
from sm121.jit.last import Last, Source, keep_last, read_last
from sm121.jit.page import in_verify_abi, section, to_html
from sm121.jit.recipes import Recipes, load_recipes
from sm121.jit.report import SCHEMA_FILE, Report, Row, schema_text, to_json
from sm121.jit.table import render_table
from sm121.jit.verify import Fault, shapes_fault, verify
from support.jit import all_told, make_job, make_recipes, record, write_tree


@pytest.fixture(scope="module")
def real(root: Path) -> Recipes:
    return load_recipes(root / "pins", "0.26.0")


def judged(tmp: Path, monkeypatch, recipes: Recipes, told, **changes: object) -> Report:
    write_tree(tmp / "tree")
    monkeypatch.setattr(
        module, "run_recipes",
        lambda bench, mode, names, begin: {n: told.get((mode, n), Told()) for n in names},
    )  # fmt: skip
    monkeypatch.setattr(module, "read_cubins", lambda told: None)
    return verify(make_job(tmp, recipes, **changes), lambda text: None)


def row(report: Report, name: str) -> Row:
    (one,) = (r for r in report.rows if r.kernel.endswith(name))
    return one


def test_all_compiled_passes_and_says_what_a_node_still_does(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    report = judged(tmp_path, monkeypatch, make_recipes(real), all_told())
    assert report.result == "pass"
    assert {r.verdict for r in report.rows} == {"compiled", "helper"}
    assert {(f.family, f.compilations, f.seconds) for f in report.first_start} == {
        (family, 1, 1.5) for family in ("triton", "cutedsl", "tilelang", "deepgemm", "flashinfer")
    }


def test_a_kernel_that_upstream_adds_is_a_fault(tmp_path: Path, monkeypatch, real: Recipes) -> None:
    write_tree(tmp_path / "tree")
    (tmp_path / "tree/vllm/models/net/added.py").write_text(
        "from vllm.triton_utils import triton\n@triton.jit\ndef brand_new(x): ...\n"
    )
    report = judged(tmp_path, monkeypatch, make_recipes(real), all_told())
    new = row(report, ":brand_new")
    assert (new.verdict, report.result) == ("no-recipe", "fail")
    assert any(
        "no-recipe: vllm.models.net.added:brand_new" in line for line in render_table(report)
    )


def test_left_out_has_its_reason(tmp_path: Path, monkeypatch, real: Recipes) -> None:
    recipes = make_recipes(
        real,
        recipes={"triton_one": {"triton": ["vllm.models.net.model:norm"]}},
        **{"left-out": [
            {"kernels": ["vllm.ops.cute:Gather", "vllm.ops.tl:mix"], "reason": "not here"},
            {"kernels": ["vllm.utils.deep_gemm:gemm", "flashinfer.mla:decode"], "reason": "nor these"},
        ]},
    )  # fmt: skip
    report = judged(tmp_path, monkeypatch, recipes, all_told())
    assert report.result == "pass"
    assert (row(report, ":mix").verdict, row(report, ":mix").why) == ("left-out", "not here")


def test_an_entry_about_a_kernel_that_is_gone_is_noted(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    gone = [{"kernels": ["vllm.ops.gone:old"], "reason": "was"}]
    report = judged(tmp_path, monkeypatch, make_recipes(real, **{"left-out": gone}), all_told())
    assert any("vllm.ops.gone:old" in note.text for note in report.notes)


def test_a_recipe_that_does_not_reach_its_kernel_is_a_fault(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    told = all_told()
    told["tilelang", "tilelang_one"] = Told()
    report = judged(tmp_path, monkeypatch, make_recipes(real), told)
    assert (row(report, ":mix").verdict, report.result) == ("not-reached", "fail")


def test_a_crashed_recipe_fails_its_kernels_with_a_reading(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    told = all_told()
    told["cutedsl", "cutedsl_one"] = Told(error="killed by signal 11 (Segmentation fault)\nmlir…")
    report = judged(tmp_path, monkeypatch, make_recipes(real), told)
    gather = row(report, ":Gather")
    assert gather.verdict == "failed"
    assert gather.reading
    assert gather.reading.kind == "toolchain"
    assert "Segmentation fault" in gather.message


def test_a_recipe_that_fails_after_its_kernels_is_shown(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    told = all_told()
    told["triton", "triton_one"].error = "ValueError: later"
    report = judged(tmp_path, monkeypatch, make_recipes(real), told)
    assert report.result == "fail"
    assert any("triton_one (triton) failed: ValueError: later" in n.text for n in report.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shared": 49152}, "110,592 bytes of shared memory"),
        ({"registers": 168, "threads": 512}, "512 threads of 168 registers"),
        ({"threads": 2048, "registers": 16}, "2048 threads per block"),
        ({"launch": {"threads": 128, "dynamic_shared": 101377 - 1024}}, "101,377 bytes of shared"),
        ({"launch": {"threads": 1024, "dynamic_shared": 0}, "registers": 72}, "1024 threads of 72"),
    ],
)
def test_a_kernel_that_compiles_and_cannot_launch_is_a_fault(
    tmp_path: Path, monkeypatch, real: Recipes, change: dict[str, Any], said: str
) -> None:
    told = all_told()
    one = record(
        "vllm.models.net.model:norm", "triton", dynamic_shared=61440 if "shared" in change else 0
    )
    if "launch" in change:  # of this kernel of the cubin alone
        one["launches"] = {"k": change["launch"]}
    one["codes"][0].update({name: v for name, v in change.items() if name != "launch"})
    told["triton", "triton_one"] = Told(records=[one])
    report = judged(tmp_path, monkeypatch, make_recipes(real), told)
    norm = row(report, ":norm")
    assert (norm.verdict, report.result) == ("over-limit", "fail")
    assert said in norm.message
    assert norm.reading
    assert norm.reading.kind == "over-limit"


def test_a_module_without_any_kernel_is_no_success(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    told = all_told()
    told["flashinfer", "flashinfer_one"].records[0]["codes"] = []
    report = judged(tmp_path, monkeypatch, make_recipes(real), told)
    assert row(report, ":decode").verdict == "failed"


def test_exactly_at_the_limit_is_well(tmp_path: Path, monkeypatch, real: Recipes) -> None:
    told = all_told()
    # 384 threads of 168 registers are 64,512 of 65,536: what DeepGEMM's kernels take.
    one = record("vllm.models.net.model:norm", "triton", dynamic_shared=101376)
    one["codes"][0].update(shared=0, registers=168, threads=384)
    told["triton", "triton_one"] = Told(records=[one])
    assert judged(tmp_path, monkeypatch, make_recipes(real), told).result == "pass"


def test_a_broken_rule_of_the_environment_explains_the_failures_of_its_family(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    told = all_told()
    for mode in ("cutedsl", "triton"):
        told[mode, f"{mode}_one"] = Told(error="RuntimeError: LLVM ERROR")
    fault = Fault(distribution="nvidia-cutlass-dsl-libs-cu13", text="found 4.5.2", symptom="ICE")
    report = judged(tmp_path, monkeypatch, make_recipes(real), told, faults=[fault])
    gather, norm = row(report, ":Gather"), row(report, ":norm")
    assert gather.reading
    assert norm.reading
    assert (gather.reading.kind, norm.reading.kind) == ("pin", "toolchain")
    assert "4.5.2" in gather.reading.says


def test_a_kernel_met_only_by_running_is_in_the_table(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    told = all_told()
    told["triton", "triton_one"].records.append(record("vllm.ops.far:unreached", "triton"))
    report = judged(tmp_path, monkeypatch, make_recipes(real), told)
    assert row(report, ":unreached").why.startswith("met when launch code ran")


def test_shapes_are_compared_with_the_published_config(real: Recipes) -> None:
    shapes = real.shapes.model_dump()
    published = {"hidden_size": 4096, "sliding_window": 256, "qk_rope_head_dim": 64}
    (note,) = shapes_fault(shapes, published)
    assert note.text == "jit.toml has window = 128, the model's config 256"
    (silent,) = shapes_fault(shapes, {})
    assert (silent.kind, "not compared" in silent.text) == ("note", True)


def test_a_second_run_runs_nothing_and_a_changed_input_runs_all(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    recipes, ran = make_recipes(real), []
    judged(tmp_path, monkeypatch, recipes, all_told())
    monkeypatch.setattr(
        module, "run_recipes", lambda bench, mode, names, begin: ran.extend(names) or {}
    )
    assert verify(make_job(tmp_path, recipes), lambda text: None).result == "pass"
    assert ran == []
    verify(
        make_job(tmp_path, recipes, inputs={"tree": "t", "environment": "other"}), lambda text: None
    )
    assert len(ran) == 5


def test_only_some_recipes_judges_only_those(tmp_path: Path, monkeypatch, real: Recipes) -> None:
    report = judged(tmp_path, monkeypatch, make_recipes(real), all_told(), only=["triton_one"])
    assert {r.verdict for r in report.rows} == {"compiled", "helper"}
    assert report.result == "pass"


def test_report_follows_its_published_schema(tmp_path: Path, monkeypatch, real: Recipes) -> None:
    told = all_told()
    told["cutedsl", "cutedsl_one"] = Told(error="<b>LLVM ERROR</b>")
    report = judged(tmp_path, monkeypatch, make_recipes(real), told)
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()
    jsonschema.validate(json.loads(to_json(report)), json.loads(schema_text()))
    page = to_html(report)
    assert "&lt;b&gt;LLVM ERROR" in page
    assert "<b>LLVM" not in page
    whole = list(render_table(replace(report), whole=True))
    assert any("helper" in line for line in whole)


def test_what_a_node_still_compiles_is_kept_for_the_manifest(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    passed = judged(tmp_path, monkeypatch, make_recipes(real), all_told())
    file, source = tmp_path / "build/last.json", Source(commit="abc", tree="def")
    assert read_last(file) is None
    keep_last(passed, file, source=source)
    last = read_last(file)
    assert last
    assert (last.source, last.report) == (source, passed)
    assert last.first_start
    assert {one.family for one in last.first_start if one.shipped} == {"flashinfer"}
    keep_last(replace(passed, result="fail"), file, source=source)
    failed = read_last(file)
    assert failed
    assert failed.first_start is None
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    assert read_last(file) is None


def test_the_page_of_verify_abi_has_the_same_tables(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    told = all_told()
    told["cutedsl", "cutedsl_one"] = Told(error="<b>LLVM ERROR</b>")
    report = judged(tmp_path, monkeypatch, make_recipes(real), told)
    keep_last(report, tmp_path / "last.json", source=Source(commit="a" * 40, tree="t"))
    last = read_last(tmp_path / "last.json")
    shown = in_verify_abi(last, commit="a" * 40)
    assert section(report, heading="h3") in shown
    assert section(report).replace("h2>", "h3>") == section(report, heading="h3")
    assert "<strong class=fail>FAIL</strong> 1 fault found" in shown
    assert "&lt;b&gt;LLVM ERROR" in shown
    assert "<b>" not in shown


def test_a_source_that_was_not_verified_is_named_with_the_command(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    report = judged(tmp_path, monkeypatch, make_recipes(real), all_told())
    keep_last(report, tmp_path / "last.json", source=Source(commit="a" * 40, tree="t"))
    last = read_last(tmp_path / "last.json")
    for found, commit, said in (
        (None, "b" * 40, "verify-jit was not run here"),
        (last, "b" * 40, f"not run for this source (patched commit {'b' * 12})"),
        (last, "", "It is not known of which source these binaries were made"),
    ):
        shown = in_verify_abi(found, commit=commit)
        assert said in shown
        assert "nox -s verify-jit" in shown
        assert "<table" not in shown
    # There the verb ends with a fault of usage: no command is named, and no run is looked for.
    shown = in_verify_abi(last, commit="a" * 40, without="1.2.3")
    assert "Stack 1.2.3 has no jit.toml" in shown
    assert "nox" not in shown
    assert "<table" not in shown


def test_a_run_is_of_a_tree_and_without_one_of_a_commit(
    tmp_path: Path, monkeypatch, real: Recipes
) -> None:
    report = judged(tmp_path, monkeypatch, make_recipes(real), all_told())
    last = Last(source=Source(commit="c", tree="t"), report=report)
    assert last.is_of(commit="another", tree="t") is True  # another message, the same content
    assert last.is_of(commit="c", tree="another") is False
    assert (last.is_of(commit="c"), last.is_of(commit="another")) == (True, False)
    assert last.is_of(commit="") is None


@pytest.mark.parametrize(
    ("dynamic", "text", "why"),
    [
        ((64, 32), "1,088", None),
        ((64, -1), "1,088 (1 of 2)", "shared (n of m): "),
        ((-1, -1), "4,096 + ?", "shared + ?: "),
    ],
)
def test_what_was_not_seen_launched_is_no_number(
    tmp_path: Path, monkeypatch, real: Recipes, dynamic: tuple[int, int], text: str, why: str | None
) -> None:
    """A kernel that nothing launches has no say in the most that one takes."""
    code = {"sm": 121, "registers": 40, "threads": 128, "stack": 0}
    told = {
        key: Told(records=[{**one, "dynamic_shared": 0} for one in some.records])
        for key, some in all_told().items()
    }
    told["flashinfer", "flashinfer_one"] = Told(
        records=[
            record(
                "flashinfer.mla:decode", "flashinfer",
                codes=[
                    {**code, "name": "one", "shared": 1024},
                    {**code, "name": "two", "shared": 1024 if dynamic[1] >= 0 else 4096},
                ],
                launches={
                    name: {"threads": 128, "dynamic_shared": size}
                    for name, size in zip(("one", "two"), dynamic, strict=True)
                    if size >= 0
                },
            )
        ]
    )  # fmt: skip
    report = judged(tmp_path, monkeypatch, make_recipes(real), told)
    lines = list(render_table(report))
    assert any("decode" in line and f"  {text}  " in line for line in lines)
    noted = [line.strip() for line in lines if line.strip().startswith("shared ")]
    assert [note.startswith(why or "") for note in noted] == [True] * (why is not None)
    assert f"<td class=num>{text}</td>" in to_html(report)
    assert all(f"<p class=dim>{escape(note)}</p>" in to_html(report) for note in noted)
