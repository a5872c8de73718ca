"""Write the overlay: members of the release's wheel copied as they are, some replaced.

Canonical as compile.wheel has it (sorted, one time, fixed modes), except that upstream's
compressed bytes are kept: they are part of the pinned file, so the result is one file all the
same, of half the size.
"""

from __future__ import annotations

import copy
import os
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

from sm121.compile.wheel import canonical_member, member_order
from sm121.overlay.release import Release
from sm121.repair.record import Entry
from sm121.repair.wheel import copy_member, record_digest, render_record


def write_overlay(
    release: Release,
    output: Path,
    *,
    dist_info: str,
    edits: Mapping[str, bytes],
    removed: Collection[str],
    epoch: int,
) -> None:
    """Write the wheel under a temporary name and rename it.

    dist_info: the new folder's name. edits: members to replace or add, those of the dist-info
    under its new name; they are stored uncompressed. epoch: seconds, the time of all members.
    """
    old_info = release.wheel.dist_info
    renamed = {
        name: name.replace(old_info, dist_info, 1) if name.startswith(f"{old_info}/") else name
        for name in release.sizes
        if name not in removed and name != f"{old_info}/RECORD"
    }
    lines = {new: release.wheel.record[old] for old, new in renamed.items()}
    lines |= {name: Entry(digest=record_digest(data), size=len(data)) for name, data in edits.items()}  # fmt: skip
    record_name = f"{dist_info}/RECORD"
    ordered = {name: lines[name] for name in sorted(lines, key=member_order)}
    content = {**edits, record_name: render_record(ordered, record_name).encode()}
    sources = {new: old for old, new in renamed.items() if new not in content}
    temporary = output.with_name(f".{output.name}.tmp")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(release, temporary, sources, content, epoch)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(output)


def _write(
    release: Release,
    output: Path,
    sources: Mapping[str, str],
    content: Mapping[str, bytes],
    epoch: int,
) -> None:
    """sources: members to copy, by their new name. content: members that are written anew."""
    with zipfile.ZipFile(release.wheel.path) as old, zipfile.ZipFile(output, "w") as new:
        infos = {info.filename: info for info in old.infolist()}
        for name in sorted([*sources, *content], key=member_order):
            fresh = canonical_member(name, epoch, like=infos.get(sources.get(name, name)))
            if name in content:
                new.writestr(fresh, content[name], zipfile.ZIP_STORED)
                continue
            info = infos[sources[name]]
            header = copy.copy(info)
            header.filename = header.orig_filename = name
            header.date_time, header.external_attr = fresh.date_time, fresh.external_attr
            header.create_system, header.extra, header.comment = fresh.create_system, b"", b""
            copy_member(old, info, new, header)
    with output.open("rb") as written:
        os.fsync(written.fileno())
