"""What recipes told, remembered by all that decides it: source, shapes, compilers, our code."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sm121.abi.source import Malformed
from sm121.files import sha256_text, write_atomic
from sm121.jit.cubin import read_cubin
from sm121.jit.discover import Kernel
from sm121.jit.drive import INSIDE, Told
from sm121.jit.report import Variant

_SCHEMA = 3
_KEPT = 300
_SPILLS = re.compile(
    r"Function properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads"
)
# As we say it, nvcc of its parts, a shell, and strerror(3).
_PASSING = re.compile(
    r"\A(?:timed out|killed by)|died due to signal|\bKilled\b|No space left on device|"
    r"Disk quota exceeded|Cannot allocate memory"
)
# What the JIT families are made of, below site-packages.
_COMPILERS = (
    "triton", "tilelang", "tvm_ffi", "nvidia_cutlass_dsl", "quack", "flashinfer", "nvidia/cu13", "torch/version.py",
)  # fmt: skip


class Results:
    """A JSON file of results by key. Unreadable or of another schema: everything is run again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        self._found: dict[str, Any] = {}
        self._config: dict[str, Any] = {}
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] == _SCHEMA:
                self._known, self._found = data["results"], data["found"]
                self._config = data.get("config", {})
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def find(self, key: str) -> Told | None:
        known = self._known.get(key)
        return Told(records=known["records"], error=known["error"]) if known else None

    def put(self, key: str, told: Told) -> None:
        """Remember, unless another run may end otherwise: a time limit, a killed child or compiler,
        no memory, no space."""
        errors = [told.error, *(str(record.get("error", "")) for record in told.records)]
        if not any(map(_PASSING.search, errors)):
            self._known[key] = {"records": told.records, "error": told.error}

    def kernels(self, key: str, find: Callable[[], list[Kernel]]) -> list[Kernel]:
        """What discover found for this key, from memory if it is the last one's."""
        if self._found.get("key") == key:
            return [Kernel(**{**one, "via": tuple(one["via"])}) for one in self._found["kernels"]]
        found = find()
        self._found = {"key": key, "kernels": [asdict(kernel) for kernel in found]}
        return found

    def config(self, key: str, find: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """The model's published config in the environment of this key."""
        if self._config.get("key") != key:
            self._config = {"key": key, "config": dict(find())}
        config: Mapping[str, Any] = self._config["config"]
        return config

    def save(self, used: Iterable[str]) -> None:
        """Write; of what this run had no use for, only the newest few hundred are kept."""
        keep = set(used)
        others = [key for key in self._known if key not in keep]
        for key in others[: max(len(others) - _KEPT, 0)]:
            del self._known[key]
        write_atomic(
            self._path,
            json.dumps(
                {
                    "schema": _SCHEMA,
                    "results": self._known,
                    "found": self._found,
                    "config": self._config,
                }
            ),
        )


def key_of(*, recipe: str, mode: str, inputs: Mapping[str, str]) -> str:
    return sha256_text(recipe, mode, *(part for item in sorted(inputs.items()) for part in item))


def code_identity() -> str:
    """Digest of what runs inside the environment, the driver's stand-in (gb10.c) too."""
    files = [f for f in sorted(INSIDE.iterdir()) if f.suffix in (".py", ".c")]
    return sha256_text(*(part for f in files for part in (f.name, f.read_text(encoding="utf-8"))))


def walk_identity() -> str:
    """Digest of what finds kernels."""
    here = Path(__file__).parent
    return sha256_text(
        *((here / name).read_text() for name in ("discover.py", "imports.py", "libraries.py"))
    )


def environment_identity(site: Path) -> str:
    """Digest of names, sizes and times of the compilers' files: any change there counts."""
    digest = hashlib.sha256()
    for name in _COMPILERS:
        top = site / name
        for folder, folders, files in os.walk(top) if top.is_dir() else [(str(site), [], [name])]:
            folders[:] = sorted(f for f in folders if f != "__pycache__")
            for file in sorted(files):
                path = os.path.join(folder, file)  # noqa: PTH118 - tens of thousands
                try:
                    stat = os.stat(path)  # noqa: PTH116
                except OSError:
                    continue
                digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def tree_identity(tree: Path) -> str:
    """Digest of the content of all Python files and headers of the tree."""
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        if path.suffix in (".py", ".cuh", ".h", ".hpp", ".json") and path.is_file():
            digest.update(str(path.relative_to(tree)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def read_cubins(told: Told) -> None:
    """Replace the paths of cubins in the records by what the cubins say."""
    for record in told.records:
        paths = [record.pop("cubin")] if "cubin" in record else record.pop("cubins", [])
        if "error" in record:
            continue
        try:
            cubins = [read_cubin(Path(path).read_bytes()) for path in paths]
            codes = [code for cubin in cubins for code in cubin.kernels]
            # A FlashInfer module has sources with host code alone.
            if not codes and record.get("family") != "flashinfer":
                raise Malformed("no kernel in it")
        except (OSError, Malformed) as error:
            record["error"] = f"the cubin can't be read: {error}"
            continue
        record["codes"] = [
            {"sm": cubin.sm, "name": c.name, "registers": c.registers, "threads": c.threads,
             "shared": c.shared, "stack": c.stack}
            for cubin in cubins for c in cubin.kernels
        ]  # fmt: skip
    _require_launched(told.records)


def _require_launched(records: list[dict[str, Any]]) -> None:
    """An error on each record whose launches name a kernel that was not compiled: if names stopped
    to match, "no launch was seen" would be untrue. FlashInfer's launches are of the whole module."""
    module = [one for one in records if one.get("family") == "flashinfer"]
    others = [[one] for one in records if one.get("family") != "flashinfer"]
    for some in (module, *others):
        if any("error" in one for one in some):
            continue
        names = {code["name"] for one in some for code in one["codes"]}
        for one in some:
            if lost := sorted(set(one.get("launches", ())) - names):
                one["error"] = f"launched, and in no cubin that was compiled: {', '.join(lost[:3])}"


def variants_of(record: Mapping[str, Any]) -> list[Variant]:
    """The kernels of one compilation; of spills, what the assembler said; of threads and dynamic
    shared memory, what the launch asked for."""
    said = {name: int(a) + int(b) for name, a, b in _SPILLS.findall(record.get("ptxas", ""))}
    several = len(record["codes"]) > 1
    return [
        Variant(
            variant={**record.get("variant", {}), **({"entry": code["name"]} if several else {})},
            mode=record.get("mode", ""),
            target=record.get("target") or f"sm_{code['sm']}",
            registers=code["registers"],
            threads=int(_asked(record, code, "threads") or code["threads"]),
            shared_static=code["shared"],
            shared_dynamic=int(_asked(record, code, "dynamic_shared", -1)),
            stack=code["stack"],
            # Without a stack frame nothing can have been spilt.
            spills=said.get(code["name"], 0 if not code["stack"] else -1),
            seconds=float(record["seconds"]),
        )
        for code in record["codes"]
    ]


def _asked(record: Mapping[str, Any], code: Mapping[str, Any], what: str, unknown: int = 0) -> Any:
    """Of this kernel's own launch if the record has launches by name, else of the record's."""
    if "launches" in record:
        return record["launches"].get(code["name"], {}).get(what, unknown)
    return record.get(what, unknown)
