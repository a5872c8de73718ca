"""What a node is asked to do, a method a request."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm121.abi.elf import read_elf
from sm121.abi.source import FileSource, Malformed
from sm121.doctor import facts
from sm121.sync.node import installed, installing
from sm121.sync.node.listing import WHEELHOUSE, parse_listing, release_id
from sm121.sync.node.lock import Lock
from sm121.sync.node.refusal import ENVIRONMENT, HASH, Refused
from sm121.sync.node.releases import Releases, is_finished
from sm121.sync.node.store import Store

# As sm121.abi.scan, which needs more than the standard library (a test compares them).
_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+\+cuda\d+\.\d+)")
_NCCL = "nvidia/nccl/lib/libnccl.so.2"


class Work:
    """root: the folder on this node that everything lies in. make: make it. say: where a program's
    lines go."""

    def __init__(self, root: Path, *, make: bool, say: Callable[[str], None]) -> None:
        check_root(root, make=make)
        self._say = say
        self.store, self.releases, self.root = Store(root), Releases(root), root
        self.lock: Lock | None = None
        if make:
            self.store.make()
            self.releases.make()

    def hold(self, who: str) -> dict[str, Any]:
        """Take the node's lock until this process ends. who: what others are told."""
        lock = Lock(self.root)
        lock.take(who)
        self.lock = lock
        return {}

    def plan(self, text: str, role: str, signature: str) -> dict[str, Any]:
        """What this node lacks of a release, by hash. Reads every object unless it is current, and
        signed as it is now, if it is or has to be."""
        files, release = parse_listing(text), release_id(text)
        current = self.releases.pointed("current")
        standing = current == release and self.releases.installed(release)
        absent, altered = self.store.damaged(files.values(), thorough=not standing)
        if standing and not (absent or altered):
            # The folder's names are links to the store; a file put in the place of one is not.
            place = self.releases.path(release)
            standing = all(
                (place / name).is_file() and (place / name).samefile(self.store.path(digest))
                for name, digest in files.items()
            )
            have = self.releases.signature(release)
            asked = (self.root / installing.SIGNERS).exists()
            if (signature and have != signature) or (asked and not have):
                standing = False
            if role:
                standing = standing and (place / "serve").is_symlink() and str((place / "serve").readlink()) == role  # fmt: skip
        missing = absent | altered
        return {
            **self.room(sorted(missing)),
            "current": current,
            "standing": standing and not missing,
            "installed": self.releases.installed(release),
            "has_environment": is_finished(self.releases.environment_of(files)),
            "altered": sorted(name for name, digest in files.items() if digest in altered),
        }

    def room(self, missing: list[str]) -> dict[str, Any]:
        """Free bytes, and how much of the missing objects has arrived."""
        usage = os.statvfs(self.root)
        return {
            "missing": missing,
            "arrived": self.store.arriving(missing),
            "free": usage.f_bavail * usage.f_frsize,
        }

    def admit(self, sizes: dict[str, int]) -> dict[str, Any]:
        """Take what arrived (digest → size) into the store; which digests are not right."""
        return {"bad": self.store.admit(sizes)}

    def install(
        self, text: str, signature: str, role: str, options: list[str], again: bool
    ) -> dict[str, Any]:
        """Make the release's folder and environment, and check what is installed. Not yet current."""
        files, release = parse_listing(text), release_id(text)
        signer = installing.check_signature(self.root, text, signature)
        absent, altered = self.store.damaged(files.values(), thorough=False)
        if bad := [name for name, digest in files.items() if digest in absent | altered]:
            raise Refused(HASH, f"{len(bad)} file(s) of the release are not whole on this node.",
                          details=bad[:10], remedy="Run the same command again.")  # fmt: skip
        self.releases.assemble(release, text, signature=signature, role=role, store=self.store)
        house = self.releases.path(release) / WHEELHOUSE
        old = self.releases.environment(release)
        if is_finished(old) and not again:
            return {"release": release, "made": False, "signer": signer, "deviations": []}
        new = self.releases.next_environment(old) if is_finished(old) else old

        def verify() -> list[dict[str, object]]:
            found, _, _ = installed.deviations(new, sorted(house.glob("*.whl")))
            # What an installer leaves of its own is no fault of what was sent.
            return [one for one in found if one["kind"] != "stray"]

        found = installing.install(house, new, options, say=self._say, verify=verify)
        if not found:
            self.releases.use(new, instead_of=old)
        return {"release": release, "made": True, "signer": signer, "deviations": found}

    def switch(self, release: str) -> dict[str, Any]:
        """Make a release current."""
        self.releases.switch(release)
        return {}

    def prune(self, keep: int) -> dict[str, Any]:
        """Remove what is older than the kept releases."""
        return {"removed": self.releases.prune(keep, self.store)}

    def previous(self) -> dict[str, Any]:
        """Where a rollback would lead; changes nothing. Refused if nowhere."""
        old, new = self.releases.way_back()
        return {"from": old, "to": new}

    def rollback(self) -> dict[str, Any]:
        """Make the previous release current again."""
        old, new = self.releases.rollback()
        return {"from": old, "to": new}

    def compare(self) -> dict[str, Any]:
        """The current release against its wheels, and the machine's facts."""
        release = self.releases.pointed("current")
        answer: dict[str, Any] = {
            "release": release,
            "facts": facts.gather(),
            "root": str(self.root),
        }
        if not release or not self.releases.installed(release):
            return {**answer, "release": "", "files": {}, "altered": [], "deviations": [],
                    "count": 0, "digest": "", "nccl": "", "python": ""}  # fmt: skip
        files, place = self.releases.listing(release), self.releases.path(release)
        environment = self.releases.environment(release)
        altered = self.releases.altered(release)
        found, count, digest = installed.deviations(
            environment, [place / n for n in files if n.endswith(".whl") and n not in altered]
        )
        return {
            **answer, "files": files, "deviations": found, "count": count, "digest": digest,
            "altered": altered,
            "nccl": nccl(environment), "python": python_version(environment),
        }  # fmt: skip


