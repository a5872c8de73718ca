"""Calls into libraries that compile kernels themselves: FlashInfer and DeepGEMM.

Their kernels have no decorator in vLLM's tree. What is found is the library's function by name:
FlashInfer's through an import or `_lazy_import_wrapper("flashinfer.x", "name")`; DeepGEMM's as
the function of vllm/utils/deep_gemm.py that wraps it (it calls a `_…_impl`), or as an attribute
of what `_import_deep_gemm()` returned.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal

from sm121.jit.imports import Module, dotted

Library = Literal["flashinfer", "deepgemm"]
_DEEP_GEMM = "vllm.utils.deep_gemm"


def may_call(module: Module) -> bool:
    """Is either library named at all? (Most modules name none; looking closer takes time.)"""
    return module.name == _DEEP_GEMM or "flashinfer" in module.text or "deep_gemm" in module.text


def library_calls(module: Module, node: ast.stmt) -> Iterator[tuple[Library, str, int]]:
    """(family, 'module:function', line) of each library function that a definition names."""
    yield from _flashinfer(module, node)
    yield from _deepgemm(module, node)


def _flashinfer(module: Module, node: ast.stmt) -> Iterator[tuple[Library, str, int]]:
    for part in ast.walk(node):
        if isinstance(part, ast.ImportFrom) and not part.level:
            owner = part.module or ""
            if owner == "flashinfer" or owner.startswith("flashinfer."):
                for alias in part.names:
                    yield "flashinfer", f"{owner}:{alias.name}", part.lineno
        elif isinstance(part, ast.Call) and dotted(part.func)[-1:] == ["_lazy_import_wrapper"]:
            words = [str(a.value) for a in part.args if isinstance(a, ast.Constant)]
            if len(words) >= 2:
                yield "flashinfer", f"{words[0]}:{words[1]}", part.lineno
        elif isinstance(part, ast.Name):
            found = module.imports.get(part.id)
            if found and found.name and found.module.partition(".")[0] == "flashinfer":
                yield "flashinfer", f"{found.module}:{found.name}", part.lineno
        elif isinstance(part, ast.Attribute):
            chain = dotted(part)
            # flashinfer.module.function, the module imported by its name
            if len(chain) > 2 and chain[0] == "flashinfer":
                yield "flashinfer", f"{'.'.join(chain[:-1])}:{chain[-1]}", part.lineno


def _deepgemm(module: Module, node: ast.stmt) -> Iterator[tuple[Library, str, int]]:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return
    if module.name == _DEEP_GEMM:
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if node.name != "_lazy_init" and any(
            u.startswith("_") and u.endswith("_impl") for u in used
        ):
            yield "deepgemm", f"{_DEEP_GEMM}:{node.name}", node.lineno
        return
    held = {
        target.id
        for part in ast.walk(node)
        if isinstance(part, ast.Assign)
        and isinstance(part.value, ast.Call)
        and dotted(part.value.func)[-1:] == ["_import_deep_gemm"]
        for target in part.targets
        if isinstance(target, ast.Name)
    }
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and (chain := dotted(part))[:1] and chain[0] in held:
            yield "deepgemm", f"deep_gemm:{chain[1]}", part.lineno
