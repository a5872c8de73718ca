"""Run programs inside a root of the target, emulated where need be; no engine, no privilege.

A user and a mount namespace (unshare, chroot: util-linux and coreutils) make what a container
engine would: a root that is not written to, the folders that are needed under their own paths,
and no network unless asked for. The emulator is registered inside the namespace only, so programs
that start programs work (`install.py` starts uv), and the machine stays as it was.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.errors import CompilerMissing, EnvironmentFault
from sm121.target.root import Root
from sm121.toolkit.machine import host_machine, install_hint, require_programs

_SCRIPT = Path(__file__).with_name("enter.sh")
# e_ident and e_machine of an ELF file, and which of their bits count: as in Debian's
# qemu-user-static (/usr/share/binfmts). The kernel reads \xNN itself.
_MAGIC = {
    "aarch64": r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:"
    r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff",
}
_SETTING = "kernel.apparmor_restrict_unprivileged_userns"
_RESTRICTED = Path("/proc/sys", *_SETTING.split("."))
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """root: what is entered. scratch: a folder of ours that is mounted over; what is written into the
    root is in memory, and gone with the program. binds: folders that are seen inside under the same path. network: is there one?"""

    root: Root
    scratch: Path
    binds: tuple[Path, ...] = ()
    network: bool = False

    @property
    def emulated(self) -> bool:
        return self.root.machine != host_machine()

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """The whole command line that runs `argv` inside, in its folder /.

        Raises CompilerMissing if a program for it is not installed.
        """
        require_programs(
            {"unshare": "makes the namespaces (util-linux)", "chroot": "enters the root"}
        )
        qemu = emulator(self.root.machine) if self.emulated else ""
        return [
            "unshare", "--user", "--map-root-user", "--mount", *([] if self.network else ["--net"]),
            "sh", str(_SCRIPT), str(self.root.path.resolve()), str(self.scratch.resolve()),
            self.root.machine, qemu, _MAGIC[self.root.machine] if self.emulated else "",
            *(str(bind.resolve()) for bind in self.binds), "--", *map(str, argv),
        ]  # fmt: skip

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Nothing of the user's: what programs need to start, and `more`."""
        return {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **(more or {})}

    def check(self) -> str:
        """Enter it once; returns the version of its Python ('3.11.2').

        Raises EnvironmentFault if this machine does not let us, with what to do.
        """
        probe = "import sys; print(sys.version.split()[0])"
        finished = proc.run(
            self.command([f"/usr/bin/python{self.root.recipe.python}", "-I", "-c", probe]),
            env=self.environment(), check=False,
        )  # fmt: skip
        lines = finished.output.splitlines() or ["no output"]
        if finished.returncode == 0:
            return lines[-1]
        raise EnvironmentFault(
            f"No program of {self.root.machine} can be run in a root of its own here.",
            cause=lines[-1].removeprefix("sm121-enter: "),
            remedy=f"{_apparmor()}It takes Linux 6.7 and user namespaces that may mount; or, on an older kernel, an "
            "emulator registered for the whole machine (package binfmt-support, or systemd's "
            "binfmt). With a container engine, Dockerfile.verify does the same (docs/verify.md).",
        )


def _apparmor(setting: Path = _RESTRICTED) -> str:
    """What Ubuntu since 23.10 needs first, '' elsewhere: a namespace of an unprivileged user can do
    nothing there (apparmor's userns restriction)."""
    try:
        restricted = setting.read_text().strip() == "1"
    except OSError:
        return ""
    return f"`sudo sysctl -w {_SETTING}=0` (Ubuntu's default forbids it), and try again. " if restricted else ""  # fmt: skip


def emulator(machine: str) -> str:
    """Path of qemu for the machine. Raises CompilerMissing, EnvironmentFault for a machine that
    is not emulated."""
    if machine not in _MAGIC:
        raise EnvironmentFault(
            f"No program of {machine} can be run on a {host_machine()}.",
            cause=f"what is emulated is {', '.join(_MAGIC)}",
            remedy=f"Run it on a machine of {machine}; `nox -s verify-abi` reads the wheelhouse here.",
        )
    name = f"qemu-{machine}-static"
    if found := shutil.which(name):
        return found
    raise CompilerMissing(
        f"{name} was not found.", cause=f"it runs {machine}'s programs on a {host_machine()}",
        remedy=install_hint("qemu-user-static", "qemu-user-static"),
    )  # fmt: skip
