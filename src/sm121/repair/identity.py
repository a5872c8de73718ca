"""Which NCCL a file is: version and build id. Two builds of one version behaved differently."""

from __future__ import annotations

import zipfile
from pathlib import Path

from sm121.abi.elf import read_elf
from sm121.abi.scan import NCCL_VERSION
from sm121.abi.source import BytesSource, Malformed

LIBRARY = "libnccl.so.2"


def identify(path: Path) -> str:
    """'2.30.4+cuda13.0, build id 1a2b…' of a libnccl; what can't be read is said to be unknown."""
    try:
        data = path.read_bytes()
        build = read_elf(BytesSource(data)).build_id or "none"
    except (OSError, Malformed) as error:
        return f"unreadable ({error})"
    found = NCCL_VERSION.search(data)
    return f"{found.group(1).decode() if found else 'unknown version'}, build id {build}"


def identify_member(wheel: Path, member: str, scratch: Path) -> str:
    """The same of a file inside a wheel, unpacked into the scratch folder for it."""
    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(member, scratch))
    try:
        return identify(unpacked)
    finally:
        unpacked.unlink()
