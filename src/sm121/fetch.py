"""Files by sha256: from the cache, else from the index. Resumed, verified, then renamed.

The cache is content-addressed (`<cache>/files/<sha256>/<filename>`), so a file there under
its final name is whole. A broken transfer leaves `<filename>.part`, which the next run
continues with an HTTP range.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from sm121.errors import HashMismatch, NetworkFault
from sm121.files import HashMemory, link_or_copy, sha256_file
from sm121.index import IndexFile, index_credentials, locate
from sm121.lock.pylock import LockedFile, Target
from sm121.ui import Ui, human_bytes

if TYPE_CHECKING:
    import httpx

_CONNECTIONS = 8
_TIMEOUT_S = 60.0
_ATTEMPTS = 4


class Cache:
    """Content-addressed store of downloaded files.

    A file that is not what its folder's name says (a disk fault, a hand) is removed when it
    is met, and so fetched again.
    """

    def __init__(self, root: Path, memory: HashMemory) -> None:
        self.root = root
        self._memory = memory

    def path(self, sha256: str, filename: str) -> Path:
        return self.root / "files" / sha256 / filename

    def find(self, sha256: str, filename: str, ui: Ui) -> Path | None:
        """The file's path if it is here and whole."""
        path = self.path(sha256, filename)
        if not path.is_file():
            return None
        if self._memory.sha256(path) != sha256:
            ui.note(f"{filename} in the cache is damaged; it is fetched again")
            path.unlink()
            return None
        return path

    def remember(self, sha256: str, filename: str) -> None:
        """Note the hash of a file that was verified while it was written."""
        self._memory.remember(self.path(sha256, filename), sha256)

    def adopt(self, source: Path, sha256: str, filename: str) -> bool:
        """Take a file that is elsewhere on this machine (an earlier wheelhouse), if it is whole."""
        if not source.is_file() or self._memory.sha256(source) != sha256:
            return False
        path = self.path(sha256, filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source, path)
        self.remember(sha256, filename)
        return True


def fetch_locked(
    files: Sequence[LockedFile],
    *,
    target: Target,
    cache: Cache,
    offline: bool,
    ui: Ui,
    allow_sdist: bool = False,
    beside: Path | None = None,
) -> dict[str, Path]:
    """Bring all files of a lock into the cache; returns path by sha256.

    beside: a folder that may have them already, under their names (an earlier wheelhouse).

    Raises NetworkFault (offline and missing, or the index fails), HashMismatch (the index's
    file is not the locked one; nothing is kept).
    """
    found = {f.sha256: cache.find(f.sha256, f.filename, ui) for f in files}
    missing = [
        f
        for f in files
        if found[f.sha256] is None
        and not (beside and cache.adopt(beside / f.filename, f.sha256, f.filename))
    ]
    if missing and offline:
        raise NetworkFault(
            f"{len(missing)} file(s) are not in the cache and --offline forbids fetching them.",
            cause=", ".join(f.filename for f in missing[:5]) + (" …" if len(missing) > 5 else ""),
            remedy="Run once without --offline.",
        )
    if missing:
        offered = locate(
            [(f.distribution, f.version) for f in missing],
            uv_platform=target.uv_platform,
            python=target.python,
            allow_sdist=allow_sdist,
        )
        for file in missing:
            if file.sha256 not in offered:
                raise HashMismatch(
                    f"The index has no {file.distribution} {file.version} of the pinned content.",
                    cause=f"wanted {file.filename} with sha256 {file.sha256}",
                    remedy="If the pin was edited, correct it; a mirror may lack the file or "
                    "have replaced it.",
                )
        download_all([offered[f.sha256] for f in missing], cache=cache, ui=ui)
    return {f.sha256: cache.path(f.sha256, f.filename) for f in files}


def download_all(files: Sequence[IndexFile], *, cache: Cache, ui: Ui) -> None:
    """Download several files in parallel with one progress line (bytes and count)."""
    total = sum(f.size for f in files)
    done: dict[str, int] = {}
    with (
        http_client() as client,
        ui.progress("fetch") as progress,
        ThreadPoolExecutor(_CONNECTIONS) as pool,
    ):

        def advance(sha256: str, count: int) -> None:
            done[sha256] = count
            # A copy: other threads add their first entry meanwhile.
            have = sum(list(done.values()))
            progress.update(f"{human_bytes(have)} of {human_bytes(total)}, {len(files)} files")

        jobs = [
            pool.submit(download, file, cache=cache, client=client, advance=advance)
            for file in sorted(files, key=lambda f: -f.size)
        ]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for file in files:
        cache.remember(file.sha256, file.filename)


