"""Where everything lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm121 import layout as layout_module
from sm121.errors import UsageFault
from sm121.layout import Layout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins/default").write_text("x")
    (tmp_path / "patches").mkdir()
    (tmp_path / "deep/er").mkdir(parents=True)
    return tmp_path


def test_checkout_is_found_from_a_folder_below(checkout: Path) -> None:
    layout = Layout.find(start=checkout / "deep/er")
    assert layout.root == checkout
    assert (layout.build, layout.cache) == (checkout / "build", checkout / "build/cache")
    assert layout.wheelhouse == checkout / "wheelhouse"


def test_build_and_cache_can_be_moved(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM121_BUILD", str(checkout / "b"))
    assert Layout.find(start=checkout).cache == checkout / "b/cache"
    monkeypatch.setenv("SM121_CACHE", str(checkout / "c"))
    layout = Layout.find(start=checkout, wheelhouse=checkout / "w")
    assert (layout.build, layout.cache, layout.wheelhouse) == (
        checkout / "b", checkout / "c", checkout / "w",
    )  # fmt: skip


def test_no_checkout_anywhere_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "__file__", str(tmp_path / "site/sm121/layout.py"))
    with pytest.raises(UsageFault, match="not a checkout"):
        Layout.find(start=tmp_path)
