"""RECORD of a wheel and of an installed distribution; where a wheel's files end up.

Standard library only: `sync` sends this module to nodes. Format:
https://packaging.python.org/specifications/recording-installed-packages/
"""

from __future__ import annotations

import base64
import csv
import io
from dataclasses import dataclass

# Of an installed path, from site-packages (lib/pythonX.Y/site-packages) to the environment.
PREFIX = "../../.."


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A line of RECORD: digest as 'sha256=<urlsafe base64, no padding>' or '', size or None."""

    digest: str
    size: int | None


def installed_path(member: str, distribution: str) -> tuple[str, bool]:
    """Path relative to site-packages of a wheel's member, and whether installing rewrites it."""
    head, _, rest = member.partition("/")
    if not head.endswith(".data"):
        return member, False
    scheme, _, path = rest.partition("/")
    if scheme in ("purelib", "platlib"):
        return path, False
    if scheme == "headers":
        return f"{PREFIX}/include/site/{distribution}/{path}", False
    return (f"{PREFIX}/bin/{path}", True) if scheme == "scripts" else (f"{PREFIX}/{path}", False)


def parse_record(text: str) -> dict[str, Entry]:
    """RECORD's lines by path. Lines without a digest have an empty one."""
    return {
        row[0]: Entry(
            digest=row[1] if len(row) > 1 else "",
            size=int(row[2]) if len(row) > 2 and row[2].isdigit() else None,
        )
        for row in csv.reader(io.StringIO(text))
        if row
    }


def encode_digest(raw: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
