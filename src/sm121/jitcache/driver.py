"""Asks FlashInfer itself: a script for the build host's Python, with FlashInfer on its path.

    python driver.py write REQUEST ANSWER    each module's ninja file, by its own JitSpec
    python driver.py find REQUEST ANSWER     where FlashInfer looks for each, and is it there?

REQUEST and ANSWER are JSON files. Request: `modules`, name → {`generator`, `arguments`};
`python_include`: the target's Python headers. Answer: `version`, and `modules`, name → facts, or
`error`. Standard library, torch and FlashInfer only: sm121 is not on the path.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import sysconfig
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# ccache knows only nvcc's short name for it, and without its knowing there is no hit (and with a
# hit no dependency file).
_LONG, _SHORT = "--generate-dependencies-with-compile ", "-MD "


def main(action: str, request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    _use_headers(request["python_include"])
    try:
        answer = {"modules": {}, "version": importlib.import_module("flashinfer").__version__}
        one = {"write": write, "find": find}[action]
        for name, module in request["modules"].items():
            answer["modules"][name] = one(make_spec(name, module))
    except Exception as error:  # whatever FlashInfer raises is the answer
        answer = {"error": f"{type(error).__name__}: {error}"}
    Path(answer_file).write_text(json.dumps(answer, indent=1), encoding="utf-8")


def _use_headers(include: str) -> None:
    """Let FlashInfer name the target's Python headers: it asks sysconfig, which knows the host's."""
    original = sysconfig.get_path

    def get_path(name: str, *more: Any, **other: Any) -> Any:
        return include if name == "include" else original(name, *more, **other)

    sysconfig.get_path = get_path


def make_spec(name: str, module: dict[str, Any]) -> Any:
    """The module's JitSpec. Raises ValueError if it is not the one that was meant."""
    package, _, function = module["generator"].partition(":")
    generator = getattr(importlib.import_module(package), function)
    spec = generator(**{key: _value(value) for key, value in module["arguments"].items()})
    core = importlib.import_module("flashinfer.jit.core")
    if not isinstance(spec, core.JitSpecNvcc):
        raise ValueError(f"{name}: {module['generator']} gives no module that nvcc compiles")
    if spec.name != name:
        raise ValueError(f"{module['generator']} gives the module {spec.name}, wanted {name}")
    return spec


def _value(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(importlib.import_module("torch"), value.removeprefix("torch."))
    return value


def write(spec: Any) -> dict[str, Any]:
    spec.write_ninja()
    text = spec.ninja_path.read_text(encoding="utf-8")
    if _LONG in text:
        text = text.replace(_LONG, _SHORT)
        spec.ninja_path.write_text(text, encoding="utf-8")
    return {
        "ninja": str(spec.ninja_path),
        "library": str(spec.jit_library_path),
        "sources": [str(source) for source in spec.sources],
        "objects": re.findall(r"^build (\S+\.o): ", text, re.MULTILINE),
        "codes": sorted(set(re.findall(r"-gencode=\S*?code=(\w+)", text))),
        "inside": inside(spec),
    }


def find(spec: Any) -> dict[str, Any]:
    return {"folder": aot_folder(), "inside": inside(spec), "found": bool(spec.is_aot)}


def inside(spec: Any) -> str:
    """Where the module would lie in the folder of those made ahead of time."""
    return str(spec.aot_path.relative_to(aot_folder()))


def aot_folder() -> str:
    return str(importlib.import_module("flashinfer.jit.env").FLASHINFER_AOT_DIR)


if __name__ == "__main__":
    main(*sys.argv[1:])
