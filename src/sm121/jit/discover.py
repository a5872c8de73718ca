"""Find the JIT kernels that a model's code can reach, from source alone.

The walk starts at every definition of the model's package and follows names: imports (also
those inside functions), attributes of modules, custom ops by their registered name
(`torch.ops.vllm.x` → its op_func) and dotted names in strings (registries). Methods are not
resolved by receiver; whoever names a class reaches all of it. So it reaches too much rather
than too little, and jit.toml says of each kernel it reaches what becomes of it.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from sm121.jit.imports import Module, dotted, read_tree
from sm121.jit.libraries import library_calls, may_call

Family = Literal["triton", "cutedsl", "tilelang", "flashinfer", "deepgemm"]
# What is written before a kernel, by family.
_DECORATORS: Mapping[str, Family] = {
    "triton.jit": "triton",
    "triton.autotune": "triton",
    "triton.heuristics": "triton",
    "cute.jit": "cutedsl",
    "cute.kernel": "cutedsl",
    "tilelang.jit": "tilelang",
    "T.prim_func": "tilelang",
}
_MAX_ALIASES = 8


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Kernel:
    """A kernel as the tree has it. name: 'module:function', of a CuTeDSL class 'module:Class'
    (its methods are one program), of a library's call 'module:function' in that library.

    via: the definition that names it, back to the model, shortest way; helper: it is only called
    by other kernels and so compiled inside them.
    """

    family: Family
    name: str
    file: str
    line: int
    via: tuple[str, ...] = ()
    helper: bool = False


def discover(
    root: Path, package: str, *, top: str = "vllm", avoid: Iterable[str] = ()
) -> list[Kernel]:
    """The kernels that `package` reaches in the tree at `root`.

    avoid: patterns over 'module:name' that the walk does not enter (other platforms, registries).
    """
    walk = _Walk(read_tree(root, top), tuple(avoid))
    walk.run(package)
    kernels: dict[str, Kernel] = {}
    for module, name in walk.seen:
        for kernel in (*walk.kernels(root, module, name), *walk.calls(root, module, name)):
            kernels.setdefault(kernel.name, kernel)
    helpers = walk.helpers(set(kernels))
    return sorted(
        Kernel(
            family=k.family, name=k.name, file=k.file, line=k.line, via=k.via,
            helper=k.name in helpers,
        )
        for k in kernels.values()
    )  # fmt: skip


class _Walk:
    def __init__(self, modules: dict[str, Module], avoid: tuple[str, ...]) -> None:
        whole = [pattern.removesuffix(":*") for pattern in avoid if pattern.endswith(":*")]
        self.avoid = [pattern for pattern in avoid if not pattern.endswith(":*")]
        self.modules = {
            name: module
            for name, module in modules.items()
            if not any(fnmatchcase(name, pattern) for pattern in whole)
        }
        self.seen: dict[tuple[str, str], tuple[str, str] | None] = {}
        self._queue: deque[tuple[str, str]] = deque()
        self._ops = self._custom_ops()
        # Names used in the bodies of kernels, and in those of everything else.
        self._in_kernels: set[tuple[str, str]] = set()
        self._elsewhere: set[tuple[str, str]] = set()

    def run(self, package: str) -> None:
        for name in self.modules:
            if name == package or name.startswith(package + "."):
                for definition in self.modules[name].definitions:
                    self._visit(name, definition, None)
        while self._queue:
            place = self._queue.popleft()
            module = self.modules[place[0]]
            for node in module.definitions[place[1]]:
                for found in self._references(module, node):
                    self._resolve(*found, place)

    def _custom_ops(self) -> dict[str, tuple[str, str]]:
        """(module, function) of each op that direct_register_custom_op registers."""
        ops = {}
        for module in self.modules.values():
            if "direct_register_custom_op" not in module.text:
                continue
            for node in module.nodes:
                if not (
                    isinstance(node, ast.Call)
                    and dotted(node.func)[-1:] == ["direct_register_custom_op"]
                ):
                    continue
                given = {k.arg: k.value for k in node.keywords} | dict(
                    zip(("op_name", "op_func"), node.args, strict=False)
                )
                op, function = given.get("op_name"), given.get("op_func")
                if isinstance(op, ast.Constant) and isinstance(function, ast.Name):
                    ops[str(op.value)] = (module.name, function.id)
        return ops

    def _visit(self, module: str, name: str, via: tuple[str, str] | None) -> None:
        place = f"{module}:{name}"
        if (module, name) not in self.seen and not any(fnmatchcase(place, p) for p in self.avoid):
            self.seen[module, name] = via
            self._queue.append((module, name))

    def _resolve(self, module: str, name: str, via: tuple[str, str], depth: int = 0) -> None:
        if module not in self.modules or depth > _MAX_ALIASES:
            return
        here = self.modules[module]
        if name in here.definitions:
            self._visit(module, name, via)
        elif (found := here.imports.get(name)) and found.name:
            self._resolve(found.module, found.name, via, depth + 1)

    def _references(self, module: Module, node: ast.AST) -> Iterator[tuple[str, str]]:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                yield module.name, part.id
            elif isinstance(part, ast.Attribute):
                yield from self._attribute(module, dotted(part))
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                owner, _, name = part.value.replace(":", ".").rpartition(".")
                if owner in self.modules:
                    yield owner, name

    def _attribute(self, module: Module, chain: list[str]) -> Iterator[tuple[str, str]]:
        if chain[:3] == ["torch", "ops", "vllm"] and len(chain) > 3:
            if chain[3] in self._ops:
                yield self._ops[chain[3]]
            return
        found = module.imports.get(chain[0]) if chain else None
        if found is None:
            return
        full = f"{found.module}.{found.name}" if found.name else found.module
        rest = chain[1:]
        while rest and f"{full}.{rest[0]}" in self.modules:
            full = f"{full}.{rest.pop(0)}"
        if full in self.modules and rest:
            yield full, rest[0]

    def kernels(self, root: Path, module: str, name: str) -> Iterator[Kernel]:
        """The kernels in one definition, decorated functions at any depth."""
        here = self.modules[module]
        if not any(decorator in here.text for decorator in _DECORATORS):
            return
        for node in here.definitions[name]:
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef) and (family := _family(part)):
                    method = isinstance(node, ast.ClassDef)
                    yield Kernel(
                        family=family,
                        name=f"{module}:{name if method or family != 'triton' else part.name}",
                        file=str(here.path.relative_to(root)),
                        line=node.lineno if method else part.lineno,
                        via=self._way(module, name),
                    )

    def calls(self, root: Path, module: str, name: str) -> Iterator[Kernel]:
        """The library functions that one definition names."""
        here = self.modules[module]
        if not may_call(here):
            return
        for node in here.definitions[name]:
            for family, function, line in library_calls(here, node):
                yield Kernel(
                    family=family,
                    name=function,
                    file=str(here.path.relative_to(root)),
                    line=line,
                    via=(f"{module}:{name}", *self._way(module, name)),
                )

    def _way(self, module: str, name: str) -> tuple[str, ...]:
        way: list[str] = []
        place = self.seen[module, name]
        while place is not None:
            way.append(":".join(place))
            place = self.seen[place]
        return tuple(way)

    def helpers(self, names: set[str]) -> set[str]:
        """Of the kernels, those that nothing but kernels' bodies names."""
        inside: set[str] = set()
        outside: set[str] = set()
        words = {name.rpartition(":")[2] for name in names}
        relevant = {
            module
            for module in {module for module, _ in self.seen}
            if any(word in self.modules[module].text for word in words)
        }
        for module, name in self.seen:
            if module not in relevant:
                continue
            here = self.modules[module]
            for node in here.definitions[name]:
                for part, in_kernel in _parts(node):
                    used = {f"{module}:{part.id}"}
                    if (found := here.imports.get(part.id)) and found.name:
                        used.add(f"{found.module}:{found.name}")
                    (inside if in_kernel else outside).update(used & names)
        return inside - outside


def _family(node: ast.FunctionDef) -> Family | None:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if family := _DECORATORS.get(".".join(dotted(called))):
            return family
    return None


def _parts(node: ast.AST, in_kernel: bool = False) -> Iterator[tuple[ast.Name, bool]]:
    """Every name used below a node, and whether that is in the body of a kernel."""
    if isinstance(node, ast.FunctionDef) and _family(node):
        in_kernel = True
    if isinstance(node, ast.Name):
        yield node, in_kernel
    for child in ast.iter_child_nodes(node):
        yield from _parts(child, in_kernel)
