#!/usr/bin/env python3
"""Install this wheelhouse into a new environment, with no network.

    python3 install.py ENV [--python PATH] [--allow-partial]

Standard library only, and the uv wheel that lies beside it; it runs on a node that has
nothing but Python. It checks the machine, verifies SHA256SUMS, makes ENV, installs exactly
the wheels of pylock.toml, and lets uv check the result. Exit codes: 0 done, 1 the wheelhouse
is damaged, 2 wrong usage, 3 this machine cannot do it, 4 interrupted or uv failed.
"""

# A copy of this file goes into every wheelhouse, so it must not import sm121, and it prints
# by itself. It needs Python 3.8 or later, to be able to say which one it wants.
from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
UNFINISHED = "sm121-unfinished"


class Refused(Exception):
    """what, remedy, exit code."""

    def __init__(self, code: int, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.code, self.remedy = code, remedy


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="install.py", description=__doc__.split("\n")[0])
    parser.add_argument("env", type=Path, help="folder of the new environment")
    parser.add_argument("--python", help="interpreter to make it from (default: found on PATH)")
    parser.add_argument(
        "--allow-partial", action="store_true", help="install a profile that is not a whole vLLM"
    )
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(4))
    try:
        install(options.env.absolute(), options.python, options.allow_partial)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        if refused.remedy:
            print(f"  next: {refused.remedy}", file=sys.stderr)
        return refused.code
    except KeyboardInterrupt:
        print("error: interrupted; run the same command again", file=sys.stderr)
        return 4
    except OSError as error:
        print(f"error: {error}\n  next: check free space and permissions", file=sys.stderr)
        return 3
    return 0


def install(env: Path, python: str | None, allow_partial: bool) -> None:
    manifest = read_manifest()
    check_machine(manifest)
    check_profile(manifest, allow_partial)
    interpreter = find_python(manifest["python"], python)
    check_target(env)
    count = verify()
    print(f"{count} files are as SHA256SUMS says")
    for notice in manifest.get("notices", []):
        print(f"note: {notice}")
    env.parent.mkdir(parents=True, exist_ok=True)
    # On the file system of the environment, so that uv can link instead of copying.
    scratch = Path(tempfile.mkdtemp(prefix=f".{env.name}-", dir=env.parent))
    try:
        uv = unpack_uv(scratch)
        environ = clean_environment(scratch / "cache")
        shutil.rmtree(env, ignore_errors=True)
        run(uv, "venv", "--python", interpreter, env, environ=environ)
        (env / UNFINISHED).write_text("install.py has not finished\n")
        run(
            uv, "pip", "sync", "--python", env / "bin/python", "--no-index", "--link-mode",
            "hardlink", "--preview-features", "pylock", "pylock.toml", environ=environ,
        )  # fmt: skip
        run(uv, "pip", "check", "--python", env / "bin/python", environ=environ)
        shutil.copyfile(HERE / "manifest.json", env / "sm121-manifest.json")
        (env / UNFINISHED).unlink()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"Installed vLLM {manifest['base']['version']} (stack {manifest['stack']}) in {env}")


def read_manifest() -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
        return manifest
    except (OSError, ValueError) as error:
        raise Refused(1, f"{HERE} is no wheelhouse: manifest.json: {error}") from error


def check_machine(manifest: dict[str, Any]) -> None:
    here = f"{sys.platform}-{platform.machine()}"
    if here != manifest["target"]:
        raise Refused(
            3,
            f"this wheelhouse is for {manifest['target']}, this machine is {here}",
            f"build one with `nox -s build -- --with-deps --target {here}`, or run this on a node",
        )
    library, version = platform.libc_ver()
    wanted = tuple(int(part) for part in manifest["glibc"].split("."))
    found = tuple(int(part) for part in version.split(".")[:2]) if library == "glibc" else ()
    if found < wanted:
        raise Refused(
            3,
            f"this wheelhouse needs glibc {manifest['glibc']} or later, this machine has "
            f"{library or 'another C library'} {version}",
            "use DGX OS 7 (Ubuntu 24.04) or later",
        )


def check_profile(manifest: dict[str, Any], allow_partial: bool) -> None:
    if not manifest["complete"]:
        raise Refused(
            3,
            "this wheelhouse holds vLLM without its dependencies",
            "make a whole one with `nox -s build -- --with-deps`",
        )
    if manifest["partial"] and not allow_partial:
        raise Refused(
            3,
            f"this wheelhouse was made with profile {manifest['profile']}, which is not a whole "
            "vLLM: it can't serve",
            "build profile full; to install this one all the same, add --allow-partial",
        )


