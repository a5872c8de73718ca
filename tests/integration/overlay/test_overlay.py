"""`build --profile overlay` through the command line, on a tiny upstream and its tiny release.

Real git, a real wheel with real ELF files and fatbins, the real pipeline to a verified
wheelhouse.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import shutil
import signal
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from make import elf, fatbin
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from sm121.__main__ import main
from sm121.files import sha256_text
from sm121.lock.pylock import LockedFile, Target, lock_path, make_lock, write_lock
from sm121.lock.resolve import REQUIREMENT_FILES, inputs_digest
from sm121.pins.load import load_stack
from sm121.repair.wheel import record_digest
from sm121.wheelhouse.manifest import SCHEMA_FILE
from support.stacks import write_stack
from support.upstream import FILES, Upstream, make_checkout, make_upstream, sha256
from support.wheels import make_wheel

SPINLOOP = elf(needed=["libc.so.6"], needs={"libc.so.6": ["GLIBC_2.17"]})
BINARIES = {
    "vllm/spinloop.abi3.so": SPINLOOP,
    "vllm/fs_io_C.abi3.so": SPINLOOP,
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": elf(fatbin=fatbin(["sm_80", "compute_80"])),
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": elf(fatbin=fatbin(["sm_90a"], ["sm_90a"])),
}
VERSION_FILE = "__version__ = version = '1.2.3'\n__version_tuple__ = version_tuple = (1, 2, 3)\n"
NAMES = ["spinloop", "fs_io_C", "_vllm_fa2_C", "_vllm_fa3_C", "vllm-rs"]
FILENAME = "vllm-1.2.3-cp38-abi3-manylinux_2_28_aarch64.whl"
TARGET = Target.make("linux-aarch64", python="3.12", glibc="2.39")


@dataclass
class House:
    """A checkout whose stack has an overlay, and the release's wheel in its cache."""

    root: Path
    upstream: Upstream
    pins: dict[str, Any]
    capsys: pytest.CaptureFixture[str]

    def release(self, **changed: bytes | str | None) -> None:
        """Publish the release's wheel and pin it; changed: members of it (None: left out)."""
        tree = {n: t for n, t in self.upstream_files.items() if n.startswith("vllm/")}
        files = {**tree, **BINARIES, "vllm/_version.py": VERSION_FILE, "vllm/vllm-rs": SPINLOOP,
                 "vllm/third_party/other/__init__.py": "third = 'party'\n", **changed}  # fmt: skip
        made = make_wheel(
            self.root.parent / "release",
            {name: content for name, content in files.items() if content is not None},
            name="vllm", version="1.2.3", tag="cp38-abi3-manylinux_2_28_aarch64",
            requires=["torch==2.11.0"], executable=["vllm/vllm-rs"],
        )  # fmt: skip
        place = self.root / "build/cache/files" / sha256(made) / FILENAME
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, place)
        self.pins["overlay"]["wheels"]["linux-aarch64"]["sha256"] = sha256(made)
        self.repin()

    @property
    def upstream_files(self) -> dict[str, str]:
        return {**FILES, "setup.py": self.upstream.work.path.joinpath("setup.py").read_text()}

    def repin(self) -> None:
        """Write the pins, and a lock made from them and the requirements as patched."""
        pins = self.root / "pins"
        write_stack(pins, self.pins)
        stack = load_stack(pins, "1.2.3")
        texts = {**FILES, "requirements/cuda.txt": self.requirements}
        digests = {name: sha256_text(texts[name]) for name in REQUIREMENT_FILES}
        torch = LockedFile(distribution="torch", version="2.11.0", size=1, sha256="b" * 64,
                           filename="torch-2.11.0-cp312-cp312-manylinux_2_28_aarch64.whl")  # fmt: skip
        lock = make_lock([torch], python="3.12", inputs=inputs_digest(stack, "family", digests))
        write_lock(lock, lock_path(pins, "1.2.3", "family", TARGET))

    requirements: str = FILES["requirements/cuda.txt"]

    def patch(self, name: str, files: dict[str, str | bytes | None]) -> None:
        series = self.root / "patches/vllm/1.2.3"
        self.upstream.work.make_patch(series / f"{name}.patch", files, keep=False)
        with (series / "series").open("a") as listing:
            listing.write(f"{name}.patch\n")

    def build(self, *more: str, code: int = 0) -> str:
        argv = ["build", "--profile", "overlay", "--offline", *more]
        assert main(argv) == code, self.capsys.readouterr().err
        return self.capsys.readouterr().err

    @property
    def wheel(self) -> Path:
        (wheel,) = (self.root / "wheelhouse").glob("*.whl")
        return wheel

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.root / "wheelhouse/manifest.json").read_text())

    def read(self, member: str) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(member).decode()


