"""What the parts share: a kernel cut out of a tree, and the reason why something was not run."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

# One line of the report each: what was put in, what came out, whether it is what was expected.
Report = Iterator[dict[str, Any]]
HEAD_DIM, PAGE = 512, 64
MLA = "vllm/v1/attention/backends/mla"


class CannotRunError(Exception):
    """Something that a part needs is not on this machine."""


def cut(tree: Path, file: str, *names: str) -> Any:
    """The named functions of a source file as a module of their own (Triton reads its source)."""
    text = (tree / file).read_text()
    lines = text.splitlines(keepends=True)
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "".join(lines[first - 1 : node.end_lineno])
    assert set(found) == set(names), f"{file} has no longer {set(names) - set(found)}"
    head = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
    path = Path(tempfile.mkdtemp()) / f"cut_{tree.name}_{names[0]}.py"
    path.write_text(head + "\n\n".join(found[name] for name in names))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