def http_client() -> httpx.Client:
    """A client for all files of a run: one TLS context, connections kept open.

    Proxies and SSL_CERT_FILE count as they do for uv, and so do credentials in uv's index
    variables and in ~/.netrc; each is sent only to the host that it is for.
    """
    import httpx

    known = index_credentials(os.environ)

    def authenticate(request: httpx.Request) -> httpx.Request:
        if (found := known(request.url.host)) and "Authorization" not in request.headers:
            token = base64.b64encode(":".join(found).encode()).decode()
            request.headers["Authorization"] = f"Basic {token}"
        return request

    return httpx.Client(timeout=_TIMEOUT_S, follow_redirects=True, auth=authenticate)


def download(
    file: IndexFile,
    *,
    cache: Cache,
    client: httpx.Client | None = None,
    advance: Callable[[str, int], None] = lambda _s, _n: None,
) -> Path:
    """Fetch one file into the cache, hashing while it streams; returns its path.

    client: one that several downloads share; None: one for this file.

    Continues a `.part` file with a range request. Raises HashMismatch (the part is removed),
    NetworkFault after several attempts (the part is kept for the next run).
    """
    final = cache.path(file.sha256, file.filename)
    if final.is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    # The cache may serve several checkouts at once (SM121_CACHE): one writes a part file.
    lock = cache.root / "locks" / f"{file.sha256}.lock"
    lock.parent.mkdir(exist_ok=True)
    with FileLock(lock):
        if not final.is_file():
            _fill(file, final, client, advance)
    return final


def _fill(
    file: IndexFile,
    final: Path,
    client: httpx.Client | None,
    advance: Callable[[str, int], None],
) -> None:
    part = final.with_name(final.name + ".part")
    if urlsplit(file.url).scheme == "file":
        shutil.copyfile(unquote(urlsplit(file.url).path), part)
        digest = sha256_file(part)
    else:
        with nullcontext(client) if client else http_client() as open_client:
            digest = _stream(file, part, open_client, advance)
    if digest != file.sha256:
        part.unlink()
        raise HashMismatch(
            f"{file.filename} is not the pinned file.",
            cause=f"wanted sha256 {file.sha256}, got {digest}",
            remedy="Run the same command again; if it stays so, the index or a proxy "
            "between serves another file: do not use it.",
        )
    part.replace(final)


def _stream(
    file: IndexFile, part: Path, client: httpx.Client, advance: Callable[[str, int], None]
) -> str:
    """Append to (or begin) the part file until it is whole; returns its sha256."""
    import httpx

    problem = ""
    for _ in range(_ATTEMPTS):
        have = part.stat().st_size if part.is_file() else 0
        if file.size and have >= file.size:
            if have == file.size:
                return sha256_file(part)
            part.unlink()
            have = 0
        # identity: the hash is of the file, not of a transfer encoding.
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
        try:
            with client.stream("GET", file.url, headers=headers) as response:
                response.raise_for_status()
                mode = "ab" if response.status_code == 206 else "wb"
                have = have if mode == "ab" else 0
                digest = hashlib.sha256()
                if have:
                    with part.open("rb") as begun:
                        digest = hashlib.file_digest(begun, "sha256")
                with part.open(mode) as out:
                    for chunk in response.iter_raw():
                        out.write(chunk)
                        digest.update(chunk)
                        have += len(chunk)
                        advance(file.sha256, have)
                    out.flush()
                    os.fsync(out.fileno())
                return digest.hexdigest()
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (
                401, 403, 404, 416,
            ):  # fmt: skip
                if error.response.status_code == 416:
                    part.unlink(missing_ok=True)
                    continue
                break
    raise NetworkFault(
        f"{file.filename} could not be downloaded.",
        cause=problem.split("\n")[0],
        remedy="Run the same command again: it continues where the transfer stopped.",
    )
