"""`patch --check`: is every patch of a series fit to be sent upstream?"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from sm121.errors import PatchFailed
from sm121.gitrepo import Repository
from sm121.patches.apply import AppliedSeries
from sm121.patches.series import Patch
from sm121.source.stage import EMPTY_TREE

# OpenEmbedded's vocabulary (Yocto contributor guide, "Patch Upstream Status").
_STATUS = re.compile(r"^(Pending|Submitted|Backport|Inappropriate)(\s*\[.+\])?$")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
# git-diff(1), "Generating patch text with -p".
_HEADERS = (
    "diff --git ", "index ", "old mode ", "new mode ", "new file mode ", "deleted file mode ",
    "similarity index ", "dissimilarity index ", "rename ", "copy ", "--- ", "+++ ", "\\ ",
    "Binary files ", "GIT binary patch",
)  # fmt: skip
_NEEDS_TEXT = ("Submitted", "Backport", "Inappropriate")


def lint_series(
    repository: Repository, series: Sequence[Patch], applied: AppliedSeries
) -> list[str]:
    """Check headers and results of an applied series; returns how many checks of what ran.

    Checks per patch: subject, body, Upstream-Status (with a text where one is needed),
    Signed-off-by, no offset, nothing in or after the diff that is no part of it, no whitespace
    fault (`git diff --check`), no file outside of upstream's folders, and that each Python file
    it touches still parses. Raises PatchFailed listing every fault.
    """
    faults: list[str] = []
    parent = applied.base
    checked = 0
    folders = {
        str(PurePosixPath(path).parent)
        for path in repository.changed_paths(EMPTY_TREE, applied.base)
    }
    for patch, result in zip(series, applied.patches, strict=True):
        text = patch.path.read_bytes().decode(errors="surrogateescape")
        author, subject, body = repository.mailinfo(patch.path)
        faults += [f"{patch.path.name}: {fault}" for fault in header_faults(subject, body)]
        if not author.name or not author.email or not author.date:
            faults.append(f"{patch.path.name}: no author or date (From:, Date:)")
        if number := junk_after_diff(text):
            faults.append(
                f"{patch.path.name}:{number}: no part of the diff (a signature? --no-signature)"
            )
        if result.status == "upstreamed":
            faults.append(f"{patch.path.name}: upstream has it; delete it from the series")
            continue
        if result.offset:
            faults.append(
                f"{patch.path.name}: applies only {result.offset} lines off; export it again"
            )
        faults += [
            f"{patch.path.name}: {fault}"
            for fault in repository.whitespace_faults(parent, result.commit)
        ]
        faults += [
            f"{patch.path.name}: {path} is in a folder that upstream has not"
            for path in repository.changed_paths(parent, result.commit)
            if str(PurePosixPath(path).parent) not in folders
        ]
        count, broken = python_faults(repository, parent, result.commit)
        checked += count
        faults += [f"{patch.path.name}: {fault}" for fault in broken]
        parent = result.commit
    if faults:
        raise PatchFailed(
            f"The series has {len(faults)} fault(s).",
            details=faults,
            remedy="docs/patches.md says what a patch must look like.",
        )
    return [
        f"{len(series)} patches: headers, order, no fuzz, no offset, no junk, upstream's folders only",
        f"{checked} Python files parse",
    ]


def junk_after_diff(text: str) -> int:
    """Number of the first line behind the first `diff --git` that belongs to no diff, else 0.

    git skips such lines without a word: a signature, a reply's quotation, half a hunk.
    """
    lines = text.split("\n")
    start = next((n for n, line in enumerate(lines) if line.startswith("diff --git ")), len(lines))
    removed = added = 0  # lines that the current hunk still has to have
    binary = False
    for number, line in enumerate(lines[start:], start + 1):
        if removed > 0 or added > 0:
            removed -= line[:1] in ("-", " ", "")
            added -= line[:1] in ("+", " ", "")
            if line[:1] not in ("-", "+", " ", "\\", ""):
                return number
        elif hunk := _HUNK.match(line):
            removed, added = (int(count or 1) for count in hunk.groups())
        elif line.startswith(_HEADERS):
            binary = line.startswith("GIT binary patch") or (
                binary and not line.startswith("diff --git ")
            )
        elif line and not binary:
            return number
    return 0


def python_faults(repository: Repository, old: str, new: str) -> tuple[int, list[str]]:
    """How many Python files differ between two trees, and which of the new ones don't parse."""
    checked, faults = 0, []
    for path in repository.changed_paths(old, new):
        content = repository.read(new, path)
        if path.endswith((".py", ".pyi")) and content is not None:
            checked += 1
            try:
                ast.parse(content.encode(errors="surrogateescape"), path)
            except SyntaxError as error:
                faults.append(f"{path}:{error.lineno}: {error.msg}")
    return checked, faults


def header_faults(subject: str, body: str) -> list[str]:
    """Faults in one patch's message."""
    faults = []
    if not subject:
        faults.append("no subject")
    elif len(subject) > 100:
        faults.append("subject longer than 100 characters")
    statuses = re.findall(r"^Upstream-Status:\s*(.*)$", body, re.MULTILINE)
    if len(statuses) != 1:
        faults.append(f"{len(statuses)} Upstream-Status trailers, wanted one")
    elif not (match := _STATUS.match(statuses[0].strip())):
        faults.append(
            f"Upstream-Status {statuses[0]!r}: wanted Pending, Submitted [link], "
            "Backport [link] or Inappropriate [reason]"
        )
    elif match[1] in _NEEDS_TEXT and not match[2]:
        faults.append(f"Upstream-Status {match[1]} needs a link or reason in brackets")
    if "Signed-off-by: " not in body:
        faults.append("no Signed-off-by")
    if len(body.splitlines()) < 4:
        faults.append("the message does not say symptom, cause, fix and how it was tested")
    return faults
