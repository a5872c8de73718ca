"""What builds have left of what objects cost, made up."""

from __future__ import annotations

import json

from sm121.compile.launching import cost_folder
from sm121.context import Context
from sm121.state import Record, State

GIB = 1 << 30


def of(component: str, source: str = "a.cu") -> str:
    """An object of a component, as ninja names it."""
    return f"CMakeFiles/{component}.dir/{source}.o"


def measure(
    context: Context, *names: str, folder: str = ".", rss: int = GIB // 5, **more: object
) -> None:
    """Append a record of each object; of 9 s, if it is not said otherwise. folder: below the build's
    own, of other objects than vLLM's."""
    file = cost_folder(context).folder / folder / "objects.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "run": "one", "source": "a.cu", "start": 0.0, "end": 9.0, "waited": 0.0, "cpu": 9.0,
        "rss": rss, "cache": "miss", "exit": 0, **more,
    }  # fmt: skip
    with file.open("a") as log:
        log.writelines(json.dumps({"object": name, **values}) + "\n" for name in names)


def finish(context: Context, stage: str, seconds: float = 1, **result: object) -> None:
    """Record a stage as done. stage: its name, and of `compile` the profile: 'compile-smoke'."""
    name, _, profile = stage.partition("-") if stage.startswith("compile-") else (stage, "", "")
    key = f"{name}/{context.key}" + (f"-{profile}" if profile else "")
    record = Record(fingerprint="", inputs={}, log="", result=result, seconds=seconds)
    State.load(context.layout.state).put(key, record)


def ship(context: Context, objects: dict[str, tuple[float, int]]) -> None:
    """Write the stack's costs.json."""
    folder = context.layout.pins / context.stack_name
    (folder / "costs.json").write_text(json.dumps({"measured": "there", "objects": objects}))
