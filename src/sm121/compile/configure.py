"""Stage `configure`: does each patch of the series leave a tree that configures?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm121.compile.build import run_configure
from sm121.compile.stage import CompileStage, make_tools
from sm121.context import Context, Results
from sm121.errors import PatchFailed, ToolFailed
from sm121.files import remove_tree, sha256_text
from sm121.patches.stage import series_folder
from sm121.source.stage import REPOSITORY

if TYPE_CHECKING:
    from sm121.gitrepo import Repository

# What configuring reads of vLLM's tree: setup.py with what it loads (requirement files, the list
# of variables), CMake's files, and csrc, whose files they list and whose generators they run.
READ = (
    "CMakeLists.txt", "cmake", "csrc", "pyproject.toml", "requirements", "setup.py", "tools",
    "vllm/envs.py",
)  # fmt: skip


def reads(path: str) -> bool:
    """Whether configuring reads this file of vLLM's tree."""
    return any(path == name or path.startswith(f"{name}/") for name in READ)


class ConfigureStage(CompileStage):
    """As `compile` up to the first object, once for each patch that can make a difference.

    A patch that touches nothing that configuring reads leaves the configuration as it was.
    """

    name = "configure"

    def key(self, context: Context) -> str:
        return f"configure/{context.key}-{context.options.profile}"

    def work(self, context: Context) -> Path:
        return context.layout.build / "work" / f"{context.key}-configure"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        from sm121.gitrepo import Repository

        repository = Repository(context.layout.source / REPOSITORY)
        return {
            **{
                name: value
                for name, value in super().inputs(context, results).items()
                if name not in ("patched tree", "version")  # of the whole series
            },
            **{
                f"after {name}": sha256_text(repository.listing(commit, READ))
                for name, commit in steps(repository, results)
            },
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        return True  # it leaves nothing but its verdict

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        from sm121.gitrepo import Repository

        repository = Repository(context.layout.source / REPOSITORY)
        tools = make_tools(context)
        work = self.work(context)
        remove_tree(work)
        work.mkdir(parents=True)
        environment = self.environment(context, results, tools)
        objects: dict[str, dict[str, int]] = {}
        for name, commit in steps(repository, results):
            repository.checkout(commit, self.tree(context))
            # The variables of the patch before must not help; what CMake found out about the
            # compilers may stay.
            for cache in work.glob("ninja/*/CMakeCache.txt"):
                cache.unlink()
            try:
                objects[name] = run_configure(
                    tree=self.tree(context),
                    output=work / "ninja",
                    python=tools.environment / "bin/python",
                    environment=environment,
                    log=context.log(self.name),
                )
            except ToolFailed as failure:
                raise PatchFailed(
                    f"{name}.patch leaves a tree that does not configure for {context.arch}.",
                    details=failure.details,
                    cause=failure.cause,
                    remedy=f"Edit {series_folder(context) / name}.patch, then the same command.",
                ) from failure
            context.ui.say(
                f"       configured  after {name}: {sum(objects[name].values())} objects"
            )
        remove_tree(work)
        return {"objects": objects}


def steps(repository: Repository, results: Results) -> Iterator[tuple[str, str]]:
    """Patches that touch what configuring reads, each with the commit that it leaves."""
    parent = str(results["source"]["commit"])
    for patch in results["patch"]["patches"]:
        if patch["status"] != "applied":
            continue
        if any(reads(path) for path in repository.changed_paths(parent, patch["commit"])):
            yield patch["name"], patch["commit"]
        parent = patch["commit"]
