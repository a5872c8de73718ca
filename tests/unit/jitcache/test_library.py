"""A compiled module that is not what it should be is named, for each reason."""

from __future__ import annotations

import pytest
from make import Sym, elf, fatbin

from sm121.abi.gpu import Arch
from sm121.jitcache.check import check_library, codes_of
from sm121.pins.model import JitModule
from support.jitcache import module

MODULE = JitModule.model_validate(module("attention", "decode"))
NATIVE = fatbin(["sm_121a"], ["sm_121a"])
EXPORT = Sym(name="__tvm_ffi_decode", defined=True)
NEEDED = ["libcudart.so.13", "libc.so.6"]


def library(*symbols: Sym, **how) -> bytes:
    return elf(symbols or (EXPORT,), **{"fatbin": NATIVE, "needed": NEEDED} | how)


def faults(data: bytes) -> list[str]:
    return check_library(
        data, "attention", MODULE, machine="aarch64", arch=Arch.parse("12.1a"), forbidden=["/home/me"]
    )[1]  # fmt: skip


def test_a_good_one_passes_and_says_what_it_holds() -> None:
    binary, found = check_library(
        library(), "attention", MODULE, machine="aarch64", arch=Arch.parse("12.1a"), forbidden=[]
    )
    assert found == []
    assert codes_of(binary) == {"sm_121a": 2}
    assert binary.elf is not None
    assert list(binary.elf.needed) == NEEDED


def test_a_folder_of_the_checkouts_name_is_no_fault() -> None:
    assert faults(library(needed=["data/home/me/libx.so"])) == []


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (library(machine="x86_64"), "code for x86_64, wanted aarch64"),
        (library(runpath="/opt/cuda"), "has RPATH or RUNPATH '/opt/cuda'"),
        (library(rpath=""), "has RPATH or RUNPATH ''"),
        (
            library(Sym(name="decode", defined=True)),
            "FlashInfer calls decode, which it does not export",
        ),
        (library(Sym(name="__tvm_ffi_decode")), "FlashInfer calls decode"),
        (library(EXPORT, Sym(name="PyObject_Call")), "uses CPython's PyObject_Call"),
        (library(fatbin=b""), "holds no GPU code"),
        (library(fatbin=fatbin(["sm_121a"], ["sm_120a"])), "1 of 2 objects have no native code"),
        (library(fatbin=fatbin(["compute_121a"])), "they hold compute_121a"),
        (library(needed=["/home/me/libx.so"]), "holds the build path /home/me"),
        (library()[:200], "not a whole ELF file"),
    ],
)
def test_each_fault_is_found(data: bytes, fault: str) -> None:
    (found,) = faults(data)
    assert found.startswith("attention: ")
    assert fault in found
