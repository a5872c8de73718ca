"""The wheel: what FlashInfer and installers read of it, and that it is one file."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

from sm121.jitcache.wheel import NOTE, unpack_package, wheel_name, write_wheel
from sm121.repair.wheel import member_entries, read_wheel

VERSION = "0.6.17+sm121.abcdef12"
LIBRARIES = {"sampling/sampling.so": b"\x7fELF sampling", "attention/attention.so": b"\x7fELF"}


def write(folder: Path, libraries=LIBRARIES, machine: str = "aarch64") -> Path:
    output = folder / wheel_name(VERSION, machine)
    write_wheel(
        output, libraries, version=VERSION, machine=machine, arch="12.1a",
        requires=["flashinfer-python==0.6.17", "apache-tvm-ffi==0.1.9"],
        license_expression="Apache-2.0", licenses={"LICENSE": b"free\n"}, note={"modules": {"sampling": {}}}, epoch=1_700_000_000,
    )  # fmt: skip
    return output


def test_an_installer_can_read_it(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert path.name == f"flashinfer_jit_cache-{VERSION}-py3-none-linux_aarch64.whl"
    wheel = read_wheel(path)
    assert (wheel.distribution, wheel.version) == ("flashinfer-jit-cache", VERSION)
    assert [str(r) for r in wheel.requirements()] == [
        "flashinfer-python==0.6.17", "apache-tvm-ffi==0.1.9",
    ]  # fmt: skip
    assert "License-Expression: Apache-2.0\nLicense-File: LICENSE\n" in wheel.metadata
    assert "Tag: py3-none-linux_aarch64" in wheel.tags
    assert "Root-Is-Purelib: false" in wheel.tags
    # Every file is in RECORD, with the digest that it has.
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        note = json.loads(archive.read(f"{wheel.dist_info}/{NOTE}"))
        assert archive.read(f"{wheel.dist_info}/licenses/LICENSE") == b"free\n"
    assert set(wheel.record) == names - {f"{wheel.dist_info}/RECORD"}
    assert member_entries(wheel, wheel.record) == dict(wheel.record)
    assert note == {"modules": {"sampling": {}}}


def test_the_package_says_where_modules_are(tmp_path: Path, monkeypatch) -> None:
    folder = unpack_package(write(tmp_path), tmp_path / "site")
    assert {p.name for p in folder.iterdir()} == {"flashinfer_jit_cache"}
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "flashinfer_jit_cache", raising=False)
    import flashinfer_jit_cache as package

    assert package.__version__ == VERSION
    where = Path(package.get_jit_cache_dir())
    assert where.is_absolute()
    assert (where / "sampling/sampling.so").read_bytes() == LIBRARIES["sampling/sampling.so"]
    monkeypatch.delitem(sys.modules, "flashinfer_jit_cache")


def test_the_same_content_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = write(tmp_path / "a")
    second = write(tmp_path / "b", dict(reversed(LIBRARIES.items())))
    assert first.read_bytes() == second.read_bytes()
    other = write(tmp_path / "b", LIBRARIES | {"sampling/sampling.so": b"\x7fELF other"})
    assert first.read_bytes() != other.read_bytes()
