"""The release's own wheel is fetched for the machine that runs, whatever it builds for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sm121 import fetch
from sm121.context import Context, Options
from sm121.errors import HashMismatch
from sm121.jit.base.tree import fetch_release
from sm121.pins.model import OverlayPin, ReleaseWheel
from sm121.toolkit.machine import host_machine


def test_the_index_is_asked_as_this_machine(
    small: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists one platform's wheels: asked as the target, it has none for this host."""
    here = f"linux-{host_machine()}"
    wheels = {
        name: ReleaseWheel(
            filename=f"vllm-1.2.3-cp38-abi3-manylinux_2_28_{name.removeprefix('linux-')}.whl",
            sha256="ab" * 32,
        )
        for name in small.stack.targets
    }
    other = next(name for name in small.stack.targets if name != here)
    context = replace(
        small, options=Options(target=other),
        stack=small.stack.model_copy(update={"overlay": OverlayPin(wheels=wheels)}),
    )  # fmt: skip
    asked: list[str] = []

    def locate(wanted: object, *, uv_platform: str, **more: object) -> dict[str, object]:
        asked.append(uv_platform)
        return {}

    monkeypatch.setattr(fetch, "locate", locate)
    with pytest.raises(HashMismatch, match="of the pinned content"):
        fetch_release(context)
    assert [platform.partition("-")[0] for platform in asked] == [host_machine()]
