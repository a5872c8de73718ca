"""Readable names of C++ symbols, by libstdc++'s own __cxa_demangle.

Loaded through ctypes: torch needs libstdc++ anyway, and neither a Python demangler that is
complete nor binutils on a node can be counted on. Only names of faults come here.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache

# Deeper or longer names than this are an attack or useless to a reader; the longest of
# torch 2.11 has 4,300 characters.
_MAX = 8192


@cache
def _library() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    try:
        libstdcpp = ctypes.CDLL("libstdc++.so.6")
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    libstdcpp.__cxa_demangle.restype = ctypes.c_void_p
    libstdcpp.__cxa_demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p,
                                         ctypes.c_void_p]  # fmt: skip
    libc.free.argtypes = [ctypes.c_void_p]
    return libstdcpp, libc


@cache
def demangle(name: str) -> str:
    """The C++ name, or the name itself where it is none or cannot be told."""
    if not name.startswith("_Z") or len(name) > _MAX or (libraries := _library()) is None:
        return name
    libstdcpp, libc = libraries
    pointer = libstdcpp.__cxa_demangle(name.encode("utf-8", "replace"), None, None, None)
    if not pointer:
        return name
    try:
        return ctypes.string_at(pointer).decode("utf-8", "replace")
    finally:
        libc.free(pointer)
