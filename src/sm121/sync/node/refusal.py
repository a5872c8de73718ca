"""How the node says no. Becomes an Sm121Error at the other end."""

from __future__ import annotations

from collections.abc import Sequence

# Kinds, which the other end maps to its own errors (sm121.sync.agent).
CHECK, HASH, ENVIRONMENT, DISK, BUSY, TOOL = "check", "hash", "environment", "disk", "busy", "tool"


class Refused(Exception):
    """kind: one of the above. what, cause, remedy, details: as in sm121.errors."""

    def __init__(
        self,
        kind: str,
        what: str,
        *,
        cause: str = "",
        remedy: str = "",
        details: Sequence[str] = (),
    ) -> None:
        super().__init__(what)
        self.kind, self.what, self.cause, self.remedy = kind, what, cause, remedy
        self.details = list(details)
