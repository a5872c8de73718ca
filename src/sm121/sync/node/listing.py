"""RELEASE: the list of a release's files, in the format of sha256sum(1), and its id.

The list is what both ends agree on: its digest is the release's id, and a name in it can never
lead out of the release's folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from sm121.sync.node.refusal import CHECK, Refused

FILE = "RELEASE"
SIGNATURE = "RELEASE.sig"
NAMESPACE = "sm121"
ID_LENGTH = 16
# What a release's folder holds beside the files of its list.
RESERVED = (FILE, SIGNATURE, "env", "serve")
# Where the wheelhouse lies in it, and what lists that.
WHEELHOUSE = "wheelhouse"
SUMS = f"{WHEELHOUSE}/SHA256SUMS"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[0-9a-f]{16}")
# One folder at most (`head/serve.env`). No leading dot: neither `..` nor hidden files.
_PART = r"[A-Za-z0-9_+][A-Za-z0-9._+!@-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})?")


def is_id(text: str) -> bool:
    """Is it the id of a release?"""
    return _ID.fullmatch(text) is not None


def check_name(name: str) -> str:
    """The name itself. Raises Refused for one that could leave the release's folder."""
    if not _NAME.fullmatch(name) or name.split("/")[0] in RESERVED:
        raise Refused(
            CHECK,
            f"{name!r} is not a name that a release may hold.",
            cause="a name is relative, without `..`, links or hidden files, in one folder at most; "
            f"{', '.join(RESERVED)} are taken",
            remedy="The list was not made by sm121: make the wheelhouse anew with `nox -s build`.",
        )
    return name


def parse_listing(text: str) -> dict[str, str]:
    """name → sha256 of a list in sha256sum's format. Raises Refused for anything else."""
    files: dict[str, str] = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        if not _DIGEST.fullmatch(digest) or name in files:
            raise Refused(
                CHECK, f"{line!r} is not a line of a list of files.",
                cause="each is a sha256, two spaces and a name that occurs once",
            )  # fmt: skip
        files[check_name(name)] = digest
    for name in files:
        if name.partition("/")[0] in files and "/" in name:
            raise Refused(CHECK, f"{name!r}: its folder is a file of the same list.")
    return files


def render_listing(files: Mapping[str, str]) -> str:
    """The list's text, sorted by name, so that equal releases have equal ids."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))


def release_id(text: str) -> str:
    """The first 16 hex digits of the list's sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]
