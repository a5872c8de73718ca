"""Check: what the target's GPU gets of every component."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sm121.abi.context import Context, exemption, finding, matches
from sm121.abi.facts import Binary, Wheel
from sm121.abi.gpu import runs, verdict
from sm121.abi.policy.model import GpuExempt
from sm121.abi.report import ComponentRow, Finding

_VLLM, _JIT_CACHE = "vllm", "flashinfer-jit-cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A component and the files that are it."""

    name: str
    wheel: Wheel
    path: str
    binary: Binary | None


def check_coverage(context: Context) -> tuple[list[Finding], list[ComponentRow]]:
    """Findings and one row per file with GPU code, and per component of vLLM."""
    out: list[Finding] = []
    rows: list[ComponentRow] = []
    for wheel in context.subjects:
        named = {f.path: f for f in _components(context, wheel)}
        for binary in wheel.binaries:
            if not binary.containers and binary.path not in named:
                continue
            if not context.for_interpreter(binary):
                continue
            one = named.get(binary.path) or _Found(
                name=binary.name, wheel=wheel, path=binary.path, binary=binary
            )
            row, found = _judge(context, one)
            rows.append(row)
            out += found
    for name, wheel, text in _missing(context):
        gone = finding("component", wheel, "", text, names=[name])
        out.append(gone)
        rows.append(
            ComponentRow(
                component=name, wheel=wheel.filename, file="", sass=0, ptx=0, none=0, bytes=0,
                archs={}, expected="required", verdict="missing", result="fail", why=text,
            )
        )  # fmt: skip
    return out, rows


def _components(context: Context, wheel: Wheel) -> Iterator[_Found]:
    if wheel.distribution != _VLLM:
        return
    binaries = {b.path: b for b in wheel.binaries}
    for name, component in context.policy.components.items():
        for path in wheel.files:
            if matches(path, [component.file]):
                yield _Found(name=name, wheel=wheel, path=path, binary=binaries.get(path))


def _missing(context: Context) -> Iterator[tuple[str, Wheel, str]]:
    """Components that the profile lists and the wheel lacks, or that policy does not know."""
    wheel = next((w for w in context.subjects if w.distribution == _VLLM), None)
    if wheel is None:
        return
    present = {f.name for f in _components(context, wheel)}
    for name in context.expected.built:
        if name not in context.policy.components:
            yield (
                name,
                wheel,
                f"component {name} is in the profile, but policy does not say which file it is",
            )
        elif name not in present:
            file = context.policy.components[name].file
            yield (
                name,
                wheel,
                (
                    f"component {name} is missing: profile {context.expected.profile or '?'} lists "
                    f"it, and no file {file} is in the wheel"
                ),
            )


def _judge(context: Context, one: _Found) -> tuple[ComponentRow, list[Finding]]:
    gpu = context.arch.number
    containers = one.binary.containers if one.binary else ()
    counts = Counter(verdict(c, gpu) for c in containers)
    archs = Counter(str(code) for c in containers for code in c.codes)
    # Compiled by us for this GPU alone, as a component that the profile lists.
    required = one.name in context.expected.built or one.wheel.distribution == _JIT_CACHE
    left_out = one.name in (context.expected.left_out or {})
    spec = context.policy.components.get(one.name)
    out: list[Finding] = []
    why: list[str] = []
    if left_out and "+" in one.wheel.version:
        out.append(
            finding(
                "component", one.wheel, one.path,
                f"component {one.name} is in the wheel although the manifest leaves it out: "
                f"{(context.expected.left_out or {})[one.name]}",
                names=[one.name],
            )
        )  # fmt: skip
    if not containers and spec is not None and spec.gpu:
        out.append(
            finding(
                "gpu-code", one.wheel, one.path,
                f"component {one.name} holds no GPU code at all; wanted: {_wanted(context)}",
                names=[one.name],
            )
        )  # fmt: skip
    if counts["none"]:
        out.append(_none(context, one, counts["none"], why))
    if counts["ptx"]:
        out.append(_ptx(context, one, counts["ptx"], required, why))
    failed = any(f.severity == "fault" for f in out)
    why += [f.text for f in out if f.severity == "fault"]
    row = ComponentRow(
        component=one.name, wheel=one.wheel.filename, file=one.path, sass=counts["sass"],
        ptx=counts["ptx"], none=counts["none"], bytes=sum(c.bytes for c in containers),
        archs=dict(sorted(archs.items())),
        expected="required" if required else "left out" if left_out else "present",
        verdict=_word(counts), result="fail" if failed else "pass", why="; ".join(why),
    )  # fmt: skip
    return row, out


