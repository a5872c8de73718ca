"""verify() end to end on small wheels; policy, schemas, table, page."""

import dataclasses
import json

import jsonschema
import pytest
from make import TARGET, Sym, elf, fatbin, write_wheel

from sm121.abi.demangle import demangle
from sm121.abi.page import to_html
from sm121.abi.policy import model
from sm121.abi.policy.load import DEFAULT, load_policy
from sm121.abi.report import (
    KINDS,
    SCHEMA_FILE,
    ImportRow,
    NotRun,
    Ran,
    from_json,
    schema_text,
    to_json,
)
from sm121.abi.table import _WORDS, bar, how_run, render_table
from sm121.abi.verify import verify
from sm121.errors import CheckFailed, PinsFault, UsageFault
from sm121.rules.model import load_rules
from support.environments import listed, manifest_text

NAME = "vllm-0.26.0+sm121.kernels.1-cp311-abi3-linux_aarch64.whl"
GOOD = {
    "vllm/spinloop.abi3.so": elf([Sym(name="PyModule_Create2"), Sym(name="PyInit_s", defined=True)], needed=["libc.so.6"]),
    "vllm/_C_stable_libtorch.abi3.so": elf(needed=["libc.so.6"], fatbin=fatbin(["sm_121a"], ["sm_120f"])),
}  # fmt: skip
COMPONENTS = {"built": ["spinloop", "_C_stable_libtorch"], "left_out": {}}


def wheelhouse(folder, files=None, *, components=COMPONENTS, name=NAME):
    folder.mkdir(exist_ok=True)
    path = write_wheel(folder, name, files if files is not None else GOOD)
    text = manifest_text(
        [listed(path)], target="linux-aarch64", profile="kernels", components=components
    )
    (folder / "manifest.json").write_text(text)
    return folder


def run(tmp_path, house, **more):
    return verify(
        [house], policy=load_policy(), target=TARGET, arch="12.1a", cache=tmp_path / "cache", **more
    )


def test_pass(tmp_path):
    report = run(tmp_path, wheelhouse(tmp_path / "wh"))
    assert report.result == "pass", report.faults
    assert report.profile == "kernels"
    assert report.wheels[0].binaries == 2
    assert report.wheels[0].symbols == 1
    assert render_table(report)[-1] == "PASS: every binary fits."


def test_fail_says_why_and_where(tmp_path):
    files = {**GOOD, "vllm/_C_stable_libtorch.abi3.so": elf([Sym(name="_ZN3c103fooEv")], needed=["libc.so.6"], fatbin=fatbin(["sm_75"]))}  # fmt: skip
    report = run(tmp_path, wheelhouse(tmp_path / "wh", files))
    text = "\n".join(render_table(report))
    assert report.result == "fail"
    assert {f.kind for f in report.faults} == {"symbol", "gpu-code"}
    for needed in (
        "c10::foo()",
        "libc10.so should have it",
        "sm_75",
        "vllm/_C_stable_libtorch.abi3.so",
    ):
        assert needed in text
    assert text.endswith("FAIL: 2 fault(s) in 1 wheel(s).")


def test_changed_wheel_and_stray_wheel(tmp_path):
    house = wheelhouse(tmp_path / "wh")
    write_wheel(house, NAME, {**GOOD, "vllm/new.py": b""})
    write_wheel(house, "stray-1-py3-none-any.whl", {"stray.py": b""})
    texts = " / ".join(f.text for f in run(tmp_path, house).faults)
    assert "not the file that the manifest lists" in texts
    assert "in the folder but not in the manifest" in texts
    (house / NAME).unlink()
    assert "is in the manifest but not in the folder" in " ".join(
        f.text for f in run(tmp_path, house).faults
    )


def test_bad_manifest(tmp_path):
    house = wheelhouse(tmp_path / "wh")
    (house / "manifest.json").write_text('{"profile": 1}')
    with pytest.raises(CheckFailed, match="no manifest"):
        run(tmp_path, house)


def test_second_run_reads_nothing(tmp_path, monkeypatch):
    house = wheelhouse(tmp_path / "wh")
    first = run(tmp_path, house)
    monkeypatch.setattr("sm121.abi.verify.judge", lambda *_a, **_k: pytest.fail("judged again"))
    assert run(tmp_path, house) == first


