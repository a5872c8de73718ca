"""The package index that the user has configured: where a pinned file can be had.

uv is asked, so its index, mirror, proxy and offline settings (UV_*, uv.toml) count. Nothing
here is trusted: every file is checked against the pinned sha256 after download.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import uv

from sm121 import proc
from sm121.errors import NetworkFault, ToolFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexFile:
    """One file that the index offers. url may be http(s): or file:."""

    distribution: str
    version: str
    filename: str
    url: str
    sha256: str
    size: int


def uv_binary() -> Path:
    """The uv executable that our own environment has."""
    return Path(uv.find_uv_bin())


def index_credentials(
    environment: Mapping[str, str],
) -> Callable[[str], tuple[str, str] | None]:
    """Who we are to each index host, as uv is told: (user, password) by host name.

    uv keeps passwords out of the files that it writes, so a download has to find them again:
    in the URLs of UV_DEFAULT_INDEX, UV_INDEX_URL, UV_INDEX and UV_EXTRA_INDEX_URL, in
    UV_INDEX_<NAME>_USERNAME and _PASSWORD (for `<name>=<url>` entries), else in NETRC or
    ~/.netrc (https://docs.astral.sh/uv/concepts/authentication/).
    """
    known: dict[str, tuple[str, str]] = {}
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
        for entry in environment.get(variable, "").split():
            name, named, url = entry.partition("=")
            if not named or "/" in name:
                name, url = "", entry
            parts = urlsplit(url)
            prefix = f"UV_INDEX_{re.sub('[^A-Z0-9]', '_', name.upper())}"
            user = unquote(parts.username or "") or environment.get(f"{prefix}_USERNAME", "")
            secret = unquote(parts.password or "") or environment.get(f"{prefix}_PASSWORD", "")
            if parts.hostname and (user or secret):
                known[parts.hostname] = (user, secret)

    def find(host: str) -> tuple[str, str] | None:
        if host in known:
            return known[host]
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            entry = netrc.netrc(environment.get("NETRC")).authenticators(host)
            return (entry[0], entry[2] or "") if entry else None
        return None

    return find


def compile_lock(
    requirements: Sequence[str],
    *,
    uv_platform: str,
    python: str,
    arguments: Sequence[str | Path] = (),
    log: Path | None = None,
    allow_sdist: bool = False,
    output: Path | None = None,
) -> list[IndexFile]:
    """Resolve requirements for a platform with `uv pip compile --format pylock.toml`.

    output: a lock that is written; the versions that are in it before are kept if they can be.

    Returns every file (wheels, and sdists) that the resolution lists, all with sha256.
    Raises NetworkFault when the index can't be reached, ToolFailed when there is no
    resolution (uv's own explanation in its details).
    """
    argv: list[str | Path] = [
        uv_binary(), "pip", "compile", "-", "--format", "pylock.toml", "--no-header", "--quiet",
        "--python-platform", uv_platform, "--python-version", python, *arguments,
    ]  # fmt: skip
    if not allow_sdist:
        argv += ["--only-binary", ":all:"]
    if output is not None:
        argv += ["--output-file", output]
    finished = proc.run(
        argv,
        # Nothing is built, so any Python that runs uv will do: uv must not fetch one.
        env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"},
        stdin="\n".join(requirements) + "\n",
        check=False,
        log=None,
    )
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ {proc.pasteable(argv)}\n{finished.output}\n")
    if finished.returncode != 0:
        lowered = finished.output.lower()
        if any(
            s in lowered
            for s in (
                "failed to fetch",
                "error sending request",
                "dns error",
                "network connectivity",
                "network was disabled",
                "unauthorized",
                "forbidden",
            )
        ):
            raise NetworkFault(
                "The package index could not be reached.",
                cause=_where_and_why(finished.output),
                remedy="Check the network, UV_OFFLINE, and the index that uv is configured with "
                "(UV_DEFAULT_INDEX, uv.toml; credentials), and run the same command again.",
            )
        raise ToolFailed(
            "The requirements cannot be resolved.",
            returncode=finished.returncode,
            tail=finished.output.splitlines()[-20:],
            log=log,
            remedy="If the index is a mirror, it may lack a version; otherwise correct stack.toml.",
        )
    text = output.read_text(encoding="utf-8") if output else finished.output
    return list(_index_files(tomllib.loads(text)))


def _where_and_why(output: str) -> str:
    """Of uv's chain of causes, the one that names the address, and the last."""
    lines = [line.strip().removeprefix("error: ").removeprefix("cause: ")
             for line in output.splitlines() if line.strip()]  # fmt: skip
    return ": ".join(dict.fromkeys([*(x for x in lines if "://" in x)][:1] + lines[-1:]))


def _index_files(data: dict[str, object]) -> Iterable[IndexFile]:
    packages = data.get("packages", [])
    assert isinstance(packages, list)
    for package in packages:
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        for file in files:
            url = file.get("url") or Path(file["path"]).absolute().as_uri()
            yield IndexFile(
                distribution=package["name"],
                version=package["version"],
                filename=file.get("name") or unquote(urlsplit(url).path.rsplit("/", 1)[-1]),
                url=url,
                sha256=file["hashes"]["sha256"],
                size=int(file.get("size", 0)),
            )


def locate(
    wanted: Iterable[tuple[str, str]], *, uv_platform: str, python: str, allow_sdist: bool = False
) -> dict[str, IndexFile]:
    """Files of exact (distribution, version) pairs, by sha256. One call to uv for all."""
    requirements = sorted({f"{name}=={version}" for name, version in wanted})
    files = compile_lock(
        requirements,
        uv_platform=uv_platform,
        python=python,
        arguments=["--no-deps"],
        allow_sdist=allow_sdist,
    )
    return {file.sha256: file for file in files}
