"""Stage `compile`: the patched tree becomes one wheel."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.compile.build import run_setup
from sm121.compile.cost import show_cost
from sm121.compile.deepgemm import deepgemm_environment
from sm121.compile.jobs import choose_jobs, usable_cores
from sm121.compile.launching import costs_of, prepare, source_places
from sm121.compile.memory import available_memory
from sm121.compile.toolchain import (
    Tools,
    build_environment,
    compiler_cache,
    prefix_maps,
    toolchain_text,
)
from sm121.compile.wheel import canonical_wheel, check_wheel
from sm121.context import Context, Results
from sm121.errors import Sm121Error
from sm121.files import remove_tree, sha256_text, write_atomic
from sm121.lock.pylock import lock_path
from sm121.lock.resolve import lock_of
from sm121.source.rust import cargo_environment
from sm121.source.stage import (
    REPOSITORY,
    built_components,
    cargo_home,
    left_out_groups,
    rust_components,
)
from sm121.toolkit.deepgemm import COMPONENT as DEEPGEMM
from sm121.toolkit.deepgemm import deepgemm_python
from sm121.toolkit.machine import find_compilers, host_machine, require_programs
from sm121.toolkit.stage import EnvironmentStage, ToolkitStage, host_interpreter

# spinloop needs Py_buffer of the limited API of 3.11 (vLLM's CMakeLists.txt), so the cp38 of
# upstream's image build would not be true.
ABI = "cp311"


def wheel_version(context: Context, results: Results, *more: str) -> str:
    """'0.26.0+sm121.smoke.1a2b3c4d': the last part a digest of release, series and lock, and
    of whatever `more` decides what is in the wheel; nothing of the machine. Before it, what of
    the profile is not in: '0.26.0+sm121.full.norust.1a2b3c4d'."""
    family = lock_path(context.layout.pins, context.stack_name, "family", context.runtime)
    digest = sha256_text(
        context.stack.vllm.model_dump_json(),
        *(f"{p['name']}:{p['patch_id']}" for p in results["patch"]["patches"]),
        context.memory.sha256(family),
        *more,
    )
    # PEP 440 reads a part of digits only as a number and drops its leading zeros.
    start = next(i for i in range(56) if not digest[i : i + 8].isdigit())
    without = "".join(f"no{name}." for name in left_out_groups(context, results))
    return (
        f"{context.stack.vllm.version}+sm121.{context.options.profile}.{without}"
        f"{digest[start : start + 8]}"
    )


def _used_sources(context: Context, results: Results) -> str:
    """What of the third-party sources decides the binaries, as JSON: neither who provided them
    nor where they lie."""
    pins, decides = context.stack.sources, {"ref", "submodules", "subdirectory", "cmake"}
    used = {
        name: {
            "pin": pins[name].model_dump(mode="json", include=decides),
            "digest": source["digest"],
        }
        for name, source in results.get("sources", {}).get("sources", {}).items()
    }
    return json.dumps(used, sort_keys=True)


def make_tools(context: Context) -> Tools:
    """The finished toolkit's folders, for compiling and for `shell`."""
    require_programs(context.stack.host.programs)
    interpreter, _ = host_interpreter(context)
    environment = EnvironmentStage().folder(context)
    toolkit = ToolkitStage().folder(context)
    machine = context.runtime.machine
    native = machine == host_machine()
    return Tools(
        machine=machine,
        cuda=toolkit / "cuda",
        torch=toolkit / "site",
        python_include=interpreter.include if native else toolkit / "python",
        python_version=interpreter.version,
        environment=environment,
        compilers=find_compilers(machine),
    )


# Where vLLM's CMake lets scripts write kernels, when it configures (Marlin, Machete: generate*.py).
# It runs a script again only if the script changed, and then the script removes its old files. So
# they belong to the ninja tree: without them it would build libraries that lack these kernels.
GENERATED = "csrc/"


