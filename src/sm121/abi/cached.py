"""Whole reports by content: nothing changed, nothing is done again.

The key covers every wheel's hash, the policy, the target, what was promised, and this
package's own source, so that a corrected check is not answered by an old report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from sm121.abi.report import Report, from_json, to_json
from sm121.files import sha256_file, sha256_text, write_atomic

_KEEP = 50


@cache
def _own_source() -> str:
    here = Path(__file__).parent
    files = sorted(f for f in here.rglob("*") if f.suffix in (".py", ".json", ".toml"))
    return sha256_text(*(sha256_file(f) for f in files))


def key(*, hashes: Mapping[str, str], judged: Sequence[str], parts: Sequence[str]) -> str:
    """hashes: file name → sha256. judged: those of them that are judged. parts: the rest."""
    named = [f"{name}={digest}" for name, digest in sorted(hashes.items())]
    return sha256_text(_own_source(), *named, "judged", *sorted(judged), "parts", *parts)


def find(root: Path, name: str) -> Report | None:
    try:
        return from_json((root / "abi" / "reports" / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return None


def store(root: Path, name: str, report: Report) -> None:
    """Keeps the newest reports only."""
    folder = root / "abi" / "reports"
    write_atomic(folder / f"{name}.json", to_json(report))
    old = sorted(folder.glob("*.json"), key=lambda f: -f.stat().st_mtime_ns)[_KEEP:]
    for file in old:
        file.unlink(missing_ok=True)
