"""What this machine is and which compilers it has for a target."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.errors import CompilerMissing

# vLLM's CMakeLists.txt: GCC 11.3 for C++20; nvcc 13.0's crt/host_config.h: not above 15.
_GCC_MIN = (11, 3)
_GCC_MAX = (15, 99)
# They name the target's C and C++ compiler, in this order.
_VARIABLES = ("SM121_CC", "SM121_CXX")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilers:
    """C and C++ compiler for a target, the version of the C++ one, and the target's C library
    that it compiles against ('glibc 2.36')."""

    cc: Path
    cxx: Path
    version: str
    libc: str


def host_machine() -> str:
    """'x86_64' or 'aarch64'."""
    return platform.machine()


def install_hint(package_deb: str, package_rpm: str) -> str:
    """The install command for this distribution, as text."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("apt-get"):
        return f"{sudo}apt-get install -y {package_deb}"
    if shutil.which("dnf"):
        return f"{sudo}dnf install -y {package_rpm}"
    return f"install {package_deb} (Debian's name) with your package manager"


def require_programs(programs: Mapping[str, str]) -> None:
    """Raise CompilerMissing for the first program (name = what for) that is not on PATH.

    A program's name is taken for its package's.
    """
    for name, purpose in programs.items():
        if shutil.which(name) is None:
            raise CompilerMissing(
                f"{name} was not found.", cause=purpose, remedy=install_hint(name, name)
            )


def find_compilers(machine: str) -> Compilers:
    """Compilers for code of the target's `machine`; SM121_CC and SM121_CXX override.

    Raises CompilerMissing when there are none, they make code for another machine, or the version
    is one that vLLM or nvcc refuses.
    """
    named = _named_compilers()
    wrong = {
        f"{variable}={name}": made
        for variable, name in named.items()
        if shutil.which(name) and (made := _makes_code_for(name)) != machine
    }
    if wrong:
        raise CompilerMissing(
            f"No compiler for {machine}: "
            + ", ".join(f"{what} makes code for {made}" for what, made in wrong.items())
            + ".",
            cause=f"the target is {machine}, and -dumpmachine of what is named says otherwise",
            remedy=f"Set {' and '.join(_VARIABLES)} to compilers for {machine}, or unset them: then "
            f"{' and '.join(_usual_names(machine))} are used.",
        )
    return _compilers(machine, named, or_named=f"set {' and '.join(_VARIABLES)}")


def host_compilers() -> Compilers:
    """Compilers for code that runs here. SM121_CC and SM121_CXX name the target's, so on crossing
    they don't count. Raises CompilerMissing as find_compilers."""
    machine = host_machine()
    fitting = {v: n for v, n in _named_compilers().items() if _makes_code_for(n) == machine}
    return _compilers(machine, fitting)


def _named_compilers() -> dict[str, str]:
    return {variable: name for variable in _VARIABLES if (name := os.environ.get(variable))}


def _usual_names(machine: str) -> tuple[str, str]:
    prefix = "" if machine == host_machine() else f"{machine}-linux-gnu-"
    return f"{prefix}gcc", f"{prefix}g++"


def _makes_code_for(compiler: str) -> str:
    """Machine of a compiler's target. The rest of the triple differs: GCC of Debian says
    x86_64-linux-gnu, of Fedora x86_64-redhat-linux, Clang x86_64-pc-linux-gnu."""
    path = shutil.which(compiler)
    said = proc.run([path, "-dumpmachine"], check=False).output if path else ""
    triple = re.search(r"^(\w+)-\S+$", said, re.MULTILINE)
    return triple[1] if triple else "no machine that it names"


def _compilers(machine: str, named: Mapping[str, str], *, or_named: str = "") -> Compilers:
    native = machine == host_machine()
    names = [
        named.get(variable, usual)
        for variable, usual in zip(_VARIABLES, _usual_names(machine), strict=True)
    ]
    paths = [shutil.which(name) for name in names]
    for name, path in zip(names, paths, strict=True):
        if path is None:
            raise CompilerMissing(
                f"No compiler for {machine}: {name} was not found.",
                cause="not on PATH"
                if native
                else f"this is a {host_machine()} machine, so "
                f"{machine} code needs a cross compiler",
                remedy=install_hint(
                    "g++" if native else f"g++-{machine.replace('_', '-')}-linux-gnu",
                    "gcc-c++" if native else f"gcc-c++-{machine}-linux-gnu",
                )
                + (f", or {or_named}." if or_named else "."),
            )
    version = proc.run([paths[1] or "", "-dumpfullversion"]).output.strip()
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not _GCC_MIN <= numbers <= _GCC_MAX:
        raise CompilerMissing(
            f"{names[1]} is version {version}.",
            cause="vLLM needs GCC 11.3 or newer, and nvcc 13.0 refuses GCC above 15",
            remedy="Install another version" + (f" and {or_named} to it." if or_named else "."),
        )
    return Compilers(
        cc=Path(paths[0] or ""),
        cxx=Path(paths[1] or ""),
        version=version,
        libc=_libc(paths[0] or ""),
    )


def _libc(cc: str) -> str:
    """Which C library's headers a compiler uses (features.h, __GLIBC__ and __GLIBC_MINOR__)."""
    macros = proc.run(
        [cc, "-E", "-dM", "-include", "features.h", "-x", "c", "/dev/null"], check=False
    ).output
    found = dict(re.findall(r"#define (__GLIBC__|__GLIBC_MINOR__) (\d+)", macros))
    if len(found) < 2:
        raise CompilerMissing(
            f"{cc} finds no C library headers of its target.",
            cause=macros.strip()[-200:],
            remedy="Install the whole compiler package, with the target's libc6-dev.",
        )
    return f"glibc {found['__GLIBC__']}.{found['__GLIBC_MINOR__']}"
