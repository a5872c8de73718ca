"""Stage `source`: pristine vLLM as a commit, checked against our third-party pins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.context import Context, Results
from sm121.fetch import Cache
from sm121.files import tree_digest
from sm121.pins.model import SourcePin

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
    parts = [f"{sub}={tree_digest(folder / sub)}" for sub in pin.digest or {".": ""}]
    return " ".join([str(folder), *parts])


class ThirdPartyStage:
    """Stage `sources`: what the profile's components need besides vLLM, ready before configure."""

    name = "sources"

    def key(self, context: Context) -> str:
        return f"sources/{context.stack_name}-{context.options.profile}"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        pins = context.stack.sources
        return {
            **{f"pin {name}": pins[name].model_dump_json() for name in context.profile.sources},
            # A local clone can be edited at any time, so it is hashed each time.
            **{
                pins[name].env: _local_digest(Path(os.environ[pins[name].env]), pins[name])
                for name in context.profile.sources
                if os.environ.get(pins[name].env)
            },
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        return all(Path(source["path"]).is_dir() for source in result["sources"].values())

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        from sm121.source.thirdparty import obtain

        sources = {}
        for name in context.profile.sources:
            pin = context.stack.sources[name]
            source = obtain(
                name,
                pin,
                folder=context.layout.source / "third-party",
                cache=Cache(context.layout.cache, context.memory),
                target=context.runtime,
                offline=context.options.offline,
                ui=context.ui,
            )
            sources[name] = {
                "path": str(source.path / pin.subdirectory),
                "provider": source.provider,
                "digest": dict(source.digest),
            }
        return {"sources": sources}
