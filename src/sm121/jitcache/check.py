"""Is a compiled module what FlashInfer will load on the target, and use on its GPU?"""

from __future__ import annotations

from collections.abc import Sequence

from sm121.abi.facts import Binary
from sm121.abi.gpu import Arch, verdict
from sm121.abi.scan import scan_elf
from sm121.abi.source import BytesSource
from sm121.compile.traces import path_faults
from sm121.pins.model import JitModule

# How tvm-ffi names the symbol of a function that a module exports (tvm/ffi/function.h,
# TVM_FFI_SYMBOL_PREFIX, 0.1.9).
SYMBOL_PREFIX = "__tvm_ffi_"


def check_library(
    data: bytes, name: str, module: JitModule, *, machine: str, arch: Arch,
    forbidden: Sequence[str],
) -> tuple[Binary, list[str]]:  # fmt: skip
    """The facts of a module's library, and its faults, each a sentence.

    machine: 'aarch64'. forbidden: build paths that it may not hold. The wheel says that it is of
    no particular Python, so it may not use CPython's interface.
    """
    binary = scan_elf(BytesSource(data), f"{name}.so")
    elf = binary.elf
    if elf is None or binary.damage:
        return binary, [f"{name}: not a whole ELF file ({binary.damage})"]
    faults = []
    if elf.machine != machine:
        faults.append(f"{name}: code for {elf.machine}, wanted {machine}")
    if paths := [path for path in (elf.rpath, elf.runpath) if path is not None]:
        faults.append(f"{name}: has RPATH or RUNPATH {':'.join(paths)!r}")
    exported = elf.exports.plain | elf.exports.base
    if lacking := [f for f in module.functions if f"{SYMBOL_PREFIX}{f}" not in exported]:
        faults.append(f"{name}: FlashInfer calls {', '.join(lacking)}, which it does not export")
    python = sorted(i.name for i in elf.imports if i.name.startswith(("Py", "_Py")))
    if python:
        faults.append(f"{name}: uses CPython's {python[0]}, so it is not for every Python")
    if not binary.containers:
        faults.append(f"{name}: holds no GPU code")
    wrong = [c for c in binary.containers if verdict(c, arch.number) != "sass"]
    if wrong:
        found = ", ".join(sorted({str(code) for one in wrong for code in one.codes})) or "nothing"
        faults.append(
            f"{name}: {len(wrong)} of {len(binary.containers)} objects have no native code for "
            f"{arch.sm}{arch.suffix}; they hold {found}"
        )
    faults += path_faults(name, data, forbidden)
    return binary, faults


def codes_of(binary: Binary) -> dict[str, int]:
    """Number of objects by what GPU code they hold: {'sm_121a': 5}."""
    counts: dict[str, int] = {}
    for container in binary.containers:
        for code in container.codes:
            counts[str(code)] = counts.get(str(code), 0) + 1
    return dict(sorted(counts.items()))
