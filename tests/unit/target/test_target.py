"""verify-target without running anything of a target: the list, verdicts, roots, comparing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zipfile
from pathlib import Path

import jsonschema
import pytest

from sm121 import proc
from sm121.__main__ import main
from sm121.errors import CheckFailed, EnvironmentFault
from sm121.layout import Layout
from sm121.lock.pylock import Target, lock_path
from sm121.target import checks, image, place, root
from sm121.target.compare import compare_wheels, sections
from sm121.target.container import Container, _apparmor, emulator
from sm121.target.image import DOCKERFILE, write_context
from sm121.target.model import SCHEMA_FILE, Machine, Report, Row, schema_text, to_json
from sm121.target.run import attempt, judge
from sm121.target.steps import STEPS
from sm121.target.table import show
from support.checkouts import ROOT
from support.wheels import make_wheel

EMULATED = Machine(
    how="emulated", machine="aarch64", python="3.11.2", system="Debian bookworm (3 packages)",
    emulator="7.2", driver="stub", network=False, drift=("libc6_2_arm64.deb, recorded was …",),
)  # fmt: skip
TORCH = next(step for step in STEPS if step.name == "torch")


def said(*lines: list[str]) -> str:
    return "\n".join(["a warning", *(checks.MARK + json.dumps(line) for line in lines)])


def test_each_check_of_the_list_exists_and_each_that_exists_is_in_the_list() -> None:
    assert [s.name for s in STEPS if s.kind == "check"] == list(checks.CHECKS)
    kinds = [s.kind for s in STEPS]
    # Nothing is imported before the hashes were compared.
    assert kinds[:4] == ["checksums", "binaries", "install", "extensions"]
    assert all(step.limit for step in STEPS if step.kind == "check")


@pytest.mark.parametrize(
    ("output", "code", "late", "verdict", "text"),
    [
        (said(["fact", "torch", "2"], ["pass", "all is well"]), 0, False, "pass", "all is well"),
        (said(["fail", "a CPU build"]), 1, False, "fail", "a CPU build"),
        (said(["pass", "all is well"]), 1, False, "fail", "all is well"),
        (said(["fact", "torch", "2"]), -11, False, "fail", "the interpreter died (exit status -11)"),
        (said(["pass", "all is well"]), 139, False, "fail", "the interpreter died (exit status 139)"),
        ("no module named torch", 1, False, "fail", "no verdict (exit status 1)"),
        ("", 0, False, "fail", "no verdict (exit status 0)"),
        (said(["fact", "torch", "2"]), -9, True, "fail", "it did not end within 15 min 00 s"),
    ],
)  # fmt: skip
def test_verdict_of_a_check(output: str, code: int, late: bool, verdict: str, text: str) -> None:
    row = judge(TORCH, EMULATED, output, code, late=late)
    assert (row.verdict, row.text, row.how) == (verdict, text, "emulated")
    assert row.facts == ({"torch": "2"} if "fact" in output else {})


@pytest.mark.parametrize(
    ("codes", "emulated", "last", "crashes"),
    [
        ([0], True, 0, 0),
        ([1], True, 1, 0),
        ([-11, 0], True, 0, 1),
        ([139, 139], True, 139, 1),
        ([-11], False, -11, 0),
    ],
)
def test_only_an_emulated_crash_is_tried_again(
    codes: list[int], emulated: bool, last: int, crashes: int
) -> None:
    left = list(codes)
    finished, before = attempt(
        lambda: proc.Finished(returncode=left.pop(0), output=""), emulated=emulated
    )
    assert (finished.returncode, before, left) == (last, crashes, [])


def test_what_did_not_end_is_not_tried_again() -> None:
    late = proc.Finished(returncode=-9, output="", late=True)
    assert attempt(lambda: late, emulated=True) == (late, 0)


def report() -> Report:
    rows = (
        Row(step="checksums", how="static", verdict="pass", text="as listed", facts={}),
        Row(step="torch", how="emulated", verdict="fail", text="a CPU build", facts={"a": "b"}),
        Row(step="vllm", how="not run", verdict="not run", text="not there", facts={}),
        Row(step="gates", how="not run", verdict="not run", text="not there", facts={}),
    )
    return Report(
        schema_version=1, result="fail", stack="0.26.0", target="linux-aarch64", profile="smoke",
        python="3.12", complete=False, machine=EMULATED, rows=rows, unproved=("a GPU",), seconds=61.0,
    )  # fmt: skip


def test_committed_schema_is_the_types() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()
    jsonschema.validate(json.loads(to_json(report())), json.loads(schema_text()))
    none = dataclasses.replace(report(), machine=None)
    jsonschema.validate(json.loads(to_json(none)), json.loads(schema_text()))


def test_table_tells_how_each_was_found(screen) -> None:
    show(screen.ui, report())
    lines = [line.strip() for line in screen.text.splitlines()]
    assert "pass    checksums  static    as listed" in lines
    assert "fail    torch      emulated  a CPU build" in lines
    assert "not run vllm, gates: not there" in lines
    assert any("libcuda: a stub" in line for line in lines)
    assert any("1 package(s) of the root are not those" in line for line in lines)
    assert lines[-1] == "FAIL: 1 static passed, 1 failed (torch), 2 not run (1 min 01 s)."


@pytest.mark.parametrize("name", ["run", "build"])
def test_record_holds_what_the_recipe_names(name: str) -> None:
    names = {file.partition("_")[0] for file in root.record(name)}
    assert set(root.recipe(name).packages) <= names
    assert all(len(digest) == 64 for digest in root.record(name).values())


def test_a_root_has_a_python_that_every_stack_locks(stack_name: str) -> None:
    recipe = root.recipe("run")
    target = Target.make("linux-aarch64", python=recipe.python, glibc=recipe.glibc)
    assert lock_path(ROOT / "pins", stack_name, "family", target).is_file()


def test_a_root_that_is_not_as_recorded() -> None:
    recorded = {"libc6_2.36_arm64.deb": "a", "bash_5_arm64.deb": "b"}
    assert root.compare(recorded, recorded) == []
    newer = root.compare({"libc6_2.37_arm64.deb": "c", "zlib1g_1_arm64.deb": "d"}, recorded)
    assert newer == [
        "libc6_2.37_arm64.deb, recorded was libc6_2.36_arm64.deb",
        "zlib1g_1_arm64.deb, recorded was no such package",
        "bash_5_arm64.deb was recorded and is not there",
    ]
    with pytest.raises(CheckFailed, match=r"libc6_2\.36_arm64\.deb is not the file"):
        root.compare({**recorded, "libc6_2.36_arm64.deb": "e"}, recorded)


def test_a_root_is_entered_without_a_network(tmp_path: Path) -> None:
    made = root.Root(
        path=tmp_path, recipe=root.recipe("run"), machine="x86_64", packages={}, drift=()
    )
    container = Container(root=made, scratch=tmp_path / "s", binds=(tmp_path / "house",))
    line = container.command(["python3", "-V"])
    assert line[0] == "unshare"
    assert "--net" in line
    assert line[-4:] == [str(tmp_path / "house"), "--", "python3", "-V"]
    assert "--net" not in dataclasses.replace(container, network=True).command(["true"])


def test_a_machine_that_is_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Spark, a wheelhouse for x86-64."""
    monkeypatch.setattr("sm121.target.container.host_machine", lambda: "aarch64")
    with pytest.raises(EnvironmentFault, match="No program of x86_64 can be run on a aarch64"):
        emulator("x86_64")