def find_python(wanted: str, chosen: str | None) -> str:
    """The interpreter to use. Refuses another version, and a free-threaded one."""
    own = "{}.{}".format(*sys.version_info[:2])
    candidate = chosen or (sys.executable if own == wanted else shutil.which(f"python{wanted}"))
    if not candidate:
        raise Refused(
            3,
            f"this wheelhouse is for CPython {wanted}, and there is no python{wanted} on PATH "
            f"(this is {own})",
            f"install python{wanted} (`sudo apt-get install python{wanted}-venv`), or give "
            "--python PATH",
        )
    probe = (
        "import sys,sysconfig;print(sys.implementation.name,'%d.%d'%sys.version_info[:2],"
        "int(bool(sysconfig.get_config_var('Py_GIL_DISABLED'))))"
    )
    try:
        found = subprocess.run(
            [candidate, "-I", "-c", probe], check=True, capture_output=True, text=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(2, f"{candidate} does not run as a Python: {error}") from error
    if found != ["cpython", wanted, "0"]:
        threads = ", free-threaded" if found[2:] == ["1"] else ""
        raise Refused(
            3,
            f"this wheelhouse is for CPython {wanted}, {candidate} is {' '.join(found[:2])}{threads}",
            f"give --python with a CPython {wanted}",
        )
    return candidate


def check_target(env: Path) -> None:
    """Refuse to replace anything but what an interrupted run of this script left."""
    if not env.exists() or (env / UNFINISHED).is_file():
        return
    if env.is_dir() and not any(env.iterdir()):
        return
    raise Refused(
        2,
        f"{env} exists",
        "choose another folder, or remove it; a damaged one is mended with `nox -s repair -- --env`",
    )


def verify() -> int:
    """Every file that SHA256SUMS lists, and no wheel that it does not. Returns how many."""
    try:
        text = (HERE / "SHA256SUMS").read_text(encoding="utf-8")
    except OSError as error:
        raise Refused(1, f"SHA256SUMS cannot be read: {error}") from error
    wanted = {name: digest for digest, _, name in (x.partition("  ") for x in text.splitlines())}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = dict(zip(wanted, pool.map(sha256, wanted)))
    faults = [
        f"{name} {'is missing' if not found[name] else 'was altered or cut short'}"
        for name, digest in wanted.items()
        if found[name] != digest
    ]
    faults += [f"{f.name} is not listed" for f in HERE.glob("*.whl") if f.name not in wanted]
    if faults:
        raise Refused(
            1,
            "this wheelhouse is damaged:\n    " + "\n    ".join(faults),
            "copy it again; on the machine that built it, `nox -s build` fetches only these anew",
        )
    return len(wanted)


def sha256(name: str) -> str:
    digest = hashlib.sha256()
    try:
        with (HERE / Path(name).name).open("rb") as file:
            while True:
                block = file.read(1 << 20)
                if not block:
                    return digest.hexdigest()
                digest.update(block)
    except OSError:
        return ""


def unpack_uv(folder: Path) -> Path:
    """The uv program out of its wheel."""
    wheels = sorted(HERE.glob("uv-*.whl"))
    if len(wheels) != 1:
        raise Refused(1, f"there must be one uv wheel here, found {len(wheels)}")
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next(n for n in archive.namelist() if n.endswith(".data/scripts/uv"))
        program = folder / "uv"
        program.write_bytes(archive.read(member))
    program.chmod(0o755)
    return program


def clean_environment(cache: Path) -> dict[str, str]:
    """Ours, without what would send uv anywhere else than to this folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UV_", "PIP_", "PYTHON", "VIRTUAL_ENV", "CONDA"))
    }
    return {
        **kept,
        "UV_CACHE_DIR": str(cache),
        "UV_NO_CONFIG": "1",
        "UV_OFFLINE": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }


def run(*argv: object, environ: dict[str, str]) -> None:
    words = [str(word) for word in argv]
    if subprocess.run(words, env=environ, cwd=HERE).returncode != 0:
        raise Refused(4, f"uv failed: {' '.join(words)}", "its own message is above")


if __name__ == "__main__":
    sys.exit(main())
