"""A small project with a series on a small upstream that goes on releasing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.gits import Work
from support.stacks import write_stack
from support.upstream import FILES, make_checkout, make_sdist, make_upstream, sha256

ROOT = Path(__file__).parents[2]
Files = Mapping[str, str | bytes | None]


def lines(**changed: str) -> str:
    """Forty numbered lines; `l12="x"` replaces line 12, '' removes it."""
    texts = [changed.get(f"l{n}", f"line {n}") for n in range(1, 41)]
    return "".join(f"{text}\n" for text in texts if text)


@dataclass
class Project:
    """A checkout of sm121 as far as its data goes, an upstream with tags, and our own branch."""

    root: Path
    upstream: Work
    ours: Work
    pins: dict[str, Any]
    names: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, files: Files | None = None) -> Project:
        made = make_upstream(folder / "upstream")
        if files:
            made.work.git("tag", "-d", "v1.2.3")
            made.pins["vllm"]["commit"] = made.work.commit(files, "More")
            made.work.git("tag", "v1.2.3")
        root = make_checkout(folder / "checkout", made.pins)
        shutil.copy(ROOT / "pins/rules.toml", root / "pins/rules.toml")
        ours = Work(folder / "ours")
        made.work.git("clone", "-q", made.work.path, ours.path)
        ours.git("config", "core.autocrlf", "false")
        return cls(root=root, upstream=made.work, ours=ours, pins=made.pins)

    @property
    def folder(self) -> Path:
        return self.root / "patches/vllm/1.2.3"

    @property
    def tree(self) -> Work:
        """Where a rebase stops."""
        return Work(self.root / "build/rebase/tree")

    def patch(self, name: str, files: Files, *, subject: str = "") -> Path:
        """A patch on top of those before it."""
        path = self.folder / f"{name}.patch"
        self.ours.make_patch(path, files, subject=subject or f"[Test] Do {name}")
        self.names.append(name)
        (self.folder / "series").write_text(
            "# The order.\n" + "".join(f"{n}.patch\n" for n in self.names)
        )
        return path

    def release(self, version: str, files: Files, message: str = "Upstream changes") -> str:
        commit = self.upstream.commit(files, message)
        self.upstream.git("tag", f"v{version}")
        return commit

    def pack(self, folder: Path, *, tag: str) -> Path:
        """The sdist of a release, out of upstream's tag."""
        names = self.upstream.git("ls-tree", "-r", "--name-only", tag).splitlines()
        files: dict[str, str | bytes] = {n: self.upstream.show(tag, n) for n in names}
        return make_sdist(folder, files, version=tag.removeprefix("v"))

    def repin(self) -> None:
        write_stack(self.root / "pins", self.pins)

    def data(self) -> dict[str, bytes]:
        """Everything below patches/ and pins/, and the changelog."""
        files = [*self.root.glob("patches/**/*"), *self.root.glob("pins/**/*")]
        files.append(self.root / "CHANGELOG.md")
        return {str(f.relative_to(self.root)): f.read_bytes() for f in files if f.is_file()}


__all__ = ["FILES", "Project", "lines", "sha256"]
