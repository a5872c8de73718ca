"""Resolutions of conflicts, remembered: by the conflict itself, in files that can be reviewed.

git's own rerere keeps two whole copies of the conflicted file in a cache that is not shared and
expires. Here one resolution is one small diff, from the text with conflict markers to the text
without, named by a digest of what is between the markers:

    patches/vllm/rerere/<digest>.patch      shared: in the project's repository
    build/rebase/rerere/<digest>.patch      this machine's, until a rebase is accepted

So the same conflict is the same wherever it appears: on another release, in a moved file, after
an abort. It is used only where the whole diff applies to the conflicted text, edits that the
person made outside the markers included.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121.files import write_atomic
from sm121.gitseries import LABELS, Merged, SeriesRepository

_REGION = re.compile(
    rb"^<<<<<<< %s\r?\n(.*?)^>>>>>>> %s\r?$" % tuple(label.encode() for label in (LABELS[0], LABELS[2])),
    re.MULTILINE | re.DOTALL,
)  # fmt: skip


def conflict_id(text: bytes) -> str:
    """Digest of all conflicts of one file, '' if it has none (removed, binary, a link)."""
    regions = _REGION.findall(text)
    if not regions:
        return ""
    digest = hashlib.sha256()
    for region in regions:
        digest.update(b"%d:%s" % (len(region), region))
    return digest.hexdigest()[:32]


def has_markers(text: bytes) -> bool:
    """Is a marker of ours left? Upstream's own text may have '=======' lines."""
    return bool(re.search(rb"^(<<<<<<< %s|>>>>>>> %s)\r?$" % (LABELS[0].encode(), LABELS[2].encode()),
                          text, re.MULTILINE))  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Where resolutions are looked for (all folders) and kept (the first)."""

    own: Path
    shared: Path
    repository: SeriesRepository

    def recall(self, merged: Merged) -> tuple[dict[str, bytes], tuple[str, ...]]:
        """Conflicted files with their remembered resolutions, and the paths without one."""
        contents: dict[str, bytes] = {}
        open_paths = []
        for path, text in self._conflicted(merged):
            known = self._recall(text)
            if known is None:
                open_paths.append(path)
            else:
                contents[path] = known
        return contents, tuple(open_paths)

    def markers(self, merged: Merged, paths: Sequence[str]) -> dict[str, bytes]:
        """Those files of some that have conflict markers, as a person is to see them."""
        return {path: text for path, text in self._conflicted(merged) if text and path in paths}

    def learn(self, merged: Merged, resolved: str, *, patch: str, onto: str) -> None:
        """Keep what a person made of the conflicts of a merge."""
        for path, text in self._conflicted(merged):
            name = conflict_id(text)
            there = self.repository.entry(resolved, path)
            if not name or there is None or not there.mode.startswith("100"):
                continue
            diff = self.repository.blob_diff(self.repository.store(text), there.blob, context=3)
            if not diff:
                continue
            head = f"{patch}, {path}, onto vLLM {onto}\n\n--- a/file\n+++ b/file\n"
            write_atomic(self.own / f"{name}.patch", head.encode(errors="backslashreplace") + diff)

    def names(self, merged: Merged) -> tuple[str, ...]:
        """File names of the resolutions that are known for a merge's conflicts."""
        found = []
        for _, text in self._conflicted(merged):
            name = f"{conflict_id(text)}.patch"
            if any((folder / name).is_file() for folder in (self.own, self.shared)):
                found.append(name)
        return tuple(found)

    def _conflicted(self, merged: Merged) -> Iterator[tuple[str, bytes]]:
        for path in merged.paths:
            yield path, self.repository.conflict_text(merged, path)

    def _recall(self, text: bytes) -> bytes | None:
        name = conflict_id(text)
        for folder in (self.own, self.shared):
            known = folder / f"{name}.patch"
            if name and known.is_file():
                tree = self.repository.with_files(self.repository.empty_tree(), {"file": text})
                result, after = self.repository.apply(tree, known)
                entry = self.repository.entry(after, "file") if result.ok else None
                if entry and not has_markers(resolved := self.repository.blob(entry.blob)):
                    return resolved
        return None
