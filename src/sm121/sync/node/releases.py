"""`releases/<id>/`, `current` and `previous`, and which of them are kept.

    releases/<id>/           RELEASE, RELEASE.sig, and hard links to objects of the store:
    releases/<id>/wheelhouse   the wheelhouse
    releases/<id>/head, worker   what each role of the nodes needs to serve
    releases/<id>/serve      -> head or worker, on a node that has a role
    releases/<id>/env        -> ../../environments/<digest of the wheelhouse>
    environments/<digest>/   what install.py made; releases of one wheelhouse share it. Made anew it
                             is `<digest>.2`, and so on
    current, previous        -> releases/<id>
    order                    ids in the order in which they became current

A release's folder gets its name only when it is whole; `current` is switched by renaming a link.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sm121.sync.node.listing import FILE, SIGNATURE, SUMS, is_id, parse_listing
from sm121.sync.node.refusal import CHECK, ENVIRONMENT, Refused
from sm121.sync.node.store import Store, sha256, write_atomic

# Put into an environment once every file of it was compared with the wheels.
VERIFIED = "sm121-verified"


class Releases:
    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "releases"
        self.environments = root / "environments"

    def make(self) -> None:
        for folder in (self.folder, self.environments):
            folder.mkdir(exist_ok=True)

    def path(self, release: str) -> Path:
        return self.folder / release

    def pointed(self, name: str) -> str:
        """Id that `current` or `previous` points to, '' if none."""
        try:
            target = str((self.root / name).readlink())
        except OSError:
            return ""
        release = target.removeprefix("releases/")
        return release if is_id(release) else ""

    def listing(self, release: str) -> dict[str, str]:
        """A release's files; {} if it is not there."""
        try:
            return parse_listing((self.path(release) / FILE).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return {}

    def signature(self, release: str) -> str:
        """A release's signature; '' if it has none."""
        try:
            return (self.path(release) / SIGNATURE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    def altered(self, release: str) -> list[str]:
        """Names in a release's folder that are not what its list says; every file is read."""
        files = self.listing(release)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda name: sha256(self.path(release) / name), files)
            return [name for name, got in zip(files, found, strict=True) if got != files[name]]

    def environment(self, release: str) -> Path:
        """Where the environment of a release lies, be it there or not: what its `env` names."""
        try:
            return self.environments / (self.path(release) / "env").readlink().name
        except OSError:
            return self.environments / "none"

    def environment_of(self, files: Mapping[str, str]) -> Path:
        """The environment of a wheelhouse: the newest that is finished, else where the first goes.

        files: of a release that holds it. One that is made anew is another folder (`<digest>.2`),
        so that what is current stays whole until the new one is.
        """
        first = self.environments / files.get(SUMS, "none")[:16]
        return max(filter(is_finished, self._all_of(first)), key=_turn, default=first)

    def next_environment(self, environment: Path) -> Path:
        """Where the environment is made anew, beside one that stands."""
        first = environment.with_suffix("")
        turn = max((_turn(one) for one in self._all_of(first)), default=0) + 1
        return first.with_suffix(f".{turn}")

    def _all_of(self, first: Path) -> list[Path]:
        return [one for one in (first, *self.environments.glob(f"{first.name}.*")) if one.is_dir()]

    def use(self, new: Path, *, instead_of: Path) -> None:
        """Let every release that has one environment have another, by renaming a link in each."""
        for release in filter(is_id, (path.name for path in self.folder.iterdir())):
            if self.environment(release) == instead_of:
                _link(self.path(release) / "env", f"../../environments/{new.name}")
                _sync_folder(self.path(release))

    def installed(self, release: str) -> bool:
        """Is it whole, with an environment that install.py finished?"""
        return bool(self.listing(release)) and is_finished(self.environment(release))

    def assemble(
        self, release: str, text: str, *, signature: str, role: str, store: Store
    ) -> None:  # fmt: skip
        """Make (or mend) the release's folder out of objects that the store has. role: the folder
        of it that `serve` is to name, '' for none."""
        final = self.path(release)
        files = parse_listing(text)
        making = final if final.is_dir() else self.folder / f".{release}.making"
        if making != final:
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
        for name, digest in files.items():
            place, wanted = making / name, store.path(digest)
            if place.parent.is_symlink():
                raise Refused(
                    CHECK, f"{place.parent} is a link.", cause="sm121 made a folder there"
                )
            place.parent.mkdir(exist_ok=True)
            if not place.is_symlink() and place.exists() and place.samefile(wanted):
                continue
            temporary = place.with_name(f".{place.name}.tmp")
            temporary.unlink(missing_ok=True)
            os.link(wanted, temporary)
            temporary.replace(place)
        write_atomic(making / FILE, text)
        if signature:
            write_atomic(making / SIGNATURE, signature)
        _link(making / "env", f"../../environments/{self.environment_of(files).name}")
        if role and not any(name.startswith(f"{role}/") for name in files):
            raise Refused(CHECK, f"The release holds no folder {role!r}.")
        if role:
            _link(making / "serve", role)
        _sync_folder(making)
        if making != final:
            making.rename(final)
            _sync_folder(self.folder)

    def switch(self, release: str) -> None:
        """Make it current, and what was current previous."""
        if not self.installed(release):
            raise Refused(
                CHECK, f"Release {release} is not whole on this node.",
                remedy="Run the same sync again.",
            )  # fmt: skip
        old = self.pointed("current")
        if old and old != release:
            self._point("previous", old)  # first: a kill in between leaves a rollback that is none
        self._point("current", release)
        order = [one for one in self.order() if one != release]
        write_atomic(self.root / "order", "".join(f"{one}\n" for one in [*order, release]))

    def rollback(self) -> tuple[str, str]:
        """Make the previous release current again; (from, to)."""
        old, new = self.way_back()
        self.switch(new)
        return old, new

    def way_back(self) -> tuple[str, str]:
        """From and to of a rollback. Raises Refused if there is nothing whole to go back to."""
        old, new = self.pointed("current"), self.pointed("previous")
        if not new or new == old:
            raise Refused(
                ENVIRONMENT, "There is no previous release on this node.",
                cause=f"current is {old or 'nothing'}; `previous` is set when another becomes current",
                remedy="Sync the wheelhouse that you want instead.",
            )  # fmt: skip
        if not self.installed(new):
            raise Refused(
                CHECK, f"The previous release {new} is no longer whole.",
                remedy="Sync its wheelhouse again instead.",
            )  # fmt: skip
        return old, new

    def order(self) -> list[str]:
        try:
            lines = (self.root / "order").read_text().split()
        except OSError:
            return []
        return [line for line in lines if is_id(line)]

    def prune(self, keep: int, store: Store) -> list[str]:
        """Remove all but the last `keep` releases, and what only the others used; never current,
        previous, or what a process of this user still runs. Returns the removed ids."""
        named = {self.pointed("current"), self.pointed("previous")}
        kept = {*named, *self.order()[-keep:]} - {""}
        here = [p.name for p in self.folder.iterdir() if is_id(p.name)]
        running = set(mapped_files())
        for one in here:
            # /proc has real paths, and the root may lie behind a link.
            place = f"{self.environment(one).resolve()}/"
            if one not in kept and any(path.startswith(place) for path in running):
                kept.add(one)
        gone = [one for one in here if one not in kept]
        wanted = {digest for one in kept for digest in self.listing(one).values()}
        used = {self.environment(one) for one in kept}
        for one in gone:
            doomed = self.folder / f".{one}.removing"
            shutil.rmtree(doomed, ignore_errors=True)
            self.path(one).rename(doomed)
            shutil.rmtree(doomed)
        for environment in self.environments.iterdir():
            place = f"{environment.resolve()}/"
            if environment not in used and not any(path.startswith(place) for path in running):
                shutil.rmtree(environment)
        store.forget(wanted)
        return gone

    def _point(self, name: str, release: str) -> None:
        _link(self.root / name, f"releases/{release}")
        _sync_folder(self.root)


def _link(place: Path, target: str) -> None:
    """A symbolic link, in the place of what had its name, by renaming."""
    temporary = place.with_name(f".{place.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(place)


def _turn(environment: Path) -> int:
    """1 for the first environment of a wheelhouse, n for `<digest>.n`."""
    return int(environment.suffix[1:] or 1)


def is_finished(environment: Path) -> bool:
    """Did install.py finish it, and was it found to be as the wheels are?"""
    return (environment / VERIFIED).is_file()


def mapped_files() -> Iterator[str]:
    """Files that running processes have mapped, as far as this user may see (proc(5))."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if (at := line.find("/")) > 0:
                yield line[at:]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
