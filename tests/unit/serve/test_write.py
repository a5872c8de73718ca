"""The folder that sync takes."""

from __future__ import annotations

from pathlib import Path

from sm121.serve.load import load_serve
from sm121.serve.nodes import Nodes
from sm121.serve.write import write_both
from support.nodes import two_nodes

ROOT = Path(__file__).resolve().parents[3]


def test_both_roles_beside_each_other(tmp_path: Path) -> None:
    serve, nodes = load_serve(ROOT / "pins", "0.26.0"), Nodes.model_validate(two_nodes())
    written = write_both(serve, nodes, tmp_path, stack="0.26.0")
    expected = Path(__file__).with_name("expected")
    assert set(written) == {str(p.relative_to(expected)) for p in expected.rglob("*.*")}
    for name, file in written.items():
        assert file == tmp_path / name
        assert file.read_text() == (expected / name).read_text()