def _here(context: Context, rules: Sequence[GpuExempt]) -> list[GpuExempt]:
    return [rule for rule in rules if rule.target in (None, context.target.name)]


def _none(context: Context, one: _Found, count: int, why: list[str]) -> Finding:
    """Objects that the GPU can use nothing of."""
    gpu = context.arch.number
    containers = one.binary.containers if one.binary else ()
    empty = [c for c in containers if verdict(c, gpu) == "none"]
    found = Counter(str(code) for c in empty for code in c.codes)
    rule = exemption(_here(context, context.policy.gpu.no_code), one.path, one.wheel)
    assert rule is None or isinstance(rule, GpuExempt)
    if rule and rule.objects != "any" and count > rule.objects:
        rule = None
    if rule:
        why.append(rule.why)
    return finding(
        "gpu-code", one.wheel, one.path,
        f"{count} of {len(containers)} objects of {one.name} have no code that {context.arch.sm} "
        f"can use; they hold {_list(found)}; wanted: {_wanted(context)}",
        exempt=rule, names=sorted(found),
    )  # fmt: skip


def _ptx(context: Context, one: _Found, count: int, required: bool, why: list[str]) -> Finding:
    """Objects that only the driver's JIT makes usable: slow at first use, and generic code.

    For a component that a profile lists, only as policy allows it: an arch list that got
    lost gives nvcc's default, sm_75 with PTX, which would pass otherwise.
    """
    gpu = context.arch.number
    containers = one.binary.containers if one.binary else ()
    jit = [c for c in containers if verdict(c, gpu) == "ptx"]
    usable = Counter(
        str(code) for c in jit for code in c.codes if code.kind == "ptx" and runs(code, gpu)
    )
    rule = exemption(_here(context, context.policy.gpu.ptx_only), one.path, one.wheel)
    assert rule is None or isinstance(rule, GpuExempt)
    if rule and (
        (rule.objects != "any" and count > rule.objects)
        or (rule.ptx and any(not set(map(str, c.codes)) & set(rule.ptx) for c in jit))
    ):
        rule = None
    if rule:
        why.append(rule.why)
    return finding(
        "gpu-code", one.wheel, one.path,
        f"{count} of {len(containers)} objects of {one.name} run on {context.arch.sm} only through "
        f"the driver's PTX JIT (from {_list(usable)})",
        exempt=rule, note=not required, names=sorted(usable),
    )  # fmt: skip


def _word(
    counts: Counter[Literal["sass", "ptx", "none"]],
) -> Literal["native", "native+ptx", "ptx", "none", "no gpu code", "mixed"]:
    sass, ptx, none = counts["sass"], counts["ptx"], counts["none"]
    if not sass and not ptx and not none:
        return "no gpu code"
    if none:
        return "mixed" if sass or ptx else "none"
    return "native+ptx" if sass and ptx else "native" if sass else "ptx"


def _list(counter: Counter[str]) -> str:
    return ", ".join(f"{name}" for name, _ in counter.most_common(4)) or "nothing"


def _wanted(context: Context) -> str:
    number = context.arch.number
    return f"sm_{number}{context.arch.suffix}, sm_{number // 10}0f or sm_{number // 10}0"
