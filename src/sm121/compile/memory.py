"""How much memory this machine can give now. Standard library only: the launcher needs it too."""

from __future__ import annotations

_MEMINFO = "/proc/meminfo"
_CGROUP = "/sys/fs/cgroup"


def available_memory() -> int:
    """Bytes that can be used now: the system's MemAvailable, or less if a cgroup limits us.

    proc(5), /proc/meminfo; kernel's cgroup-v2, memory.max. Raises OSError without /proc.
    """
    words = next(line for line in _read(_MEMINFO).splitlines() if line.startswith("MemAvailable:"))
    available = int(words.split()[1]) * 1024
    try:
        limit = _read(f"{_CGROUP}/memory.max").strip()
        used = int(_read(f"{_CGROUP}/memory.current"))
        if limit != "max":
            available = min(available, int(limit) - used + _reclaimable())
    except (OSError, ValueError):
        pass
    return available


def _reclaimable() -> int:
    """Page cache that the kernel gives up at once (cgroup-v2, memory.stat, inactive_file)."""
    try:
        lines = _read(f"{_CGROUP}/memory.stat").splitlines()
        return int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
