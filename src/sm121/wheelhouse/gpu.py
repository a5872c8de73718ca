"""What the target's GPU gets of our wheel, for the manifest: by verify-abi's own check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sm121.abi.context import Context as AbiContext
from sm121.abi.context import Expected
from sm121.abi.coverage import check_coverage
from sm121.abi.gpu import Arch
from sm121.abi.policy.load import load_policy
from sm121.abi.report import gpu_gaps
from sm121.abi.scan import FactsCache, scan_wheels
from sm121.context import Context
from sm121.wheelhouse.manifest import Check, GpuEntry


def judge_gpu(
    context: Context, wheel: Path, *, built: Sequence[str], left_out: Mapping[str, str]
) -> tuple[tuple[GpuEntry, ...], Check]:
    """Verdict per file with GPU code, and the check that says what is not native.

    A fault is only recorded here: the stage `verify`, which follows, stops at it.
    """
    facts = scan_wheels([wheel], cache=FactsCache(context.layout.cache), memory=context.memory)
    findings, rows = check_coverage(
        AbiContext(
            subjects=tuple(facts), others=(), target=context.runtime,
            arch=Arch.parse(context.arch), policy=load_policy(),
            expected=Expected(
                profile=context.options.profile, built=tuple(built), left_out=dict(left_out)
            ),
        )
    )  # fmt: skip
    gaps = gpu_gaps(rows, arch=context.arch)
    failed = any(one.severity == "fault" for one in findings)
    check = Check(
        name="gpu code",
        verdict="failed" if failed else "allowed" if gaps else "passed",
        detail=gaps or f"every object with GPU code has native code for {context.arch}",
    )
    entries = tuple(
        GpuEntry(
            component=row.component, file=row.file, sass=row.sass, ptx=row.ptx, none=row.none,
            bytes=row.bytes, archs=row.archs, verdict=row.verdict, result=row.result, why=row.why,
        )
        for row in rows
    )  # fmt: skip
    return entries, check
