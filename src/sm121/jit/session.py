"""Bring tree and environment up to date, and make the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sm121.context import Context, Results, Stage
from sm121.errors import PinsFault, UsageFault
from sm121.files import sha256_text
from sm121.jit.base.environment import JitEnvironmentStage
from sm121.jit.base.tree import JitTreeStage
from sm121.jit.drive import Bench
from sm121.jit.examine import environment_faults, published_config, versions
from sm121.jit.last import Source
from sm121.jit.recipes import FILE, Recipes, has_recipes, load_recipes
from sm121.jit.results import Results as Memory
from sm121.jit.results import environment_identity, tree_identity
from sm121.jit.verify import Job, shapes_fault
from sm121.patches.stage import PatchStage
from sm121.pipeline import run_stages, start_log
from sm121.repair.installed import open_environment
from sm121.source.stage import SourceStage


def prepare(
    context: Context,
    *,
    env: Path | None,
    tree: Path | None,
    only: Sequence[str] | None,
    seconds: int,
    arch: str | None = None,
) -> Job:
    """A job on the stack's own tree and environment, or on those given.

    Raises UsageFault for a stack without jit.toml, an unknown recipe, or a tree without vLLM.
    """
    if not has_recipes(context.layout.pins, context.stack_name):
        raise UsageFault(
            f"Stack {context.stack_name} has no {FILE}.",
            cause="it says with which shapes its kernels are compiled",
            remedy=f"Write pins/{context.stack_name}/{FILE}; docs/jit.md says how.",
        )
    recipes = load_recipes(context.layout.pins, context.stack_name)
    for name in only or ():
        if name not in recipes.recipes:
            raise UsageFault(
                f"jit.toml has no recipe {name!r}.", cause=f"it has {', '.join(recipes.recipes)}"
            )
    made: Results = {}
    tree_stage, env_stage = JitTreeStage(), JitEnvironmentStage()
    if tree is None or env is None:
        stages: list[Stage] = [SourceStage(), PatchStage()]
        if tree is None:
            stages.append(tree_stage)
        if env is None:
            stages.append(env_stage)
        made, _ = run_stages(context, stages)
    folder = tree or tree_stage.folder(context)
    if not (folder / "vllm").is_dir():
        raise UsageFault(f"{folder} has no vllm/ in it.", remedy="Give the folder above vllm/.")
    environment = open_environment(env or env_stage.folder(context))
    log = context.log("verify-jit")
    arch = arch or context.stack.cuda.arch
    target = f"sm_{arch.replace('.', '')}"
    inputs = {
        "tree": tree_identity(folder)
        if tree
        else sha256_text(str(made["jit-tree"]["fingerprint"])),
        "environment": environment_identity(environment.site),
        "target": target,
    }
    start_log(log, "verify-jit", "asked for", inputs)
    shapes = recipes.shapes.model_dump()
    work = context.layout.build / "jit" / context.stack_name / "work"
    bench = Bench(
        tree=folder.resolve(), python=environment.interpreter,
        toolkit=environment.site / "nvidia/cu13", work=work, log=log, seconds=seconds,
        shapes=shapes, modules=_modules(context, recipes), arch=arch,
    )  # fmt: skip
    memory = Memory(context.layout.build / "jit" / context.stack_name / "results.json")
    published = memory.config(
        inputs["environment"], lambda: published_config(environment.interpreter, log)
    )
    return Job(
        stack=context.stack_name, target=target, recipes=recipes, bench=bench,
        results=memory,
        inputs=inputs, versions=versions(environment),
        faults=environment_faults(context.layout.pins, environment),
        notes=shapes_fault(shapes, published), only=only,
        source=None if tree or env
        else Source(commit=str(made["patch"]["commit"]), tree=str(made["patch"]["tree"])),
    )  # fmt: skip


def _modules(context: Context, recipes: Recipes) -> dict[str, dict[str, object]]:
    """FlashInfer's modules that recipes name, as stack.toml generates them.

    Raises PinsFault if it does not list one.
    """
    listed = context.stack.jit_cache.modules if context.stack.jit_cache else {}
    modules: dict[str, dict[str, object]] = {}
    for name, recipe in recipes.recipes.items():
        if not recipe.flashinfer:
            continue
        if name not in listed:
            raise PinsFault(
                f"jit.toml, recipes.{name}: stack.toml lists no such FlashInfer module.",
                cause=f"[jit-cache.modules] has {', '.join(listed) or 'none'}",
            )
        modules[name] = {
            "generator": listed[name].generator, "arguments": dict(listed[name].arguments),
            "kernel": recipe.flashinfer[0],
        }  # fmt: skip
    return modules
