"""Stage `source`: pristine vLLM as a commit, checked against our third-party pins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.context import Context, Results
from sm121.errors import EnvironmentFault, NetworkFault
from sm121.fetch import Cache
from sm121.files import fresh_directory, sha256_text, tree_digest
from sm121.pins.model import OptionalPin, SourcePin
from sm121.source import rust

REPOSITORY = "vllm.git"
# git's empty tree: comparing with it lists every path of a commit.
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


class SourceStage:
    name = "source"

    def key(self, context: Context) -> str:
        return f"source/{context.stack_name}"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        return {
            "pin vllm": context.stack.vllm.model_dump_json(),
            "pins of third-party sources": "".join(
                f"{name}:{pin.model_dump_json()}" for name, pin in context.stack.sources.items()
            ),
            "list of components": " ".join(context.stack.components),
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        ref = context.layout.source / REPOSITORY / str(result["ref"])
        return ref.is_file() and ref.read_text().strip() == result["commit"]

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        from sm121.gitrepo import Repository
        from sm121.source.drift import check_drift
        from sm121.source.vllm import obtain

        repository = Repository(context.layout.source / REPOSITORY)
        base = obtain(
            context.stack.vllm,
            repository,
            cache=Cache(context.layout.cache, context.memory),
            target=context.runtime,
            offline=context.options.offline,
            ui=context.ui,
        )
        if base.provider == "sdist":
            context.ui.note(f"vLLM {context.stack.vllm.version} out of its sdist: {base.reason}")
        check_drift(
            repository,
            base.commit,
            repository.changed_paths(EMPTY_TREE, base.commit),
            context.stack.sources,
            context.stack.components,
        )
        ref = f"refs/sm121/base/{context.stack_name}"
        repository.point(ref, base.commit)
        return {
            "commit": base.commit,
            "provider": base.provider,
            "reason": base.reason,
            "ref": ref,
        }


def _local_digest(folder: Path, pin: SourcePin) -> str:
    parts = [f"{sub}={tree_digest(folder / sub)}" for sub in pin.digested]
    return " ".join([str(folder), *parts])


def built_components(context: Context, results: Results) -> tuple[str, ...]:
    """The components of this build: the profile's, less those that can't be built here."""
    gone = results.get("sources", {}).get("left_out", {})
    return tuple(name for name in context.profile.components if name not in gone)


def left_out_groups(context: Context, results: Results) -> dict[str, str]:
    """Optional parts of the profile that this build is without, and why: by choice, or since they
    can't be built here. In the order of stack.toml."""
    found = results.get("sources", {}).get("groups", {})
    optional = context.stack.profiles[context.options.profile].optional
    return {
        name: "--without" if name in context.options.without else found[name]
        for name in optional
        if name in context.options.without or name in found
    }


