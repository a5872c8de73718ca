"""GPU architectures: how they are named, and which code runs on which.

Rules from the CUDA C++ Programming Guide, "Compute Capabilities" (binary compatibility,
architecture- and family-specific features) and the NVCC manual, "GPU Feature List":

* SASS `sm_XY` runs on the same major version with an equal or higher minor one;
* PTX `compute_XY` is compiled by the driver for every GPU at or above it;
* with `a` (architecture-specific) either runs on exactly that architecture;
* with `f` (family-specific) either runs on its family from that architecture on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sm121.abi.fatbin import Code, Container
from sm121.errors import UsageFault

# Families whose members share an `f` target (NVCC manual, "Family-specific Architecture").
# Within one the rule is 'same family, equal or higher'. 101 was renamed 110 in CUDA 13.
_FAMILIES = ({100, 103}, {101, 110}, {120, 121})
_TEXT = re.compile(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)")

Verdict = Literal["sass", "ptx", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arch:
    """The GPU that code is wanted for. number: 121; suffix: what it is compiled as."""

    number: int
    suffix: str

    @classmethod
    def parse(cls, text: str) -> Arch:
        """From '12.1a', '12.1', 'sm_121a' … Raises UsageFault."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise UsageFault(
                f"{text!r} is not a GPU architecture.", remedy="Write it as 12.1a (GB10's)."
            )
        return cls(number=int(match[1]) * 10 + int(match[2]), suffix=match[3])

    def __str__(self) -> str:
        return f"{self.number // 10}.{self.number % 10}{self.suffix}"

    @property
    def sm(self) -> str:
        return f"sm_{self.number}"


def check_arch(arch: Arch, accepted: Iterable[str]) -> None:
    """Refuse a target that this stack cannot be built for. Raises UsageFault with the reason."""
    known = tuple(accepted)
    if str(arch) in known:
        return
    need_a = any(str(arch) + suffix in known for suffix in "af")
    raise UsageFault(
        f"GPU architecture {arch} is not one that this stack can be built for.",
        cause=(
            f"plain {arch} lacks the FP4 conversions that it uses (ptxas: 'cvt … .e2m1x2 not "
            f"supported on .target {arch.sm}'): they exist only in the architecture-specific "
            f"(a) or family-specific (f) target"
            if need_a
            else f"accepted: {', '.join(known)}"
        ),
        remedy=f"Use {' or '.join(known)}.",
    )


def same_family(one: int, other: int) -> bool:
    return any(one in family and other in family for family in _FAMILIES)


def runs(code: Code, gpu: int) -> bool:
    """Does this code run on that GPU (121 for sm_121), by itself or after the driver's JIT?"""
    if code.suffix == "a":
        return code.arch == gpu
    if code.suffix == "f":
        return code.arch == gpu or (same_family(code.arch, gpu) and code.arch <= gpu)
    if code.kind == "ptx":
        return code.arch <= gpu
    return code.arch // 10 == gpu // 10 and code.arch <= gpu


def verdict(container: Container, gpu: int) -> Verdict:
    """What a GPU gets of a container: native code, PTX for the driver, or nothing."""
    usable = {code.kind for code in container.codes if runs(code, gpu)}
    return "sass" if "sass" in usable else "ptx" if "ptx" in usable else "none"