def test_any_change_is_seen(tmp_path):
    house = wheelhouse(tmp_path / "wh")
    assert run(tmp_path, house).result == "pass"
    wheelhouse(house, {**GOOD, "vllm/x.so": elf(machine="x86_64")})
    assert run(tmp_path, house).result == "fail"
    wheelhouse(house)
    assert run(tmp_path, house).result == "pass"
    wheelhouse(house, components={"built": ["cumem_allocator"], "left_out": {}})
    assert run(tmp_path, house).result == "fail", "the manifest alone changed"


def test_usage(tmp_path):
    house = wheelhouse(tmp_path / "wh")
    common = {"policy": load_policy(), "target": TARGET, "cache": tmp_path / "c"}
    with pytest.raises(UsageFault, match=r"architecture 12\.1 "):
        verify([house], arch="12.1", **common)
    with pytest.raises(UsageFault, match="does not exist"):
        verify([tmp_path / "gone"], arch="12.1a", **common)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageFault, match="no wheel"):
        verify([tmp_path / "empty"], arch="12.1a", **common)


def test_family_rules(tmp_path, root):
    """The shared engine: a rule that the set breaks is a fault, with reason and symptom."""
    rules = load_rules(root / "pins")
    house = wheelhouse(tmp_path / "wh")
    assert run(tmp_path, house, rules=rules).result == "pass"
    nccl = write_wheel(tmp_path, "nvidia_nccl_cu13-2.28.9-py3-none-any.whl", {"a": b""})
    common = {"policy": load_policy(), "target": TARGET, "arch": "12.1a", "cache": tmp_path / "c"}
    report = verify([nccl], rules=rules, **common)
    (fault,) = report.faults
    assert (fault.kind, fault.names) == ("family", ("nccl-graph-replay",))
    assert "serving hangs" in fault.text
    assert [r.result for r in report.family] == ["fail", "pass"]
    # As surroundings of something else it is not judged.
    wheel = next(house.glob("*.whl"))
    assert verify([wheel], against=[nccl], rules=rules, **common).result == "pass"


def test_what_is_not_there_is_not_run_and_no_fault(tmp_path):
    files = {"vllm/a.abi3.so": elf([Sym(name="torch_x")], needed=["libtorch.so", "libc.so.6"])}
    house = wheelhouse(tmp_path / "wh", files, components={"built": [], "left_out": {}})
    assert {f.kind for f in run(tmp_path, house).faults} == {"library"}
    report = run(tmp_path, house, lacking=["torch 2.11.0"])
    assert report.result == "pass"
    assert [n.check for n in report.not_run] == ["symbols of vllm/a.abi3.so"]
    assert "libtorch.so was not found" in report.not_run[0].reason
    assert "torch 2.11.0" in report.not_run[0].reason


def test_environment(tmp_path):
    site = tmp_path / "env/lib/python3.12/site-packages"
    (site / "vllm").mkdir(parents=True)
    for path, data in GOOD.items():
        (site / path).write_bytes(data)
    info = site / "vllm-0.26.0+sm121.kernels.1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("".join(f"{p},,\n" for p in GOOD))
    (info / "METADATA").write_text("Name: vllm\n")
    common = {"policy": load_policy(), "target": TARGET, "arch": "12.1a", "cache": tmp_path / "c"}
    report = verify([], env=tmp_path / "env", **common)
    assert (report.result, report.wheels[-1].binaries) == ("pass", 2)
    # A library that a half-removed package left behind is loaded all the same.
    (site / "left.so").write_bytes(elf(needed=["libgone.so"]))
    report = verify([], env=site, **common)
    assert [f.file for f in report.faults] == ["left.so"]
    faulty = verify([], env=site, wanted={"vllm": "0.27.0"}, **common)
    assert "the stack wants 0.27.0" in " ".join(f.text for f in faulty.faults)


def test_json_has_the_published_schema(tmp_path):
    assert SCHEMA_FILE.read_text() == schema_text()
    files = {**GOOD, "vllm/x.so": elf([Sym(name="gone")], needed=["libc.so.6"], runpath="/x")}
    report = run(tmp_path, wheelhouse(tmp_path / "wh", files))
    data = json.loads(to_json(report))
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))
    validator.validate(data)
    assert from_json(to_json(report)) == report
    for wrong in ({"schema_version": 2}, {"result": "maybe"}):
        assert not validator.is_valid(data | wrong)


