"""Where a third-party source lies, whether it was made already or not."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from sm121.files import sha256_text
from sm121.pins.model import SourcePin

# In the folder of one pin: its tree.
TREE = "tree"


def made_at(name: str, pin: SourcePin, folder: Path) -> Path:
    """Where a source is made. Named by all of the pin: with other submodules it is another tree."""
    content = json.dumps(pin.content(), separators=(",", ":"))
    return folder / f"{name}-{sha256_text(content)[:12]}"


def place_of(
    name: str, pin: SourcePin, folder: Path, environment: Mapping[str, str] = os.environ
) -> Path:
    """The top of a source's tree, whether it is there yet or not."""
    local = environment.get(pin.env)
    return Path(local).resolve() if local else made_at(name, pin, folder) / TREE
