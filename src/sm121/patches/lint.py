"""`patch --check`: is every patch of a series fit to be sent upstream?"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from sm121.errors import PatchFailed
from sm121.gitrepo import Repository
from sm121.patches.apply import AppliedSeries
from sm121.patches.series import Patch

# OpenEmbedded's vocabulary (Yocto contributor guide, "Patch Upstream Status").
_STATUS = re.compile(r"^(Pending|Submitted|Backport|Inappropriate)(\s*\[.+\])?$")
_NEEDS_TEXT = ("Submitted", "Backport", "Inappropriate")


def lint_series(
    repository: Repository, series: Sequence[Patch], applied: AppliedSeries
) -> list[str]:
    """Check headers and results of an applied series; returns how many checks of what ran.

    Checks per patch: subject, body, Upstream-Status (with a text where one is needed),
    Signed-off-by, no offset, nothing after the diff, and that each Python file it touches
    still parses. Raises PatchFailed listing every fault.
    """
    faults: list[str] = []
    parent = applied.base
    checked = 0
    for patch, result in zip(series, applied.patches, strict=True):
        text = patch.path.read_text(encoding="utf-8", errors="surrogateescape")
        author, subject, body = repository.mailinfo(patch.path)
        faults += [f"{patch.path.name}: {fault}" for fault in header_faults(subject, body)]
        if not author.name or not author.email or not author.date:
            faults.append(f"{patch.path.name}: no author or date (From:, Date:)")
        if re.search(r"^-- $", text, re.MULTILINE):
            faults.append(f"{patch.path.name}: signature after the diff (use --no-signature)")
        if result.status == "upstreamed":
            faults.append(f"{patch.path.name}: upstream has it; delete it from the series")
            continue
        if result.offset:
            faults.append(
                f"{patch.path.name}: applies only {result.offset} lines off; export it again"
            )
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
    return [f"{len(series)} patches: headers, offsets", f"{checked} Python files parse"]


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