def test_every_kind_has_words():
    assert set(_WORDS) == set(KINDS)


def test_page_is_self_contained_and_escapes(tmp_path):
    files = {
        **GOOD,
        "vllm/<script>alert(1)<b>.so": elf([Sym(name="<img src=x>")], needed=["libc.so.6"]),
    }
    report = run(tmp_path, wheelhouse(tmp_path / "wh", files))
    page = to_html(report)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page
    for outside in ("http:", "https:", "src=", "url(", "@import"):
        assert outside not in page.replace("src=x&gt;", "")
    assert 'aria-label="2 native, 0 PTX, 0 none"' in page
    assert "What is wrong" in page
    assert "What is wrong" not in to_html(run(tmp_path, wheelhouse(tmp_path / "ok")))


def test_bar_shows_every_share(tmp_path):
    report = run(tmp_path, wheelhouse(tmp_path / "wh"))
    row = next(r for r in report.components if r.sass)
    assert bar(row, 10) == "#" * 10
    uneven = dataclasses.replace(row, sass=998, ptx=1, none=1)
    assert bar(uneven, 10) == "########+."


def test_policy_schema_is_published():
    assert model.SCHEMA_FILE.read_text() == model.schema_text()
    import tomllib

    schema = json.loads(model.SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator(schema).validate(tomllib.loads(DEFAULT.read_text()))


def test_policy_faults_are_all_named(tmp_path):
    bad = DEFAULT.read_text().replace("[nccl]\ndistribution", "[nccl]\ndistributon", 1)
    bad = bad.replace('scope = "global"', 'scope = "globe"', 1)
    (tmp_path / "p.toml").write_text(bad)
    with pytest.raises(PinsFault) as caught:
        load_policy(tmp_path / "p.toml")
    text = "\n".join(caught.value.details)
    assert "did you mean 'distribution'" in text
    assert "preload.0.scope" in text


def test_policy_exceptions_need_a_reason(tmp_path):
    bad = DEFAULT.read_text() + '\n[[optional]]\nfiles = ["x"]\nwhy = "meh"\n'
    (tmp_path / "p.toml").write_text(bad)
    with pytest.raises(PinsFault):
        load_policy(tmp_path / "p.toml")


@pytest.mark.parametrize(
    ("name", "readable"),
    [("_ZN3c105ErrorC1Ev", "c10::Error::Error()"), ("cuMemFree", "cuMemFree"), ("_Z", "_Z"),
     ("_Z" + "N" * 100_000, "_Z" + "N" * 100_000)],
)  # fmt: skip
def test_demangle(name, readable):
    assert demangle(name) == readable


def test_what_could_not_be_imported_is_shown_as_not_run(tmp_path):
    imports = tuple(
        ImportRow(module=name, result=result, text=text)
        for name, result, text in (
            ("a.x", "pass", ""), ("b.y", "not run", "needs <the driver>"), ("c.z", "fail", "died"),
        )
    )  # fmt: skip
    ran = Ran(
        how="emulated", python="3.11.2", driver="stub", complete=True, bare=(), seconds=1.0,
        imports=imports,
    )  # fmt: skip
    report = dataclasses.replace(run(tmp_path, wheelhouse(tmp_path / "wh")), ran=ran)
    assert "imported 1 of 3 from the wheels alone" in how_run(report)
    assert "1 could not be run" in how_run(report)
    (shown,) = [line for line in render_table(report) if "  imported: " in line]
    assert shown == "  imported: a.x"
    page = to_html(report)
    assert "not run: needs &lt;the driver&gt;" in page
    assert "<strong class=fail>FAIL</strong> died" in page
    jsonschema.validate(json.loads(to_json(report)), json.loads(SCHEMA_FILE.read_text()))
    assert from_json(to_json(report)) == report


def test_not_run_for_one_reason_is_one_line(tmp_path):
    report = run(tmp_path, wheelhouse(tmp_path / "wh"))
    checks = [NotRun(check=f"import {n}", reason="no driver") for n in "abcd"]
    more = dataclasses.replace(report, not_run=(*checks, NotRun(check="patches", reason="no git")))
    lines = [line for line in render_table(more) if line.startswith("not run: ")]
    assert lines == [
        "not run: import a, import b and 2 more: no driver", "not run: patches: no git",
    ]  # fmt: skip
