"""What the checks look at: files of the system, environment variables, and pins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm121.context import Context
from sm121.pins.model import OVERLAY

# What sshd gives a session if no file says otherwise (OpenSSH, --with-default-path).
_STD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """root: of the file system, for /proc and /etc (tests have their own). environment, cwd: of
    this process."""

    context: Context
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cwd: Path = field(default_factory=Path.cwd)

    @property
    def compiles(self) -> bool:
        """Does the profile need compilers at all?"""
        return self.context.options.profile != OVERLAY

    def read(self, path: str) -> str:
        """Text of a file of the system, '' if it can't be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def which(self, program: str, path: str | None = None) -> Path | None:
        """Where a program is, by this process's PATH or another one."""
        search = self.environment.get("PATH", "") if path is None else path
        # An empty PATH is empty: shutil.which would take the default for it.
        found = shutil.which(program, path=search) if search else None
        return Path(found) if found else None

    @property
    def service_path(self) -> str:
        """PATH of a non-interactive ssh shell or a service: /etc/environment's (pam_env reads it
        for both), else the default. What ~/.bashrc or ~/.profile add is not there."""
        for line in self.read("/etc/environment").splitlines():
            name, _, value = line.strip().removeprefix("export ").partition("=")
            if name.strip() == "PATH":
                return value.strip().strip("\"'")
        return _STD_PATH