def overlay_pins(pins: dict[str, Any]) -> dict[str, Any]:
    pins = copy.deepcopy(pins)
    pins["components"] = dict.fromkeys(NAMES, "a part")
    pins["left-out"] = {"_vllm_fa3_C": "for sm_90"}
    pins["profiles"] = {
        "smoke": {"summary": "small", "components": ["spinloop"], "memory-per-job-gib": 1.0},
        "overlay": {"summary": "theirs", "components": NAMES, "memory-per-job-gib": 1.0},
    }
    wheel = {"filename": FILENAME, "sha256": "a" * 64}
    pins["overlay"] = {"wheels": {"linux-aarch64": wheel}}
    return pins


def make_house(folder: Path, capsys: pytest.CaptureFixture[str]) -> House:
    upstream = make_upstream(folder / "upstream")
    setup = "".join(
        f'CMakeExtension(name="vllm.{n}")\n' for n in NAMES if n != "vllm-rs"
    )  # fmt: skip
    commit = upstream.work.commit(
        {"setup.py": setup, "tools/build_rust.py": 'target="vllm.vllm-rs"\n'}
    )
    upstream.work.git("tag", "-f", "v1.2.3")
    pins = overlay_pins(upstream.pins)
    pins["vllm"]["commit"] = commit
    house = House(make_checkout(folder / "checkout", pins), upstream, pins, capsys)
    house.release()
    return house


@pytest.fixture
def house(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    root: Path,
) -> Iterator[House]:  # fmt: skip
    made = make_house(tmp_path, capsys)
    shutil.copyfile(root / "pins/rules.toml", made.root / "pins/rules.toml")
    monkeypatch.chdir(made.root)
    before = signal.getsignal(signal.SIGTERM)
    # The source comes from the tag; the rest is offline.
    assert main(["source"]) == 0
    capsys.readouterr()
    yield made
    signal.signal(signal.SIGTERM, before)


def test_patched_python_over_the_release(house: House) -> None:
    house.patch(
        "repair", {"vllm/other.py": "x = 2\n", "vllm/new.py": "y = 1\n", "docs/a.md": "a\n"}
    )
    house.patch("kernels", {"csrc/spinloop.cpp": "int spin() { return 2; }\n"})
    said = house.build()
    assert house.read("vllm/other.py") == "x = 2\n"
    assert house.read("vllm/new.py") == "y = 1\n"
    with zipfile.ZipFile(house.wheel) as archive:
        for name, data in BINARIES.items():
            assert archive.read(name) == data
        assert archive.getinfo("vllm/vllm-rs").external_attr >> 16 == 0o100755
        assert archive.testzip() is None
    for name in ("environment", "toolkit", "compile"):
        assert f" skip  {name:<11} not needed" in said
    by_name = {p["name"]: p for p in house.manifest["patches"]}
    assert by_name["repair"]["status"] == "applied"
    assert by_name["repair"]["files"] == ["vllm/new.py", "vllm/other.py"]
    assert by_name["repair"]["not_applied"] == {"docs/a.md": "in no wheel"}
    assert by_name["kernels"]["status"] == "left out"
    assert "patch kernels left out: an input of the build" in said


def test_checkout_may_lie_where_upstream_built(house: House) -> None:
    """Nothing in it was compiled here, so a path in it is no trace of this machine."""
    there = SPINLOOP + f"\0{house.root}/csrc/x.cpp\0".encode()
    house.release(**{"vllm/fs_io_C.abi3.so": there})
    house.build()
    with zipfile.ZipFile(house.wheel) as archive:
        assert archive.read("vllm/fs_io_C.abi3.so") == there


