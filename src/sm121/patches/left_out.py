"""The patches that stack.toml says leave sources out are patches of the series."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from sm121.errors import PinsFault
from sm121.patches.series import Patch
from sm121.pins.model import SourcesLeftOut


def check_left_out(pins: Iterable[SourcesLeftOut], series: Sequence[Patch]) -> None:
    """Raise PinsFault naming the patches in [[sources-left-out]] that the series has not."""
    known = [patch.name for patch in series]
    unknown = sorted({pin.patch for pin in pins} - set(known))
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], known, n=1)
    raise PinsFault(
        f"sources-left-out names {', '.join(unknown)}.",
        cause="the series has no such patch" + (f"; did you mean {near[0]!r}?" if near else ""),
        remedy="Correct the name in stack.toml, or remove the entry.",
    )
