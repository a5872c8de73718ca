"""Which build a package is: what METADATA never says and `<package>/version.py` does."""

from __future__ import annotations

import re

_VERSION = re.compile(r"""^__version__\s*(?::\s*\w+\s*)?=\s*['"]([^'"]+)['"]""", re.MULTILINE)
_NO_CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*None", re.MULTILINE)


def build_from_version(text: str) -> str:
    """'cu130' or 'cpu' from the text of a version.py; '' if it does not say.

    torch's has `cuda: Optional[str] = None` in a CPU build, whatever its version reads.
    """
    found = _VERSION.search(text)
    local = found.group(1).partition("+")[2] if found else ""
    return local or ("cpu" if _NO_CUDA.search(text) else "")


def version_file(distribution: str) -> str:
    """Where such a file is, relative to site-packages."""
    return f"{distribution.replace('-', '_')}/version.py"
