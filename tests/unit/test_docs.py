"""docs/patches.md names each series as it is, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from sm121.serve.nodes import load_nodes


def tables(root: Path, release: str) -> list[list[str]]:
    """The patches of the release that each table's first column names, of tables that name any.

    `name` is one of every release's, `name` (release) only of that one's.
    """
    text = (root / "docs/patches.md").read_text()
    row = re.compile(r"^\| `([a-z0-9-]+)`(?: \(([\d.]+)\))? \|", re.MULTILINE)
    found = [
        [name for name, only in row.findall(part) if only in ("", release)]
        for part in text.split("\n## ")
    ]
    return [names for names in found if len(names) > 4]


def test_each_patch_has_its_row_and_its_tests(root: Path) -> None:
    for path in sorted((root / "patches/vllm").glob("*/series")):
        lines = path.read_text().splitlines()
        listed = [
            line.removesuffix(".patch") for line in lines if line and not line.startswith("#")
        ]
        assert tables(root, path.parent.name) == [listed, listed], path


def test_tests_that_the_docs_name_exist(root: Path) -> None:
    named: set[tuple[str, str]] = set()
    for cell in (root / "docs/patches.md").read_text().split("|"):
        file = ""
        for written, test in re.findall(r"`([\w/]*\.py)?::(test_\w+)`", cell):
            file = written or file
            named.add((file, test))
    assert len(named) >= 30
    missing = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if f"\ndef {test}(" not in (root / "tests/integration" / file).read_text()
    ]
    assert missing == []


def test_the_nodes_file_that_the_docs_show_is_one(root: Path, tmp_path: Path) -> None:
    """Also with every line that is commented out there."""
    (text,) = re.findall(r"```toml\n(.*?)```", (root / "docs/serve.md").read_text(), re.DOTALL)
    for name, content in (("as.toml", text), ("all.toml", re.sub(r"(?m)^# ", "", text))):
        (tmp_path / name).write_text(content)
        assert load_nodes(tmp_path / name).head.name == "spark-a"
    assert load_nodes(tmp_path / "all.toml").gpu_memory_utilization == 0.83
