"""What ninja says, as progress: objects done, total, time left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from sm121.ui import Progress, human_seconds

# NINJA_STATUS is set to "[sm121 %f/%t] " (ninja manual, "Environment variables").
_STATUS = re.compile(r"^\[sm121 (\d+)/(\d+)\] (.*)$")
_OBJECT = re.compile(r"Building \w+ object (\S+)")


@dataclass(slots=True)
class NinjaProgress:
    """Feed it output lines; it updates the progress line and counts objects built.

    seconds: what each object was measured to cost, of this build and of others. missing: names the
    objects of this build that are not there, asked when the first step has ended, since CMake
    writes its rules just before.
    """

    progress: Progress
    seconds: Mapping[str, float] = field(default_factory=dict)
    missing: Callable[[], Iterable[str]] = tuple
    built: int = 0
    _spent: float = 0.0
    _left: dict[str, float] | None = None
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
        named = _OBJECT.match(match[3])
        if self._left is None:
            self._left = self._costs(named[1] if named else None, total)
        if named:
            self._spent += self._left.pop(named[1], 0.0)
        elapsed = time.monotonic() - self._started
        left = elapsed * self._ratio(self._left.values(), done, total)
        self.progress.update(
            f"{done}/{total} objects, {human_seconds(elapsed)} gone, "
            f"about {human_seconds(left)} left",
            final=done == total,
        )

    def _costs(self, first: str | None, total: int) -> dict[str, float]:
        """Of each object that is to come; one that was never measured counts as the mean.

        None if most of ninja's steps are something else: after an edit it compiles objects again
        that are there, and does not say beforehand which.
        """
        objects = {*self.missing(), *([first] if first else [])}
        if not self.seconds or 2 * len(objects) < total:
            return {}
        mean = sum(self.seconds.values()) / len(self.seconds)
        return {name: self.seconds.get(name, mean) for name in objects}

    def _ratio(self, left: Iterable[float], done: int, total: int) -> float:
        """What is left, as a part of what is done: by cost if it is known, else by number.

        Long objects come first (sm121.compile.order), so those left are the cheapest; by their
        number alone, a build would seem to take several times as long as it does.
        """
        if self._spent:
            return sum(left) / self._spent
        return (total - done) / done if done else 0.0