class ThirdPartyStage:
    """Stage `sources`: what the profile's components need besides vLLM, ready before configure.

    Optional parts whose tools or crates are not to be had are left out here, and the result says
    which and why.
    """

    name = "sources"

    @staticmethod
    def wanted(context: Context) -> bool:
        """Does the profile need anything besides vLLM?"""
        return bool(context.profile.sources or _rust_groups(context))

    def key(self, context: Context) -> str:
        return f"sources/{context.stack_name}-{context.options.profile}"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        pins = context.stack.sources
        groups = _rust_groups(context)
        return {
            **{f"pin {name}": pins[name].model_dump_json() for name in context.profile.sources},
            # A local clone can be edited at any time, so it is hashed each time.
            **{
                pins[name].env: _local_digest(Path(os.environ[pins[name].env]), pins[name])
                for name in context.profile.sources
                if os.environ.get(pins[name].env)
            },
            **(
                {
                    "Rust sources": _rust_listing(context, results),
                    "programs for Rust": rust.tools_named(),
                    "Rust is for": context.options.target,
                    "must be built": " ".join(sorted(set(groups) & set(context.options.require))),
                }
                if groups
                else {}
            ),
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        from sm121.source.thirdparty import is_as_pinned

        return all(
            Path(source["path"]).is_dir()
            and is_as_pinned(
                name, context.stack.sources[name], context.layout.third_party, context.memory
            )
            for name, source in result["sources"].items()
        )

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        from sm121.source.clones import open_clones
        from sm121.source.thirdparty import obtain

        clones = open_clones(context.options.clones)
        sources = {}
        failed: dict[str, NetworkFault] = {}
        for name in context.profile.sources:
            pin = context.stack.sources[name]
            try:
                source = obtain(
                    name,
                    pin,
                    folder=context.layout.third_party,
                    cache=Cache(context.layout.cache, context.memory),
                    memory=context.memory,
                    target=context.runtime,
                    offline=context.options.offline,
                    ui=context.ui,
                    clones=clones,
                )
            except NetworkFault as fault:
                failed[name] = fault
                continue
            sources[name] = {
                "path": str(source.path / pin.subdirectory),
                "provider": source.provider,
                "digest": dict(source.digest),
            }
        if failed:
            raise _unreachable(context, failed)
        groups, left_out = self._optional(context, results)
        return {"sources": sources, "groups": groups, "left_out": left_out}

    def _optional(
        self, context: Context, results: Results
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Optional parts that can't be built here, and their components, each with the reason.

        Raises EnvironmentFault for one that must be built.
        """
        groups: dict[str, str] = {}
        left_out: dict[str, str] = {}
        for name, pin in _rust_groups(context).items():
            reason = _why_no_rust(context, results)
            if reason and name in context.options.require:
                raise EnvironmentFault(
                    f"{', '.join(pin.components)} can't be built here, and --require {name} asks for them.",
                    cause=reason,
                    remedy=f"Provide what is missing, or leave --require {name} out: then the build is "
                    "made without them, and says so.",
                )
            if reason:
                context.ui.note(
                    f"{name} is left out ({', '.join(pin.components)}): {reason}. Lost with it: {pin.reason}"
                )
                context.ui.say(
                    f"       to try again: --require {name}; to leave it out: --without {name}"
                )
                groups[name] = reason
                left_out |= dict.fromkeys(pin.components, reason)
        return groups, left_out


def _rust_groups(context: Context) -> dict[str, OptionalPin]:
    """The profile's optional parts that cargo builds, as far as they are wanted."""
    optional = context.stack.profiles[context.options.profile].optional
    return {
        name: pin
        for name, pin in optional.items()
        if pin.needs == "cargo" and name not in context.options.without
    }


def rust_components(context: Context) -> set[str]:
    """The components that cargo builds, as far as they are wanted."""
    return {name for pin in _rust_groups(context).values() for name in pin.components}


def _rust_listing(context: Context, results: Results) -> str:
    from sm121.gitrepo import Repository

    repository = Repository(context.layout.source / REPOSITORY)
    return sha256_text(repository.listing(str(results["patch"]["commit"]), rust.FILES))


def cargo_home(context: Context) -> Path:
    """Where crates are kept: cargo's own folder, so that nothing of the user's counts."""
    return context.layout.cache / "cargo"


def _why_no_rust(context: Context, results: Results) -> str:
    from sm121.gitrepo import Repository

    repository = Repository(context.layout.source / REPOSITORY)
    with fresh_directory(context.layout.source / "rust") as fresh:
        repository.export(str(results["patch"]["commit"]), fresh, paths=rust.FILES)
    return rust.why_not(
        context.layout.source / "rust",
        machine=context.runtime.machine,
        cargo_home=cargo_home(context),
        offline=context.options.offline,
        log=context.log("sources"),
    )


def _unreachable(context: Context, failed: Mapping[str, NetworkFault]) -> NetworkFault:
    """One failure for all sources that can't be had, with what else can be built."""
    from sm121.source.thirdparty import used_submodules

    stack, profile = context.stack, context.options.profile
    others = [
        f"--profile {name}: {pin.summary}"
        for name, pin in stack.profiles.items()
        if name != profile
    ]
    return NetworkFault(
        f"Profile {profile} can't be built: {len(failed)} of its sources could not be obtained.",
        details=[
            *(
                f"{name} ({stack.sources[name].ref}): {fault.cause}"
                for name, fault in failed.items()
            ),
            *(
                ["What can be built instead; nothing is taken in its place by itself:"]
                if others
                else []
            ),
            *others,
        ],
        cause="--offline, and neither a local clone nor the cache has them"
        if context.options.offline
        else "neither the git remotes, nor a local clone, nor a wheel on the index has them",
        remedy="Clone "
        + ", ".join(
            stack.sources[name].git
            + (" with its submodules" if used_submodules(stack.sources[name]) else "")
            for name in failed
        )
        + " where they can be reached, and name the clones: --clone PATH --clone PATH"
        + "".join(
            f", {stack.sources[name].env}=PATH"
            for name in failed
            if not stack.sources[name].pinned_commit
        )
        + " (docs/full.md); or choose another profile.",
    )
