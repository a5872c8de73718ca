"""The one place that prints.

On a terminal: colours and one live progress line. Elsewhere (CI, ssh without tty, a pipe):
plain lines, a progress line at most every few seconds, no control characters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from sm121.errors import Sm121Error

_COLOURS = {
    "green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[31m", "bold": "\x1b[1m", "dim": "\x1b[2m",
}  # fmt: skip
_PLAIN_INTERVAL_S = 5.0
_TTY_INTERVAL_S = 0.1


def human_bytes(count: float) -> str:
    """Bytes as kB, MB or GB (decimal, as disk and wheel sizes are given), e.g. '419.7 MB'."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def human_seconds(seconds: float) -> str:
    """Seconds as '0.4 s', '52 s', '3 min 05 s' or '2 h 10 min'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} min"


@dataclass(slots=True)
class Ui:
    """Printer. `out` is where results go; everything for a person goes to `err`."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: sys.stderr)
    quiet: bool = False
    _progress_open: bool = False

    @property
    def tty(self) -> bool:
        return self.err.isatty()

    def style(self, text: str, colour: str) -> str:
        return f"{_COLOURS[colour]}{text}\x1b[0m" if self.tty else text

    def _line(self, text: str) -> None:
        if self._progress_open:
            self.err.write("\r\x1b[K")
            self._progress_open = False
        # A file name that is not UTF-8 must not stop the message that names it.
        self.err.write(text.encode(errors="backslashreplace").decode() + "\n")
        self.err.flush()

    def result(self, text: str) -> None:
        """Machine-readable or final output, to standard output."""
        self.out.write(text if text.endswith("\n") else text + "\n")
        self.out.flush()

    def say(self, text: str = "") -> None:
        if not self.quiet:
            self._line(text)

    def note(self, text: str) -> None:
        """Something the user did not ask for but must be able to read (a fallback, an omission)."""
        self._line(f"  {self.style('note:', 'yellow')} {text}")

    def stage(self, name: str, verdict: str, reason: str) -> None:
        """One line per stage: `verdict` is run, skip or done."""
        colour = {"run": "bold", "skip": "dim", "done": "green"}.get(verdict, "bold")
        self.say(f"{self.style(f'{verdict:>5}', colour)}  {name:<11} {reason}")

    def error(self, error: Sm121Error) -> None:
        """Print a failure: what, details, cause, remedy, each on its own line."""
        self._line(f"{self.style('error:', 'red')} {error.what}")
        for line in error.details:
            self._line(f"    {line}")
        if error.cause:
            self._line(f"  {self.style('why:', 'bold')}  {error.cause}")
        if error.remedy:
            self._line(f"  {self.style('next:', 'bold')} {error.remedy}")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table with left-aligned columns; numbers come formatted."""
        body = [list(row) for row in rows]
        widths = [max(len(r[i]) for r in [list(header), *body]) for i in range(len(header))]
        for index, row in enumerate([list(header), *body]):
            line = "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
            self.say("  " + (self.style(line, "bold") if index == 0 else line))

    @contextmanager
    def progress(self, label: str) -> Iterator[Progress]:
        bar = Progress(ui=self, label=label)
        try:
            yield bar
        finally:
            if self._progress_open:
                self.err.write("\r\x1b[K")
                self._progress_open = False


@dataclass(slots=True)
class Progress:
    """Progress of one long step: a single rewritten line on a terminal, sparse lines elsewhere."""

    ui: Ui
    label: str
    _last: float = 0.0
    _last_text: str = ""

    def update(self, text: str, *, final: bool = False) -> None:
        now = time.monotonic()
        interval = _TTY_INTERVAL_S if self.ui.tty else _PLAIN_INTERVAL_S
        if self.ui.quiet or text == self._last_text or (now - self._last < interval and not final):
            return
        self._last, self._last_text = now, text
        line = f"       {self.label:<11} {text}"
        if self.ui.tty:
            self.ui.err.write("\r\x1b[K" + line[:200])
            self.ui._progress_open = True
        else:
            self.ui.err.write(line + "\n")
        self.ui.err.flush()
