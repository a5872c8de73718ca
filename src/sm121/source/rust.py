"""vLLM's Rust parts: can they be built here, and are all their crates on this machine?

vLLM's setup.py starts cargo itself. By then everything has to be here: a crate that can't be
fetched would fail the build after hours, and a toolchain without the target's standard library too.
So this is asked first, with the very files (Cargo.lock, rust-toolchain.toml) that the build uses.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from sm121 import proc
from sm121.compile.toolchain import prefix_flags
from sm121.toolkit.machine import Compilers, host_machine

# What cargo reads of vLLM's tree.
FILES = ("rust", "rust-toolchain.toml")
PROGRAMS = {
    "cargo": "builds the Rust parts",
    "rustc": "Rust's compiler",
    "protoc": "a build script of vLLM's starts it",
}
# Cargo's own patience is three tries of 30 s each; that is long for a build that can do without.
_PATIENCE = {"CARGO_NET_RETRY": "1", "CARGO_HTTP_TIMEOUT": "15"}
_USERS = ("RUSTUP_HOME", "RUSTUP_TOOLCHAIN", "HTTPS_PROXY", "https_proxy", "SSL_CERT_FILE")


def triple(machine: str) -> str:
    """Rust's name for Linux with glibc on a machine."""
    return f"{machine}-unknown-linux-gnu"


def tools_named(environment: Mapping[str, str] = os.environ) -> str:
    """The programs as far as their paths tell, for a fingerprint."""
    found = (shutil.which(name, path=environment.get("PATH")) for name in PROGRAMS)
    return " ".join(path or "none" for path in found)


def why_not(
    tree: Path,
    *,
    machine: str,
    cargo_home: Path,
    offline: bool,
    log: Path,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Why the Rust parts can't be built here; '' if they can, and then every crate is in cargo_home.

    All reasons that can be seen at once. tree: a folder with FILES of the patched tree. machine:
    to build for.
    """
    path = environment.get("PATH", "")
    reasons = [
        f"{program} is not installed ({purpose})"
        for program, purpose in PROGRAMS.items()
        if shutil.which(program, path=path) is None
    ]
    variables = {**environment, **_PATIENCE, "CARGO_HOME": str(cargo_home)}
    wanted = triple(machine)
    if shutil.which("rustc", path=path):
        asked = proc.run(
            ["rustc", "--print", "target-libdir", "--target", wanted],
            cwd=tree, env=variables, check=False, log=log,
        )  # fmt: skip
        if asked.returncode != 0:
            reasons.append(f"rustc does not run: {_complaint(asked.output)}")
        elif not any(Path(asked.output.strip().splitlines()[-1]).glob("libstd-*.rlib")):
            reasons.append(f"Rust's standard library for {wanted} is missing (rustup target add)")
    if shutil.which("cargo", path=path):
        fetched = proc.run(
            ["cargo", "fetch", "--locked", "--manifest-path", tree / "rust/Cargo.toml",
             "--target", wanted, *(["--offline"] if offline else [])],
            cwd=tree, env=variables, check=False, log=log,
        )  # fmt: skip
        if fetched.returncode != 0:
            how = (
                "lacks crates, and --offline forbids it to fetch them" if offline else "can't fetch"
            )
            reasons.append(f"cargo {how}: {_complaint(fetched.output)}")
    return "; ".join(reasons)


def _complaint(output: str) -> str:
    """What rustup or cargo said, in a line: what it wanted to reach, and the last cause it gives."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    causes = [after for line, after in pairwise(lines) if line == "Caused by:"]
    if causes:
        wanted = [cause for cause in causes if "://" in cause][:1]
        return ": ".join(dict.fromkeys([*wanted, causes[-1]]))
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    return (errors or lines[-1:] or ["no message"])[0]


def cargo_environment(
    *,
    machine: str,
    compilers: Compilers,
    cargo_home: Path,
    work: Path,
    prefixes: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Variables for cargo in vLLM's build (Cargo book, Environment Variables; cc-rs, README).

    Nothing is fetched any more. Crossing, code is for the target, linked by its compiler; what
    build scripts run stays the host's. work: where objects go. prefixes: paths and what stands for
    them in the output.
    """
    name = triple(machine)
    upper, lower = name.upper().replace("-", "_"), name.replace("-", "_")
    remaps = prefix_flags({**prefixes, str(cargo_home): "cargo"}, option="--remap-path-prefix")
    variables = {
        "CARGO_HOME": str(cargo_home),
        "CARGO_NET_OFFLINE": "true",
        "CARGO_TARGET_DIR": str(work),
        "CARGO_PROFILE_RELEASE_STRIP": "symbols",
        # Separated by 0x1f, so that paths may hold blanks.
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join([*remaps, "-Clink-arg=-Wl,--build-id=sha1"]),
        # The environment of the build has an empty HOME.
        "RUSTUP_HOME": str(Path(environment.get("HOME", "/")) / ".rustup"),
        **{key: environment[key] for key in _USERS if environment.get(key)},
    }
    if machine != host_machine():
        variables |= {
            "CARGO_BUILD_TARGET": name,
            f"CARGO_TARGET_{upper}_LINKER": str(compilers.cc),
            f"CC_{lower}": str(compilers.cc),
            f"CXX_{lower}": str(compilers.cxx),
        }
    return variables
