"""Wheels as archives: what is refused, and what is read."""

import struct
import zipfile
import zlib
from pathlib import Path

import pytest
from make import elf, write_wheel

from sm121.abi.archive import Archive
from sm121.abi.scan import FactsCache, scan_wheel, scan_wheels
from sm121.abi.source import Malformed
from sm121.files import HashMemory

NAME = "x-1-cp312-cp312-manylinux_2_28_aarch64.whl"


def zipped(path: Path, *members: tuple[str, bytes], method=zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            archive.writestr(info, data)
    return path


def refused(path: Path) -> str:
    with pytest.raises(Malformed) as caught:
        read_all(path)
    return str(caught.value)


def read_all(path: Path, seen: list[int] | None = None) -> None:
    """Inflate every member; `seen` collects the sizes of what came out."""
    archive = Archive(path)
    try:
        for member in archive.members:
            for chunk in archive.chunks(member):
                if seen is not None:
                    seen.append(len(chunk))
    finally:
        archive.close()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_content_and_head(tmp_path, method):
    data = b"\x7fELF" + bytes(range(256)) * 5000
    archive = Archive(zipped(tmp_path / NAME, ("a/b.so", data), ("t", b"hi"), method=method))
    assert archive.head(archive.members[0]) == b"\x7fELF"
    assert b"".join(archive.chunks(archive.members[0])) == data
    assert archive.text(archive.members[1]) == "hi"
    with archive.open(archive.members[0], tmp_path) as source:
        assert source.size == len(data)
        assert source.read(4, 3) == b"\0\1\2"
        with pytest.raises(Malformed):
            source.read(len(data) - 1, 2)
    archive.close()
    assert [p.name for p in tmp_path.iterdir()] == [NAME], "the spool file must have no name"


@pytest.mark.parametrize(
    "name",
    ["../evil", "a/../../evil", "/etc/passwd", "a\\..\\evil", "C:evil", "a/\x01b", "..", "../dir/"],
)
def test_names_that_leave(tmp_path, name):
    assert "outside" in refused(zipped(tmp_path / NAME, (name, b"x")))


def test_one_name_twice(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        path = zipped(tmp_path / NAME, ("a", b"1"), ("a", b"2"))
    assert "two members" in refused(path)


def test_other_methods(tmp_path):
    assert "compression method" in refused(
        zipped(tmp_path / NAME, ("a", b"1" * 99), method=zipfile.ZIP_LZMA)
    )


def edited(path: Path, *edits: tuple[int, bytes]) -> Path:
    data = bytearray(path.read_bytes())
    central = data.rindex(b"PK\1\2")
    for offset, new in edits:
        data[central + offset : central + offset + len(new)] = new
    path.write_bytes(data)
    return path


def test_oversized_claims(tmp_path):
    big = struct.pack("<I", 0xF0000000)
    assert "more bytes than its data can hold" in refused(
        edited(zipped(tmp_path / NAME, ("a", b"x" * 500)), (24, big))
    )


def test_larger_than_it_says(tmp_path):
    assert "larger than it says" in refused(
        edited(zipped(tmp_path / NAME, ("a", b"x" * 5000)), (24, struct.pack("<I", 100)))
    )


def test_a_bomb_is_not_inflated(tmp_path):
    """200 MB of zeros in 200 kB, behind a directory that says 1 kB: stopped at once."""
    path = zipped(tmp_path / NAME, ("a", bytes(200_000_000)))
    assert path.stat().st_size < 300_000
    edited(path, (24, struct.pack("<I", 1000)))
    seen: list[int] = []
    with pytest.raises(Malformed, match="larger"):
        read_all(path, seen)
    assert sum(seen) <= 1000


def test_crc(tmp_path):
    assert "damaged" in refused(
        edited(zipped(tmp_path / NAME, ("a", b"x" * 50)), (16, b"\1\2\3\4"))
    )


def test_encrypted(tmp_path):
    assert "encrypted" in refused(edited(zipped(tmp_path / NAME, ("a", b"x" * 50)), (8, b"\1\0")))


def test_other_name_in_the_local_header(tmp_path):
    path = zipped(tmp_path / NAME, ("abc", b"x"))
    data = path.read_bytes().replace(b"abc", b"xyz", 1)
    path.write_bytes(data)
    assert "another name" in refused(path)


def test_damaged_stream(tmp_path):
    path = zipped(tmp_path / NAME, ("a", zlib.compress(bytes(range(256)) * 99)))
    data = bytearray(path.read_bytes())
    data[60:90] = b"\xff" * 30
    path.write_bytes(data)
    assert "damaged" in refused(path)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.95])
def test_cut_off(tmp_path, part):
    path = zipped(tmp_path / NAME, ("a", bytes(range(256)) * 99), ("b", b"x" * 99))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    assert "zip archive" in refused(path)


def test_a_huge_directory_is_not_read(tmp_path):
    path = zipped(tmp_path / NAME, ("a", b"x"))
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\5\6")
    data[end + 12 : end + 16] = struct.pack("<I", 0x7FFFFFFF)
    path.write_bytes(data)
    assert "directory claims" in refused(path)


def test_damage_is_a_fact_not_an_exception(tmp_path):
    path = zipped(tmp_path / NAME, ("../evil", b"x"))
    assert "outside" in scan_wheel(path, "0" * 64, spool=tmp_path).damage
    (tmp_path / "y-1-py3-none-any.whl").write_bytes(b"no zip")
    assert scan_wheel(tmp_path / "y-1-py3-none-any.whl", "0" * 64, spool=tmp_path).damage


def test_scan_finds_elf_by_magic_and_maps_data_folders(tmp_path):
    path = write_wheel(tmp_path, NAME, {
        "x/lib.bin": elf(soname="a"), "x/fake.so": b"not elf" * 20,
        "x-1.data/platlib/x/plat.so": elf(soname="b"), "x-1.data/scripts/run": elf(soname="c"),
    }, metadata="Requires-Dist: torch==2.11.0\nRequires-Python: >=3.11")  # fmt: skip
    found = scan_wheel(path, "0" * 64, spool=tmp_path)
    assert found.damage == ""
    assert [b.path for b in found.binaries] == ["x/lib.bin", "x/plat.so", "x-1.data/scripts/run"]
    assert found.texts["Requires-Dist"] == "torch==2.11.0"
    assert found.files["x/lib.bin"].startswith("sha256=")
    assert found.files["x/plat.so"].startswith("sha256=")


def test_facts_are_cached_by_content(tmp_path, monkeypatch):
    path = write_wheel(tmp_path, NAME, {"x/a.so": elf(soname="liba.so")})
    cache, memory = FactsCache(tmp_path / "cache"), HashMemory(tmp_path / "h.json")
    first = scan_wheels([path], cache=cache, memory=memory)
    monkeypatch.setattr("sm121.abi.scan.scan_wheel", lambda *_a, **_k: pytest.fail("read again"))
    assert scan_wheels([path], cache=cache, memory=memory) == first
    monkeypatch.undo()
    entry = next(cache.folder.iterdir())
    entry.write_bytes(b"damaged")
    assert scan_wheels([path], cache=cache, memory=memory) == first, "a damaged entry is made anew"
