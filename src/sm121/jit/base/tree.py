"""Stage `jit-tree`: the patched vLLM as an importable tree, without its compiled extensions.

What upstream's build adds to the tree (Python of flash-attention, DeepGEMM's headers and host
library) comes out of the release's own wheel for this machine; a file that the tree has is
never replaced. The other extensions stay away: nothing here may depend on them.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.context import Context, Results
from sm121.errors import UsageFault
from sm121.fetch import Cache, fetch_locked
from sm121.files import fresh_directory
from sm121.jit.recipes import load_recipes
from sm121.lock.pylock import LockedFile
from sm121.source.stage import REPOSITORY
from sm121.toolkit.machine import host_machine
from sm121.toolkit.stage import host_interpreter
from sm121.toolkit.unpack import unpack

# Host libraries of JIT families: their own code makes the kernels' source.
_HOST_LIBRARIES = ("vllm/third_party/deep_gemm/",)


class JitTreeStage:
    name = "jit-tree"

    def key(self, context: Context) -> str:
        return f"jit-tree/{context.stack_name}"

    def folder(self, context: Context) -> Path:
        return context.layout.build / "jit" / context.stack_name / "tree"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        recipes = load_recipes(context.layout.pins, context.stack_name)
        return {
            "patched tree": str(results["patch"]["tree"]),
            "release's wheel": release_wheel(context).sha256,
            "release's folders": " ".join(recipes.release.folders),
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        return (self.folder(context) / "vllm/__init__.py").is_file()

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        from sm121.gitrepo import Repository

        recipes = load_recipes(context.layout.pins, context.stack_name)
        wheel = fetch_release(context)
        with fresh_directory(self.folder(context)) as fresh:
            repository = Repository(context.layout.source / REPOSITORY)
            repository.export(str(results["patch"]["commit"]), fresh / "whole")
            repository.close()
            (fresh / "whole/vllm").rename(fresh / "vllm")
            shutil.rmtree(fresh / "whole")
            added = add_release(wheel, fresh, recipes.release.folders)
            write_metadata(fresh, context.stack.vllm.version)
        return {"added": added}


def release_wheel(context: Context) -> LockedFile:
    """The release's own wheel for this machine. Raises UsageFault if the stack pins none."""
    name = f"linux-{host_machine()}"
    pinned = (context.stack.overlay.wheels if context.stack.overlay else {}).get(name)  # type: ignore[call-overload]
    if pinned is None:
        raise UsageFault(
            f"Stack {context.stack_name} pins no release wheel for {name}.",
            cause="verify-jit takes what upstream's build adds to the tree out of it",
            remedy=f"Add [overlay.wheels.{name}] to pins/{context.stack_name}/stack.toml.",
        )
    return LockedFile(
        distribution="vllm", version=context.stack.vllm.version, filename=pinned.filename,
        sha256=pinned.sha256, size=0,
    )  # fmt: skip


def fetch_release(context: Context) -> Path:
    """That wheel, in the cache. The index is asked as this machine, not as the stack's target.

    Raises what release_wheel and fetch_locked raise.
    """
    file = release_wheel(context)
    _, host = host_interpreter(context)
    return fetch_locked(
        [file], target=host, cache=Cache(context.layout.cache, context.memory),
        offline=context.options.offline, ui=context.ui,
    )[file.sha256]  # fmt: skip


def add_release(wheel: Path, tree: Path, folders: tuple[str, ...]) -> int:
    """Unpack from the release's wheel what the tree lacks in these folders; how many files."""
    inside = tuple(f"{folder}/" for folder in folders)

    def wanted(name: str) -> str | None:
        if not name.startswith(inside) or (tree / name).exists():
            return None
        return name if not name.endswith(".so") or name.startswith(_HOST_LIBRARIES) else None

    try:
        return len(unpack(wheel, tree, wanted))
    except zipfile.BadZipFile as error:
        raise UsageFault(f"{wheel} is no wheel.", cause=str(error)) from error


def write_metadata(tree: Path, version: str) -> None:
    """A dist-info, since vLLM asks importlib.metadata for its own version."""
    folder = tree / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
