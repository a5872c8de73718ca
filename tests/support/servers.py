"""Real HTTP servers on 127.0.0.1, well-behaved or not."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Site:
    """What a server serves and how it misbehaves; `requests` is what it was asked.

    ranges: honours Range. cut: how many bytes of the body each of the next responses sends
    before the connection drops. statuses: answers with these first.
    """

    content: bytes = b""
    ranges: bool = True
    cut: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


class _FileHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        site = self.site
        asked = self.headers.get("Range")
        site.requests.append((self.path, asked))
        if site.statuses:
            self.send_response(site.statuses.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        start = 0
        if asked and site.ranges:
            match = re.fullmatch(r"bytes=(\d+)-", asked)
            assert match, asked
            start = int(match[1])
            if start >= len(site.content):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header(
                "Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}"
            )
        else:
            self.send_response(200)
        body = site.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if site.cut:
            self.wfile.write(body[: site.cut.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serve_file(site: Site) -> Iterator[Site]:
    """Serve one file under every path."""
    with _serving(type("Handler", (_FileHandler,), {"site": site})) as base:
        site.url = f"{base}/some/file.whl"
        yield site


@contextmanager
def serve_index(folder: Path, *, hashes: bool = True) -> Iterator[str]:
    """A simple index (PEP 503) over the wheels and sdists of a folder; yields its URL."""

    def pages() -> dict[str, Callable[[], bytes]]:
        made: dict[str, Callable[[], bytes]] = {}
        projects: dict[str, list[Path]] = {}
        for file in folder.iterdir():
            name = re.sub(r"[-_.]+", "-", file.name.split("-")[0]).lower()
            projects.setdefault(name, []).append(file)
            made[f"/files/{file.name}"] = file.read_bytes
        for name, files in projects.items():
            links = "".join(
                f'<a href="../../files/{f.name}'
                + (f"#sha256={hashlib.sha256(f.read_bytes()).hexdigest()}" if hashes else "")
                + f'">{f.name}</a>\n'
                for f in files
            )
            made[f"/simple/{name}/"] = f"<!DOCTYPE html><html><body>{links}</body></html>".encode
        return made

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            page = pages().get(self.path)
            body = page() if page else b"not here"
            self.send_response(200 if page else 404)
            html = self.path.startswith("/simple")
            self.send_header("Content-Type", "text/html" if html else "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with _serving(Handler) as base:
        yield f"{base}/simple/"
