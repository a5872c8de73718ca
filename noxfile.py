#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]>=2025.5.1"]
# ///
"""sm121: build vLLM for NVIDIA DGX Spark (GB10, sm_121), from pins to a wheelhouse.

Options of a session come after `--`:  nox -s build -- --profile smoke
Help of a session:                      nox -s build -- --help
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "unit"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent


def prepare(session: nox.Session, *, lock: str = "runtime") -> None:
    """Install the locked requirements, once per change of the lock, and put src/ on the path."""
    requirements = ROOT / "requirements" / f"{lock}.lock"
    stamp = Path(session.virtualenv.location) / f"sm121-{lock}.stamp"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        session.install("--require-hashes", "-r", str(requirements))
        stamp.write_text(wanted)
    session.env["PYTHONPATH"] = str(ROOT / "src")


def verb(session: nox.Session, name: str) -> None:
    """Run one verb of the package with the session's options."""
    prepare(session)
    session.run("python", "-m", "sm121", name, *session.posargs, silent=False)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Everything from pins to a wheelhouse; skips what is up to date.

    Options: --profile NAME, --stack NAME, --target linux-aarch64|linux-x86_64, --arch,
    --jobs N, --offline, --wheelhouse DIR, --with-deps, --jit-cache [none|listed|all], --dry-run,
    --without NAME, --require NAME, --clone PATH.
    """
    verb(session, "build")


@nox.session(default=False)
def source(session: nox.Session) -> None:
    """Only make pristine upstream ready, as a git commit, and check it against the pins."""
    verb(session, "source")


@nox.session(default=False)
def patch(session: nox.Session) -> None:
    """Only apply the patch series; `-- --check`: is each patch fit to be sent, and to be built?

    Options: --check, --profile NAME (whose components --check configures), --stack NAME, --offline.
    """
    verb(session, "patch")


@nox.session(name="compile", default=False)
def compile_(session: nox.Session) -> None:
    """Only up to the built wheel."""
    verb(session, "compile")


@nox.session(default=False)
def wheelhouse(session: nox.Session) -> None:
    """Up to the wheelhouse, without verifying it."""
    verb(session, "wheelhouse")


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Resolve the pins to hashed files for every target; `-- --check` only compares.

    Options: --check, --upgrade NAME, --stack NAME.
    """
    verb(session, "lock")


@nox.session(default=False)
def repair(session: nox.Session) -> None:
    """Bring an environment back to its wheelhouse, offline: `-- --env PATH`.

    Options: --env PATH, --wheelhouse DIR, --dry-run.
    """
    verb(session, "repair")


@nox.session(name="verify-abi", default=False)
def verify_abi(session: nox.Session) -> None:
    """Prove that every binary fits: a wheelhouse, wheels or an environment; no GPU needed.

    Options: TARGET ..., --env PATH, --against WHEEL|DIR, --json [FILE], --html FILE, --target,
    --python, --arch, --stack, --policy FILE, --no-run, --fetch.
    """
    verb(session, "verify-abi")


@nox.session(name="verify-jit", default=False)
def verify_jit(session: nox.Session) -> None:
    """Compile every JIT kernel family of the model's path for the target; no GPU needed.

    Options: --env PATH, --tree DIR, --only RECIPE, --seconds N, --all, --json [FILE], --html FILE,
    --stack NAME, --offline, --arch X.Y.
    """
    verb(session, "verify-jit")


@nox.session(name="verify-target", default=False)
def verify_target(session: nox.Session) -> None:
    """Install the wheelhouse and import it, by the target's own Python, emulated if need be.

    Options: DIR, --build, --quick, --only STEP, --fetch, --json [FILE], --stub FILE;
    --context FOLDER (of Dockerfile.verify), --image-python X.Y, --native-build.
    """
    verb(session, "verify-target")


@nox.session(default=False)
def rebase(session: nox.Session) -> None:
    """Move the patch series to another upstream: `-- --onto 0.28.0`; `-- --check` only looks.

    Options: --onto REF|RELEASE, --continue, --abort, --skip NAME --why TEXT, --accept,
    --commit HEX, --check, --json [FILE], --offline, --stack NAME.
    """
    verb(session, "rebase")


@nox.session(default=False)
def export(session: nox.Session) -> None:
    """Write the edited series (`nox -s patch -- --edit`) back to patches/; `-- --check` compares."""
    verb(session, "export")


@nox.session(default=False)
def serve(session: nox.Session) -> None:
    """Render serve.env and systemd units for two nodes: `-- --nodes nodes.toml --out DIR`.

    Options: --nodes FILE, --out DIR, --node-rank 0|1, --check, --wheelhouse DIR, --stack NAME.
    """
    verb(session, "serve")


@nox.session(default=False)
def acceptance(session: nox.Session) -> None:
    """Once, on the head of two Sparks: every step that needs them, and a table for the README.

    Options: --nodes FILE, --wheelhouse DIR, --no-service, --start-minutes N, --json [FILE],
    --ssh-config FILE, --stack NAME.
    """
    verb(session, "acceptance")


@nox.session(default=False)
def shell(session: nox.Session) -> None:
    """A shell with the toolchain, CUDA_HOME and the patched tree."""
    verb(session, "shell")


@nox.session(default=False)
def sync(session: nox.Session) -> None:
    """The wheelhouse to the nodes: send, install, compare, switch: `-- here HOST`.

    Options: HOST ..., --compare [--json [FILE]], --rollback, --wheelhouse DIR, --root DIR,
    --interface NAME, --address IP, --identity FILE, --ssh-config FILE, --streams N, --bwlimit KIB,
    --keep N, --nodes FILE, --python PATH, --allow-partial, --reinstall, --sign KEY.
    """
    verb(session, "sync")


@nox.session(default=False)
def doctor(session: nox.Session) -> None:
    """Is this machine able to build, or to run, this? Changes nothing.

    Options: --for build|run, --profile NAME, --target, --stack NAME, --with-deps, --offline,
    --env PATH, --clone PATH, --json [FILE], --report [FILE].
    """
    verb(session, "doctor")


@nox.session(default=False)
def clean(session: nox.Session) -> None:
    """What takes how much disk; with names, `unused` or `all`: free it."""
    verb(session, "clean")


@nox.session(default=False)
def tests(session: nox.Session) -> None:
    """All tests: unit, integration and end to end (a real smoke build). Options are pytest's."""
    prepare(session, lock="dev")
    # Builds on one core, everything else on the other (groups: tests/conftest.py).
    spread = ("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
    session.run("python", "-m", "pytest", *spread, *session.posargs)


@nox.session
def unit(session: nox.Session) -> None:
    """Unit tests: no network, no compiler, seconds. Options are pytest's."""
    prepare(session, lock="dev")
    session.run("python", "-m", "pytest", "tests/unit", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy and hadolint."""
    prepare(session, lock="dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("hadolint", "Dockerfile.verify")


@nox.session(default=False)
def requirements(session: nox.Session) -> None:
    """Write requirements/*.lock anew from pyproject.toml (hashes, no URL)."""
    session.install("uv")
    common = (
        "uv", "pip", "compile", "pyproject.toml", "--universal", "--python-version", "3.11",
        "--generate-hashes", "--no-header", "--no-emit-index-url", "--no-annotate", "-q",
        *session.posargs,
    )  # fmt: skip
    session.run(*common, "-o", "requirements/runtime.lock")
    groups = ("--group", "test", "--group", "lint")
    session.run(*common, *groups, "-o", "requirements/dev.lock")


if __name__ == "__main__":
    nox.main()
