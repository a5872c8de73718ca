"""Releases of vLLM on the index: which are newer, and the sha256 of their sdists.

What the index said is kept in build/rebase/releases.json, so that `--offline` knows it too. A
hash that came from the index only is a proposal; a stack's pin of the same release outranks it.
"""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from pathlib import Path

from packaging.version import Version

from sm121.context import Context
from sm121.errors import NetworkFault, ToolFailed, UsageFault
from sm121.files import write_atomic
from sm121.index import IndexFile, compile_lock
from sm121.lock.pylock import LockedFile
from sm121.pins.load import load_stack, stack_names
from sm121.source.vllm import sdist_file


class Releases:
    """The index's releases of vLLM, as far as they were asked for."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.layout.build / "rebase" / "releases.json"
        self._known: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            self._known = dict(json.loads(self._store.read_text(encoding="utf-8")))

    def sdist(self, version: str) -> LockedFile:
        """The sdist of one release. Raises UsageFault if the index has none of it."""
        if version in stack_names(self._context.layout.pins):
            return sdist_file(load_stack(self._context.layout.pins, version).vllm)
        if version not in self._known:
            self._need_network(f"vLLM {version}")
            found = self._ask(f"vllm=={version}")
            if found is None:
                raise UsageFault(
                    f"The package index has no sdist of vLLM {version}.",
                    remedy="`nox -s rebase -- --check` lists the newer releases that it has.",
                )
            self._remember(found)
        return LockedFile(
            distribution="vllm", version=version, filename=f"vllm-{version}.tar.gz",
            sha256=self._known[version], size=0,
        )  # fmt: skip

    def date(self, version: str) -> datetime | None:
        """The date that a stack pins for a release, None: the release's own."""
        pins = self._context.layout.pins
        return load_stack(pins, version).vllm.date if version in stack_names(pins) else None

    def newer(self, than: str) -> list[str]:
        """Every final release after one, oldest first; with --offline those already seen."""
        if self._context.options.offline:
            known = [v for v in self._known if Version(v) > Version(than)]
            if not known:
                self._need_network("the list of newer releases")
            return sorted(known, key=Version)
        versions: list[str] = []
        while True:
            below = f",<{versions[-1]}" if versions else ""
            found = self._ask(f"vllm>{than}{below}")
            if found is None:
                return versions[::-1]
            versions.append(found.version)
            self._remember(found)

    def _ask(self, requirement: str) -> IndexFile | None:
        """The sdist of the newest release that fits, None if none does."""
        target = self._context.runtime
        try:
            files = compile_lock(
                [requirement], uv_platform=target.uv_platform, python=target.python,
                arguments=["--no-deps"], allow_sdist=True,
            )  # fmt: skip
        except ToolFailed as error:
            if any("No solution found" in line for line in error.details):
                return None
            raise
        return next((f for f in files if f.filename == f"vllm-{f.version}.tar.gz"), None)

    def _remember(self, found: IndexFile) -> None:
        if self._known.get(found.version) != found.sha256:
            self._known[found.version] = found.sha256
            write_atomic(self._store, json.dumps(self._known, indent=1, sort_keys=True) + "\n")

    def _need_network(self, what: str) -> None:
        if self._context.options.offline:
            raise NetworkFault(
                f"{what} is not known here, and --offline forbids asking the index.",
                remedy="Run once without --offline.",
            )


def release_of(text: str) -> str:
    """'0.28.0' for a release or its tag ('v0.28.0'), '' for any other ref."""
    bare = text.removeprefix("v")
    return bare if Path(bare).name == bare and _is_final(bare) else ""


def _is_final(text: str) -> bool:
    try:
        version = Version(text)
    except ValueError:
        return False
    return str(version) == text and version.local is None and "." in text