def check_root(root: Path, *, make: bool) -> None:
    """Raises Refused unless the folder is ours alone to write, or can be made so."""
    me = os.environ.get("USER") or str(os.getuid())
    remedy = f"There, once: sudo install -d -o {me} -m 755 {root}; or give another folder with --root."  # fmt: skip
    try:
        if make:
            root.mkdir(parents=True, exist_ok=True)
        stat = root.stat()
    except FileNotFoundError as error:
        raise Refused(ENVIRONMENT, f"There is no {root} on this node.", cause="nothing was synced to it",
                      remedy="Sync a wheelhouse to it first, or give another folder with --root.") from error  # fmt: skip
    except OSError as error:
        raise Refused(ENVIRONMENT, f"{root} can't be made on this node.", cause=str(error), remedy=remedy) from error  # fmt: skip
    if stat.st_uid != os.getuid() or stat.st_mode & 0o022:
        raise Refused(
            ENVIRONMENT, f"{root} on this node is not this user's alone.",
            cause=f"owner {stat.st_uid}, mode {stat.st_mode & 0o777:o}; whoever can write there decides what the service runs",
            remedy=remedy,
        )  # fmt: skip


def nccl(environment: Path) -> str:
    """Version and build id of the environment's NCCL; two builds of one version behaved
    differently (cases.md 11)."""
    for library in environment.glob(f"lib/python3.*/site-packages/{_NCCL}"):
        data = library.read_bytes()
        match = _NCCL_VERSION.search(data)
        handle = os.open(library, os.O_RDONLY)
        try:
            build = read_elf(FileSource(handle)).build_id or "none"
        except Malformed:
            build = "unreadable"
        finally:
            os.close(handle)
        version = match[1].decode(errors="replace") if match else "unknown version"
        return f"{version}, build id {build}"
    return ""


def python_version(environment: Path) -> str:
    """The interpreter's version, as pyvenv.cfg has it."""
    try:
        lines = (environment / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return ""
    values = dict(line.partition(" = ")[::2] for line in lines)
    return values.get("version_info", values.get("version", ""))
