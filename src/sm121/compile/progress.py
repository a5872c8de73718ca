"""What ninja says, as progress: objects done, total, time left."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from sm121.ui import Progress, human_seconds

# NINJA_STATUS is set to "[sm121 %f/%t] " (ninja manual, "Environment variables").
_STATUS = re.compile(r"^\[sm121 (\d+)/(\d+)\] (.*)$")


@dataclass(slots=True)
class NinjaProgress:
    """Feed it output lines; it updates the progress line and counts objects built."""

    progress: Progress
    built: int = 0
    _started: float = field(default_factory=time.monotonic)

    def __call__(self, line: str) -> None:
        match = _STATUS.match(line)
        if not match:
            if line.startswith("-- Configuring done") or "Building wheel" in line:
                self.progress.update(line.removeprefix("-- "))
            return
        done, total = int(match[1]), int(match[2])
        if match[3].startswith("Building"):
            self.built += 1
        elapsed = time.monotonic() - self._started
        left = elapsed / done * (total - done) if done else 0.0
        self.progress.update(
            f"{done}/{total} objects, {human_seconds(elapsed)} gone, "
            f"about {human_seconds(left)} left",
            final=done == total,
        )
