"""Paths of the build in a library: whole ones only, wherever the checkout lies."""

from __future__ import annotations

import pytest

from sm121.compile.traces import path_faults


@pytest.mark.parametrize(
    "data",
    [
        b"/src",
        b"/src/x.cpp",
        b"\0/src\0",
        b"\0/src/build/x.cpp:7\0",
        b'"/src"',
        b"'/src'",
        b"see /src, please",
        b"PATH=/src:/bin",
        b"/bin:/src:/lib",
        b"-ffile-prefix-map=/src=vllm",
        b"gcc -I/src/include",
        b"\0-L/src\0",
        b"-I/src",
        b"-I /src",
        b"(/src)",
        b"\n/src\n",
        b"\xff/src\xff",
        b"/src2/x.h\0vllm/src/x.h\0/src/x.h",
    ],
)
def test_a_path_is_found(data: bytes) -> None:
    assert path_faults("x.so", data, ["/home/me", "/src"]) == ["x.so: holds the build path /src"]


@pytest.mark.parametrize(
    "data",
    [
        b"vllm-flash-attn/csrc/flash_attn/src/flash.h",
        b"/opt/src/x.h",
        b"./src/x.h",
        b"../src/x.h",
        b"//src/x.h",
        b"build/x-I/src/x.h",
        b"lib.a/src/x.h",
        b"c++/src/x.h",
        b"x@/src/x.h",
        b"x-/src/x.h",
        b"/src2/x.h",
        b"/src-old/x.h",
        b"/src.git",
        b"/src+x",
        b"/src_x",
        b"/sr",
        b"",
    ],
)
def test_the_same_letters_inside_another_path_are_none(data: bytes) -> None:
    assert path_faults("x.so", data, ["/src"]) == []


@pytest.mark.parametrize(
    "data",
    [
        b"-isystem/home/me/sm121/build/x",
        b"file:///home/me/sm121/x.h",
        b"called `unwrap()`src/lib.rs/home/me/sm121/x.rs",
        b"/mnt/home/me/sm121",
    ],
)
def test_a_long_path_is_found_wherever_it_stands(data: bytes) -> None:
    assert len(path_faults("x.so", data, ["/home/me/sm121"])) == 1
    assert path_faults("x.so", data.replace(b"/sm121", b"/sm121-old"), ["/home/me/sm121"]) == []
    assert path_faults("x.so", data, ["/me/sm121"]) == []


def test_each_path_is_named_once_and_taken_literally() -> None:
    data = b"/a+b/build/x\0/a+b/build/y\0/aab/z\0"
    assert path_faults("x.so", data, ["/a+b/build", "/a+b", "/a.b"]) == [
        "x.so: holds the build path /a+b/build",
        "x.so: holds the build path /a+b",
    ]
