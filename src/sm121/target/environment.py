"""Step `install`: a clean environment, made of the wheelhouse by its own install.py.

A wheelhouse without dependencies has none. Its wheel is then unpacked, as an installer would,
beside what the stack's lock has of torch and torchvision, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm121.abi.dynamic import unpack_site
from sm121.abi.surroundings import Locked
from sm121.errors import EnvironmentFault
from sm121.files import remove_tree, sha256_file, sha256_text, write_atomic
from sm121.target.place import Place
from sm121.wheelhouse.manifest import Manifest

# Of the whole lock, what the quick list imports, and what that imports.
BESIDE = ("torchvision", "numpy", "pillow")
_DONE = "sm121-target"


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """An environment. installed: by install.py; else unpacked. reused: it was there. text: how it
    was made, one sentence."""

    env: Path
    installed: bool
    reused: bool
    text: str

    @property
    def python(self) -> Path:
        return self.env / "bin" / "python"


class NotInstalled(Exception):
    """install.py refused or failed: its own words."""


def site_of(env: Path, version: str) -> Path:
    return env / "lib" / f"python{version}" / "site-packages"


def install(place: Place, house: Path, manifest: Manifest, folder: Path, *, log: Path) -> Made:
    """Run the wheelhouse's install.py there. Raises NotInstalled with what it said."""
    env = folder / "env"
    script = house / "install.py"
    # What installs is proved as well, so another install.py installs anew.
    key = _key(manifest, place, sha256_file(script))
    if _known(env) == key:
        return Made(env=env, installed=True, reused=True, text="the environment of an earlier run")
    remove_tree(env)
    partial = ["--allow-partial"] if manifest.partial else []
    argv = [str(place.python), "-I", str(script), str(env), "--python", str(place.python), *partial]
    finished = place.run(argv, log=log)
    lines = finished.output.splitlines() or ["it said nothing"]
    if finished.returncode:
        told = [line for line in lines if line.startswith("error:")] or lines[-1:]
        raise NotInstalled(told[0].removeprefix("error: "))
    write_atomic(env / _DONE, key)
    return Made(env=env, installed=True, reused=False, text=lines[-1])


def unpack(place: Place, house: Path, manifest: Manifest, locked: Locked, folder: Path) -> Made:
    """Our wheel and the lock's torch and torchvision, for a wheelhouse without dependencies.

    Raises EnvironmentFault if the lock's are not in the cache.
    """
    wheels = sorted(house / w.filename for w in manifest.wheels)
    around = locked.around_torch({w.distribution for w in manifest.wheels})
    beside = locked.around(BESIDE.__contains__, {w.distribution for w in manifest.wheels})
    lacking = [*around.lacking, *beside.lacking]
    if around.lacking:
        raise EnvironmentFault(
            f"What is around the wheel is not in the cache: {', '.join(lacking)}.",
            remedy="Run it with --fetch, or build with --with-deps.",
        )
    paths = list(dict.fromkeys([*around.paths, *beside.paths]))
    env = folder / "env"
    names = ", ".join(p.name for p in paths if p.name.startswith(("torch-", "torchvision-")))
    text = (
        "a wheelhouse without dependencies has no install.py; what is in it was unpacked beside "
        f"{len(paths)} wheels of the lock ({names})"
    )
    key = _key(manifest, place, *sorted(p.name for p in paths))
    if _known(env) == key:
        return Made(env=env, installed=False, reused=True, text=text)
    remove_tree(env)
    site = site_of(env, place.version)
    unpack_site([*paths, *wheels], site)
    (env / "bin").mkdir()
    (env / "bin/python").symlink_to(place.python)
    (env / "pyvenv.cfg").write_text(f"home = {place.python.parent}\n")
    write_atomic(env / _DONE, key)
    return Made(env=env, installed=False, reused=False, text=text)


def _key(manifest: Manifest, place: Place, *more: str) -> str:
    files = sorted(f"{w.sha256} {w.filename}" for w in manifest.wheels)
    return sha256_text(*files, str(place.python), place.machine.python, place.machine.system, *more)


def _known(env: Path) -> str:
    try:
        return (env / _DONE).read_text()
    except OSError:
        return ""