class CompileStage:
    name = "compile"

    def key(self, context: Context) -> str:
        return f"compile/{context.key}-{context.options.profile}"

    def work(self, context: Context) -> Path:
        return context.layout.build / "work" / context.key

    def tree(self, context: Context) -> Path:
        return self.work(context) / "src"

    def dist(self, context: Context) -> Path:
        return context.layout.build / "dist" / f"{context.key}-{context.options.profile}"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        components = built_components(context, results)
        lock_of(context, "family", context.runtime, results["patch"]["requirement_files"])
        return {
            "patched tree": str(results["patch"]["tree"]),
            "host environment": str(results["environment"]["fingerprint"]),
            "toolkit": str(results["toolkit"]["fingerprint"]),
            "third-party sources": _used_sources(context, results),
            "components": " ".join(components),
            **(
                {"Python of DeepGEMM": deepgemm_python(context).full}
                if DEEPGEMM in components
                else {}
            ),
            "arch": context.arch,
            "version": self.version(context, results),
            "release date": context.stack.vllm.date.isoformat(),
        }

    def version(self, context: Context, results: Results) -> str:
        """wheel_version, with what else decides the binaries: arch, CUDA toolkit, sources."""
        toolkit = json.dumps(context.stack.cuda.toolkit, sort_keys=True)
        return wheel_version(
            context, results, context.arch, toolkit, _used_sources(context, results)
        )

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        wheel = self.dist(context) / str(result["wheel"])
        return wheel.is_file() and context.memory.sha256(wheel) == result["sha256"]

    def environment(self, context: Context, results: Results, tools: Tools) -> dict[str, str]:
        """The environment that setup.py gets; `shell` gives the same to a person."""
        work = self.work(context)
        components = built_components(context, results)
        jobs = choose_jobs(
            asked=context.options.jobs, cores=usable_cores(), available=available_memory()
        )
        launching = prepare(context, work=work, environment=tools.environment, jobs=jobs)
        ninja_tree = work / "ninja"  # at this depth, whatever it will be called
        folders = {
            self.tree(context): "vllm",
            tools.cuda: "cuda",
            tools.torch: "site",
            tools.python_include: "python",
            work: "build",
        }
        own = prefix_maps(folders, ninja_tree=ninja_tree)
        replaced = [f"{old}={new}" for old, new in own.items() if not Path(old).is_absolute()]
        pins = context.stack.sources
        sources = {
            name: Path(source["path"])
            for name, source in results.get("sources", {}).get("sources", {}).items()
        }
        # Also those that this build does without: other flags would compile everything again.
        places = {
            folder / pins[name].subdirectory: name
            for name, folder in source_places(context).items()
        }
        prefixes = own | prefix_maps(places, ninja_tree=ninja_tree)
        variables = {
            variable: sources[name] / folder
            for name in sources
            for variable, folder in pins[name].cmake.items()
        }
        context.ui.say(f"       jobs        {jobs.reason}")
        toolchain = work / "toolchain.cmake"
        text = toolchain_text(
            tools, prefixes=prefixes, variables=variables, launcher=launching.command
        )
        if not toolchain.is_file() or toolchain.read_text() != text:
            write_atomic(toolchain, text)
        environment = build_environment(
            tools,
            toolchain=toolchain,
            components=components,
            arch=context.arch,
            jobs=jobs.count,
            version=self.version(context, results),
            epoch=int(context.stack.vllm.date.timestamp()),
            cache_base=context.layout.build,
            home=work / "home",
            sources={
                pins[name].env: folder
                for name, folder in sources.items()
                if pins[name].handed_over == "env"
            },
            ccache_dir=context.layout.cache / "ccache",
            replaced=replaced,
            ninja=launching.ninja,
            settings=launching.settings,
        )
        environment["FETCHCONTENT_BASE_DIR"] = str(work / "deps")
        cache = compiler_cache(environment["PATH"])
        if DEEPGEMM in components:
            environment |= deepgemm_environment(
                tools, deepgemm_python(context), work=work, prefixes=prefixes,
                launcher=[*launching.command, *([cache] if cache else [])],
                log=context.log(self.name),
            )  # fmt: skip
        if rust_components(context) & set(components):
            environment |= cargo_environment(
                machine=tools.machine, compilers=tools.compilers, cargo_home=cargo_home(context),
                work=work / "cargo", prefixes=prefixes,
            )  # fmt: skip
        return environment

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        from sm121.gitrepo import Repository

        tools = make_tools(context)
        work = self.work(context)
        work.mkdir(parents=True, exist_ok=True)
        repository = Repository(context.layout.source / REPOSITORY)
        commit, tree = str(results["patch"]["commit"]), self.tree(context)
        rewritten = repository.checkout(commit, tree, keep=GENERATED)
        context.ui.say(f"       tree        {len(rewritten)} file(s) rewritten in {tree}")
        environment = self.environment(context, results, tools)
        jobs = int(environment["MAX_JOBS"])
        # CMake remembers compilers and torch: another toolchain gets another ninja tree. (Not
        # the stages' fingerprints: a reworded comment there must not cost hours of nvcc.)
        # Nor by what CMake sets anew each time, which is where the sources in use lie.
        identity = sha256_text(
            lasting((work / "toolchain.cmake").read_text(), context),
            str(results["toolkit"]["content"]),
            str(results["environment"]["python"]),
            context.arch,
        )[:8]
        output = work / f"ninja-{identity}"
        for other in work.glob("ninja-*"):
            if other != output:
                remove_tree(other)
        if not any(name.startswith(GENERATED) for name in repository.untracked(tree)):
            forget_generated(output)
        try:
            built = run_setup(
                tree=self.tree(context),
                output=output,
                python=tools.environment / "bin/python",
                environment=environment,
                abi=ABI,
                machine=tools.machine,
                jobs=jobs,
                log=context.log(self.name),
                ui=context.ui,
                seconds={name: cost.cpu for name, cost in costs_of(context).items()},
                shell_options=f"--profile {context.options.profile} --target {context.options.target}",
            )
        except Sm121Error:
            # Where the minutes went is asked of a build that failed, too; the failure counts.
            with contextlib.suppress(OSError, Sm121Error):
                show_cost(context, output)
            raise
        cost = show_cost(context, output, built=built.objects)
        # setup.py writes into its own tree (_version.py, egg-info); what `shell` finds edited
        # there afterwards shall be a person's edits only.
        repository.checkout(commit, tree, keep=GENERATED)
        version = environment["VLLM_VERSION_OVERRIDE"]
        wanted_name = f"vllm-{version}-{ABI}-abi3-linux_{tools.machine}.whl"
        libraries = check_wheel(
            built.wheel,
            machine=tools.machine,
            filename=wanted_name,
            components=built_components(context, results),
            forbidden=[str(context.layout.build), str(context.layout.root)],
            family=context.stack.family,
            required=results["patch"]["required"],
            python=context.runtime.python,
        )
        final = self.dist(context) / built.wheel.name
        for old in self.dist(context).glob("*.whl"):
            if old != final:
                old.unlink()
        canonical_wheel(built.wheel, final, epoch=int(environment["SOURCE_DATE_EPOCH"]))
        return {
            "wheel": final.name,
            "sha256": context.memory.sha256(final),
            "version": version,
            "objects": built.objects,
            "cost": cost,
            "jobs": jobs,
            "compiler_cache": compiler_cache(environment["PATH"]) or "none",
            "libraries": {
                name: {"machine": lib.machine, "needed": list(lib.needed)}
                for name, lib in libraries.items()
            },
        }


def lasting(toolchain: str, context: Context) -> str:
    """A toolchain file without the variables of third-party sources."""
    names = {name for pin in context.stack.sources.values() for name in pin.cmake}
    starts = tuple(f"set({name} " for name in names)
    return "".join(x for x in toolchain.splitlines(keepends=True) if not x.startswith(starts))


def forget_generated(ninja_tree: Path) -> None:
    """Make CMake run the generating scripts again: what they wrote is gone (a tree made anew)."""
    for cache in ninja_tree.glob("temp.*/CMakeCache.txt"):
        lines = cache.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if "_GEN_SCRIPT_HASH" not in line]
        if kept != lines:
            write_atomic(cache, "".join(kept))