def test_record_lists_every_member_as_it_is(house: House) -> None:
    house.patch("repair", {"vllm/other.py": "x = 2\n"})
    house.build()
    with zipfile.ZipFile(house.wheel) as archive:
        (own,) = (n for n in archive.namelist() if n.endswith("/RECORD"))
        assert archive.namelist()[-1] == own
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(own).decode()))}
        assert rows.keys() == set(archive.namelist())
        assert rows.pop(own) == ["", ""]
        for name, (digest, size) in rows.items():
            data = archive.read(name)
            assert (digest, int(size)) == (record_digest(data), len(data)), name


def test_version_tag_and_metadata_say_what_it_is(house: House) -> None:
    house.requirements = "torch==2.11.0\nscipy\n"
    house.patch("requirements", {"requirements/cuda.txt": house.requirements})
    house.repin()
    house.build()
    _, version, _, tags = parse_wheel_filename(house.wheel.name)
    assert str(version).startswith("1.2.3+sm121.overlay.")
    assert tags == {Tag("cp311", "abi3", "manylinux_2_28_aarch64")}
    info = f"vllm-{version}.dist-info"
    assert "Tag: cp311-abi3-manylinux_2_28_aarch64\n" in house.read(f"{info}/WHEEL")
    assert f"'{version}'" in house.read("vllm/_version.py")
    metadata = house.read(f"{info}/METADATA")
    assert f"\nVersion: {version}\n" in metadata
    assert "Requires-Dist: torch==2.11.0\nRequires-Dist: scipy\n" in metadata
    note = json.loads(house.read(f"{info}/sm121-overlay.json"))
    assert note["original"]["filename"] == FILENAME
    assert "METADATA: nothing is now scipy" in note["changes"]


def test_what_the_gpu_lacks_is_said_and_recorded(house: House) -> None:
    said = house.build()
    manifest = house.manifest
    jsonschema.validate(manifest, json.loads(SCHEMA_FILE.read_text()))
    rows = {row["component"]: row for row in manifest["components"]["gpu"]}
    assert (rows["_vllm_fa2_C"]["verdict"], rows["_vllm_fa2_C"]["ptx"]) == ("ptx", 1)
    assert (rows["_vllm_fa3_C"]["verdict"], rows["_vllm_fa3_C"]["none"]) == ("none", 2)
    assert "FA3 is for sm_90" in rows["_vllm_fa3_C"]["why"]
    (check,) = (c for c in manifest["checks"] if c["name"] == "gpu code")
    assert check["verdict"] == "allowed"
    lacks = "no code that it can use (_vllm_fa3_C 2 of 2); only PTX for the driver's JIT (_vllm_fa2_C 1 of 1)"
    assert lacks in check["detail"]
    assert lacks in " ".join(manifest["notices"])
    assert f"check gpu code: allowed: objects without native code for sm_121: {lacks}" in said
    assert "every binary fits" not in said
    (report,) = (house.root / "build/reports").glob("*overlay.html")
    assert "_vllm_fa3_C 2 of 2" in report.read_text()


def test_everything_in_it_is_listed(house: House) -> None:
    house.build()
    contents = house.manifest["components"]["contents"]
    assert contents["_vllm_fa3_C"] == {
        "files": 1, "bytes": len(BINARIES["vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"]),
    }  # fmt: skip
    assert contents["vllm/third_party/other"]["files"] == 1
    assert contents["Python tree"]["files"] == 3
    with zipfile.ZipFile(next((house.root.parent / "release").glob("*.whl"))) as archive:
        assert sum(c["files"] for c in contents.values()) == len(archive.namelist())
    (wheel,) = house.manifest["wheels"]
    assert (wheel["origin"], wheel["original"]["filename"]) == ("overlay", FILENAME)
    assert not house.manifest["partial"]


