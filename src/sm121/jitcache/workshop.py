"""FlashInfer on the build host: asked for its modules' ninja files, and where it looks for them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from sm121 import proc
from sm121.compile.jobs import Jobs
from sm121.compile.records import CostFolder
from sm121.compile.toolchain import Tools
from sm121.errors import CheckFailed
from sm121.pins.model import JitModule

_DRIVER = Path(__file__).with_name("driver.py")
_NINJA_FOLDER = "temp"  # as prefix_maps has it


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A module as FlashInfer would compile it: its own ninja file, and what that makes.

    codes: of the GPU code that nvcc is asked for, as 'sm_121a'. inside: its path in the folder of
    modules made ahead of time.
    """

    name: str
    ninja: Path
    library: Path
    sources: tuple[Path, ...]
    objects: tuple[str, ...]
    codes: tuple[str, ...]
    inside: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """Where and how modules of a stack are compiled for a target.

    site: folder with FlashInfer and what it imports, for the build host's Python. folder: holds
    site and objects; its name is a digest of what objects depend on beside their command.
    environment: the whole one of every program that is started.
    """

    folder: Path
    site: Path
    tools: Tools
    arch: str
    version: str
    jobs: Jobs
    costs: CostFolder
    memory_per_job: int
    environment: Mapping[str, str]

    @property
    def ninja_folder(self) -> Path:
        return self.folder / _NINJA_FOLDER

    @property
    def licenses(self) -> list[Path]:
        """FlashInfer's licence files, as its wheel has them."""
        return sorted(self.site.glob("flashinfer_python-*.dist-info/licenses/**/*"))

    @property
    def license_expression(self) -> str:
        """License-Expression of FlashInfer's METADATA, '' if it has none."""
        (metadata,) = self.site.glob("flashinfer_python-*.dist-info/METADATA")
        headers = HeaderParser().parsestr(metadata.read_text(encoding="utf-8"))
        return str(headers.get("License-Expression") or "")

    def write_specs(self, modules: Mapping[str, JitModule], *, log: Path) -> list[Spec]:
        """Let FlashInfer write the modules' ninja files. Raises CheckFailed if it has none such."""
        answer = self._ask("write", modules, log=log)
        return [
            Spec(
                name=name, ninja=Path(facts["ninja"]), library=Path(facts["library"]),
                sources=tuple(map(Path, facts["sources"])), objects=tuple(facts["objects"]),
                codes=tuple(facts["codes"]), inside=facts["inside"],
            )
            for name, facts in answer["modules"].items()
        ]  # fmt: skip

    def find(
        self, modules: Mapping[str, JitModule], *, package: Path, log: Path
    ) -> dict[str, dict[str, Any]]:
        """Where FlashInfer looks for each module made ahead of time: `folder`, `inside` it, `found`.

        package: folder that holds the package flashinfer_jit_cache. Raises CheckFailed with
        FlashInfer's own words if it refuses that package.
        """
        answer = self._ask("find", modules, log=log, more=[package])
        found: dict[str, dict[str, Any]] = answer["modules"]
        return found

    def _ask(
        self, action: str, modules: Mapping[str, JitModule], *, log: Path,
        more: list[Path] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        request = {
            "python_include": str(self.tools.python_include),
            "modules": {
                name: {"generator": module.generator, "arguments": module.arguments}
                for name, module in modules.items()
            },
        }
        path = os.pathsep.join(map(str, [*(more or []), self.site]))
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            asked, said = Path(scratch, "request.json"), Path(scratch, "answer.json")
            asked.write_text(json.dumps(request), encoding="utf-8")
            # -s: not the user's site-packages. -P: not the script's folder either.
            proc.run(
                [self.tools.environment / "bin/python", "-sP", "-W", "ignore", _DRIVER, action, asked, said],
                env={**self.environment, "PYTHONPATH": path}, cwd=self.folder, log=log,
            )  # fmt: skip
            answer: dict[str, Any] = json.loads(said.read_text(encoding="utf-8"))
        if error := answer.get("error"):
            raise CheckFailed(
                f"FlashInfer {self.version} does not take what [jit-cache] of the pins says.",
                cause=error,
                remedy="Correct stack.toml, [jit-cache]; docs/jit-cache.md says how it is made.",
            )
        if answer["version"] != self.version:
            raise CheckFailed(
                f"FlashInfer says that it is {answer['version']}, the lock says {self.version}.",
                remedy=f"Remove {self.site}.",
            )
        return answer
