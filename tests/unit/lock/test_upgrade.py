"""`lock --upgrade`: one pin moves in stack.toml, everything else stays."""

from __future__ import annotations

import difflib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sm121.errors import UsageFault
from sm121.lock.diff import difference, moves
from sm121.lock.pylock import LockedFile, make_lock, write_lock
from sm121.lock.upgrade import edit_pin, parse_wish
from sm121.pins.load import parse_stack
from sm121.pins.model import Stack

NOW = datetime(2027, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


@pytest.fixture
def text(root: Path, stack_name: str) -> str:
    return (root / "pins" / stack_name / "stack.toml").read_text()


def changed(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line[0] in "+-"]


@pytest.mark.parametrize(
    ("wish", "parsed"),
    [("torch", ("torch", "")), ("Tvm_FFI==1.0", ("tvm-ffi", "1.0")), ("a ==2", ("a", "2"))],
)
def test_wishes(wish: str, parsed: tuple[str, str]) -> None:
    assert parse_wish(wish) == parsed


@pytest.mark.parametrize("wish", ["torch>=2", "torch[x]", "", "a b", "torch==1,<2"])
def test_other_wishes_are_refused(wish: str) -> None:
    with pytest.raises(UsageFault):
        parse_wish(wish)


def test_family_pin(text: str, stack: Stack) -> None:
    after = edit_pin(text, stack, "torchvision", "0.27.0", now=NOW)
    assert changed(text, after) == [
        f'- version = "{stack.family["torchvision"].version}"', '+ version = "0.27.0"',
    ]  # fmt: skip
    assert parse_stack(after, Path()).family["torchvision"].version == "0.27.0"


def test_every_pin_can_be_moved(text: str, stack: Stack) -> None:
    for name in (*stack.family, *stack.cuda.toolkit, *stack.installer):
        again = parse_stack(edit_pin(text, stack, name, "99.1", now=NOW), Path())
        assert again != stack
        pins = {n: p.version for n, p in again.family.items()}
        assert (pins | again.cuda.toolkit | again.installer)[name] == "99.1"


def test_package_that_is_not_pinned_gets_a_date_of_its_own(text: str, stack: Stack) -> None:
    after = edit_pin(text, stack, "aiohttp", "", now=NOW)
    again = parse_stack(after, Path())
    assert again.lock_newer == {"aiohttp": NOW.replace(microsecond=0)}
    later = NOW.replace(year=2028)
    second = edit_pin(after, again, "aiohttp", "", now=later)
    assert parse_stack(second, Path()).lock_newer == {"aiohttp": later.replace(microsecond=0)}
    third = edit_pin(second, parse_stack(second, Path()), "numpy", "", now=NOW)
    assert set(parse_stack(third, Path()).lock_newer) == {"aiohttp", "numpy"}
    assert text.rstrip() in third


def test_certain_version_of_an_unpinned_package_is_refused(text: str, stack: Stack) -> None:
    with pytest.raises(UsageFault, match="not pinned"):
        edit_pin(text, stack, "aiohttp", "3.0", now=NOW)


def locked(name: str, version: str, digest: str = "a") -> LockedFile:
    return LockedFile(
        distribution=name, version=version, filename=f"{name}-{version}-py3-none-any.whl",
        sha256=digest * 64, size=1,
    )  # fmt: skip


def test_moves_and_difference(tmp_path: Path) -> None:
    path = tmp_path / "pylock.x.toml"
    old = make_lock(
        [locked("a", "1"), locked("b", "1"), locked("c", "1")], python="3.12", inputs=""
    )
    new = make_lock(
        [locked("a", "2"), locked("b", "1"), locked("d", "1")], python="3.12", inputs=""
    )
    write_lock(old, path)
    assert moves(path, new) == {"a": ("1", "2"), "c": ("1", "-"), "d": ("-", "1")}
    assert moves(path, old) == {}
    assert difference(path, old) == []
    lines = difference(path, new)
    assert lines[0] == "pylock.x.toml:"
    assert "  -a 1 a-1-py3-none-any.whl aaaaaaaaaaaaaaaa" in lines
    assert "  +a 2 a-2-py3-none-any.whl aaaaaaaaaaaaaaaa" in lines
    assert not any(" b 1" in line for line in lines)


def test_everything_is_new_without_a_lock(tmp_path: Path) -> None:
    new = make_lock([locked("a", "1")], python="3.12", inputs="")
    assert moves(tmp_path / "none.toml", new) == {"a": ("-", "1")}
    assert len(difference(tmp_path / "none.toml", new)) == 2


def test_changed_inputs_alone_are_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "pylock.x.toml"
    write_lock(make_lock([locked("a", "1")], python="3.12", inputs="one"), path)
    new = make_lock([locked("a", "1")], python="3.12", inputs="two")
    assert difference(path, new) == ["pylock.x.toml:", "  only its inputs changed"]