def test_twice_the_same_file(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.patch("repair", {"vllm/other.py": "x = 2\n"})
    house.build()
    first, manifest = house.wheel.read_bytes(), house.manifest
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    monkeypatch.setenv("SM121_BUILD", str(house.root.parent / "elsewhere"))
    shutil.copytree(house.root / "build/cache", house.root.parent / "elsewhere/cache")
    assert main(["source"]) == 0
    house.build()
    assert house.wheel.read_bytes() == first
    assert house.manifest == manifest


def test_no_compiler_is_needed(house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # fmt: skip
    """Nothing but git is on PATH."""
    git = shutil.which("git")
    assert git is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").symlink_to(git)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    house.patch("repair", {"vllm/other.py": "x = 2\n"})
    house.build()
    assert house.read("vllm/other.py") == "x = 2\n"


def test_second_run_does_nothing_and_still_says_what_is_not_needed(house: House) -> None:
    house.build()
    said = house.build()
    assert " skip  overlay     up to date" in said
    assert " skip  compile     not needed" in said
    assert "Nothing to do" in said


def test_wheel_of_another_commit_is_refused(house: House) -> None:
    house.release(**{"vllm/other.py": "x = 7\n", "vllm/__init__.py": None})
    said = house.build(code=1)
    assert "is not what its source" in said
    assert "vllm/other.py" in said
    assert "vllm/__init__.py (missing)" in said
    assert not list((house.root / "wheelhouse").glob("*.whl"))


def test_half_a_patch_stops_and_a_reason_lets_it_pass(house: House) -> None:
    house.patch("both", {"vllm/other.py": "x = 2\n", "csrc/spinloop.cpp": "int spin();\n"})
    said = house.build(code=1)
    assert "both: vllm/other.py without csrc/spinloop.cpp" in said
    house.pins["overlay"]["python-alone"] = {"both": "the Python needs no kernel"}
    house.repin()
    said = house.build()
    assert "patch both applied in part: the Python needs no kernel" in said
    assert house.manifest["patches"][0]["status"] == "applied in part"
    assert house.read("vllm/other.py") == "x = 2\n"


def test_a_patch_can_be_left_out_whole(house: House) -> None:
    house.patch("both", {"vllm/other.py": "x = 2\n", "csrc/spinloop.cpp": "int spin();\n"})
    house.patch("after", {"vllm/__init__.py": "".join(f"line_{n} = 0\n" for n in range(5))})
    house.pins["overlay"]["left-out"] = {"both": "needs the kernel"}
    house.repin()
    house.build()
    assert house.read("vllm/other.py") == "x = 1\n"
    assert house.read("vllm/__init__.py").startswith("line_0 = 0\n")
    by_name = {p["name"]: p for p in house.manifest["patches"]}
    assert (by_name["both"]["status"], by_name["both"]["reason"]) == (
        "left out",
        "needs the kernel",
    )
    assert by_name["after"]["status"] == "applied"


def test_a_file_that_a_patch_removes_is_gone(house: House) -> None:
    house.patch("remove", {"vllm/other.py": None})
    house.build()
    with zipfile.ZipFile(house.wheel) as archive:
        assert "vllm/other.py" not in archive.namelist()


def test_newer_glibc_than_the_tag_promises(house: House) -> None:
    newer = elf(needed=["libc.so.6"], needs={"libc.so.6": ["GLIBC_2.34"]})
    house.release(**{"vllm/fs_io_C.abi3.so": newer})
    house.build()
    assert house.wheel.name.endswith("-cp311-abi3-linux_aarch64.whl")


def test_a_component_that_the_profile_lists_and_the_release_lacks(house: House) -> None:
    house.release(**{"vllm/fs_io_C.abi3.so": None})
    assert "component fs_io_C is missing" in house.build(code=1)


def test_other_verbs(house: House) -> None:
    assert main(["compile", "--profile", "overlay", "--offline"]) == 0
    assert "done  overlay" in house.capsys.readouterr().err
    assert main(["shell", "--profile", "overlay"]) == 2
    assert "compiles nothing" in house.capsys.readouterr().err
    assert "has no wheel for linux-x86_64" in house.build("--target", "linux-x86_64", code=2)
