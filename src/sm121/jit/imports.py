"""Names of a Python source tree and what they refer to, without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """`from module import name as …`, or `import module as …` with name ''."""

    module: str
    name: str


@dataclass(kw_only=True)
class Module:
    """One file. definitions: top-level names, also those below `if` and `try`."""

    name: str
    path: Path
    is_package: bool
    _definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, str(self.path))))

    @cached_property
    def definitions(self) -> dict[str, list[ast.stmt]]:
        found: dict[str, list[ast.stmt]] = {}
        module = self.nodes[0]
        assert isinstance(module, ast.Module)
        for node in _top_level(module.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, []).append(node)
        return found

    @cached_property
    def imports(self) -> dict[str, Import]:
        """Every import of the file, those inside functions too, by the name it binds."""
        found: dict[str, Import] = {}
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    found[alias.asname or top] = Import(
                        module=alias.name if alias.asname else top, name=""
                    )
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = package.split(".")
                    parent = parts[: len(parts) - (node.level - 1)]
                    base = ".".join([*parent, *([base] if base else [])])
                for alias in node.names:
                    found[alias.asname or alias.name] = Import(module=base, name=alias.name)
        return found


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            yield from _top_level(node.body)
            yield from _top_level(node.orelse)
        elif isinstance(node, ast.Try):
            for part in (node.body, node.orelse, node.finalbody, *(h.body for h in node.handlers)):
                yield from _top_level(part)
        elif isinstance(node, ast.With):
            yield from _top_level(node.body)
        else:
            yield node


def read_tree(root: Path, package: str) -> dict[str, Module]:
    """The modules of a package below `root`, by dotted name. Files are read when needed."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        if is_package := parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        modules[name] = Module(name=name, path=path, is_package=is_package)
    return modules


def dotted(node: ast.AST) -> list[str]:
    """['torch', 'ops', 'vllm', 'x'] of `torch.ops.vllm.x`; [] if it does not begin with a name."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.append(node.attr)
        node = node.value
    return [node.id, *reversed(chain)] if isinstance(node, ast.Name) else []
