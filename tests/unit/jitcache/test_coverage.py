"""verify-abi demands native code in every module of our JIT cache."""

from __future__ import annotations

import pytest
from make import context, elf, fatbin, wheel

from sm121.abi.coverage import check_coverage

PATH = "flashinfer_jit_cache/jit_cache/sampling/sampling.so"
OURS = "flashinfer_jit_cache-0.6.17+sm121.1a2b3c4d-py3-none-linux_aarch64.whl"
OTHER = "something_else-1.0-py3-none-manylinux_2_28_aarch64.whl"


@pytest.mark.parametrize(
    ("filename", "codes", "severity"),
    [
        (OURS, ["sm_121a"], None),
        (OURS, ["compute_75"], "fault"),
        (OURS, ["sm_120a"], "fault"),
        (OTHER, ["compute_75"], "note"),  # of others, PTX is only told
    ],
)
def test_native_or_a_fault(filename: str, codes: list[str], severity: str | None) -> None:
    judged = wheel(filename, {PATH: elf(fatbin=fatbin(codes))})
    found, (row,) = check_coverage(context(judged))
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert row.result == ("fail" if severity == "fault" else "pass")
