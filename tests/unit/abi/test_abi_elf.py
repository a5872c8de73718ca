"""ELF reading: what the loader sees, and refusal of what it would refuse."""

import pytest
from make import Sym, elf

from sm121.abi.elf import Import, read_elf
from sm121.abi.source import BytesSource, Malformed


def read(data: bytes):
    return read_elf(BytesSource(data))


@pytest.mark.parametrize("gnu_hash", [True, False])
def test_dynamic_section(gnu_hash):
    found = read(
        elf(
            [Sym(name="asked"), Sym(name="given", defined=True)], soname="libx.so.1",
            needed=["liby.so", "libc.so.6"], rpath="$ORIGIN/lib", build_id=b"\x01\x02",
            gnu_hash=gnu_hash,
        )
    )  # fmt: skip
    assert (found.machine, found.bits, found.kind, found.dynamic) == ("aarch64", 64, "dyn", True)
    assert found.soname == "libx.so.1"
    assert found.needed == ("liby.so", "libc.so.6")
    assert (found.rpath, found.runpath) == ("$ORIGIN/lib", None)
    assert found.build_id == "0102"
    assert found.imports == (Import(name="asked", version="", library="", weak=False),)
    assert found.exports.plain == {"given"}
    assert not found.exports.versioned


def test_a_symbol_without_relocation_is_never_looked_up():
    found = read(elf([Sym(name="never", relocated=False), Sym(name="used")]))
    assert [i.name for i in found.imports] == ["used"]


def test_weak_is_kept_apart():
    assert [i.weak for i in read(elf([Sym(name="a", weak=True), Sym(name="b")])).imports] == [
        True,
        False,
    ]


def test_versions_of_both_sides():
    found = read(
        elf(
            [
                Sym(name="memcpy", version="GLIBC_2.17", library="libc.so.6"),
                Sym(name="new", defined=True, version="V2"),
                Sym(name="old", defined=True, version="@V1"),
                Sym(name="none", defined=True),
            ],
            needs={"libm.so.6": ["GLIBC_2.29"]},
        )
    )
    assert found.imports[0] == Import(
        name="memcpy", version="GLIBC_2.17", library="libc.so.6", weak=False
    )
    assert dict(found.needs_versions) == {
        "libc.so.6": ("GLIBC_2.17",),
        "libm.so.6": ("GLIBC_2.29",),
    }
    assert set(found.defines_versions) == {"V1", "V2"}
    assert found.exports.exact == {"new@V2", "old@V1"}
    assert found.exports.base == {"none"}
    # 'old' is hidden and not of the first version: an unversioned reference does not get it.
    assert found.exports.plain == {"new", "none"}


def test_cut_in_half_is_damage():
    data = elf([Sym(name="x", defined=True)], fatbin=b"\0" * 4096)
    with pytest.raises(Malformed, match="cut off"):
        read(data[: len(data) // 2])


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"MZ" + bytes(100), b"\x7fELF\x09\x01" + bytes(60)]
)
def test_not_elf(data):
    with pytest.raises(Malformed):
        read(data)


def test_other_machines_are_named_not_parsed():
    data = bytearray(elf())
    data[18:20] = (190).to_bytes(2, "little")
    assert read(bytes(data)).machine == "cuda"
    data[4] = 1
    data[18:20] = (3).to_bytes(2, "little")
    assert (read(bytes(data)).machine, read(bytes(data)).bits) == ("i386", 32)


def test_a_version_table_that_loops_ends():
    data = elf([Sym(name="a", version="V", library="libv.so")])
    at = data.index(b"\x01\x00\x01\x00", 200)  # the Verneed record: version 1, one entry
    broken = bytearray(data)
    broken[at + 2 : at + 4] = b"\xff\xff"  # 65,535 entries …
    broken[at + 16 + 12 : at + 32] = (0).to_bytes(
        4, "little"
    )  # … of which the first ends the chain
    assert read(bytes(broken)).needed == ()