@pytest.mark.parametrize(("value", "named"), [("1\n", True), ("0\n", False), (None, False)])
def test_what_ubuntu_needs_first(tmp_path: Path, value: str | None, named: bool) -> None:
    setting = tmp_path / "setting"
    if value:
        setting.write_text(value)
    assert ("apparmor_restrict_unprivileged_userns=0" in _apparmor(setting)) is named


def test_wheels_are_compared_by_section(tmp_path: Path) -> None:
    program = Path(shutil.which("true") or "").resolve().read_bytes()
    data = sections(program)[".dynstr"]
    assert program.count(data) == 1
    changed = program.replace(data, data[:-2] + b"X\0")
    one, other = (
        make_wheel(tmp_path / str(i), files, name="vllm", version="1")
        for i, files in enumerate(
            (
                {"vllm/a.so": program, "vllm/b.py": "b = 1\n", "vllm/c.py": ""},
                {"vllm/a.so": changed, "vllm/b.py": "b = 2\n", "vllm/d.py": ""},
            )
        )
    )
    same, found = compare_wheels(one, other)
    with zipfile.ZipFile(one) as archive:
        assert same == len(archive.namelist()) - 4
    assert {d.file: d.why for d in found} == {
        "vllm/a.so": ".dynstr", "vllm/b.py": "",
        "vllm/c.py": f"only in {one.parent}", "vllm/d.py": f"only in {other.parent}",
        "vllm-1.dist-info/RECORD": "it lists the others' hashes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cpuinfo", "parent", "found"),
    [
        ("vendor_id : AuthenticAMD", "/usr/bin/bash", "qemu"),
        ("CPU implementer : 0x41", "/usr/bin/bash", ""),
        ("CPU implementer : 0x41", "/usr/bin/qemu-aarch64-static", "qemu"),
    ],
)
def test_an_arm64_container_on_another_processor_is_emulated(
    tmp_path: Path, cpuinfo: str, parent: str, found: str
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    (tmp_path / str(os.getppid())).mkdir()
    (tmp_path / str(os.getppid()) / "exe").symlink_to(parent)
    assert place.emulated_by("aarch64", tmp_path) == found
    assert place.emulated_by("aarch64", tmp_path / "none") == ""


@pytest.mark.parametrize(("names", "found"), [(("lo",), False), (("lo", "eth0"), True)])
def test_network(tmp_path: Path, names: tuple[str, ...], found: bool) -> None:
    (tmp_path / "net").mkdir()
    lines = ["head", "head", *(f"  {name}: 1 2" for name in names)]
    (tmp_path / "net/dev").write_text("\n".join(lines) + "\n")
    assert place.has_network(tmp_path) is found


def test_a_context_replaces_only_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout has a Dockerfile.verify, too, and must not be taken for one."""
    house = tmp_path / "house"
    house.mkdir()
    for name in ("src", "pins", "patches"):
        (tmp_path / "checkout" / name).mkdir(parents=True)
    (tmp_path / "checkout" / DOCKERFILE).write_text("FROM x\n")
    layout = Layout(root=tmp_path / "checkout", build=tmp_path / "build", wheelhouse=house,
                    cache=tmp_path / "cache")  # fmt: skip
    # The tools come from an index.
    monkeypatch.setattr(image, "install_tools", lambda _layout, _target, folder: folder.mkdir())
    target = Target.make("linux-aarch64", python="3.12", glibc="2.39")
    monkeypatch.chdir(layout.root)
    for folder in (layout.root, Path()):
        with pytest.raises(CheckFailed, match="no part of a context: patches, pins, src"):
            write_context(layout, house, target, folder, stub=None)
    assert (layout.root / "src").is_dir()
    for _ in range(2):  # one that is there is replaced
        write_context(layout, house, target, tmp_path / "context", stub=None)
    assert (tmp_path / "context/sm121/pins").is_dir()


@pytest.mark.parametrize("instead", ["--native-build", "--context=x"])
@pytest.mark.parametrize("other", ["--quick", "--only=torch", "--json=x", "--build"])
def test_options_that_would_go_by_are_refused(capsys, instead: str, other: str) -> None:
    assert main(["verify-target", instead, other]) == 2
    assert "is not for" in capsys.readouterr().err
