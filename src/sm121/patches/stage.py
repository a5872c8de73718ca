"""Stage `patch`: the series as commits on top of pristine vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sm121.context import Context, Results
from sm121.files import sha256_text
from sm121.lock.resolve import REQUIREMENT_FILES
from sm121.patches.left_out import check_left_out
from sm121.patches.series import load_series
from sm121.source.stage import REPOSITORY


def series_folder(context: Context) -> Path:
    return context.layout.patches / "vllm" / context.stack_name


def _required(requirements: str) -> Iterator[str]:
    """Distributions that a requirements file names on lines of its own."""
    for line in requirements.splitlines():
        if match := re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line):
            yield canonicalize_name(match[0])


class PatchStage:
    name = "patch"

    def key(self, context: Context) -> str:
        return f"patch/{context.stack_name}"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        series = load_series(series_folder(context))
        # Here, since a change of these pins alone does not make the stage run.
        check_left_out(context.stack.sources_left_out, series)
        return {
            "base commit": str(results["source"]["commit"]),
            "order of the series": " ".join(patch.name for patch in series),
            **{f"patch {patch.name}": patch.sha256 for patch in series},
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        ref = context.layout.source / REPOSITORY / str(result["ref"])
        return ref.is_file() and ref.read_text().strip() == result["commit"]

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        from sm121.gitrepo import Repository
        from sm121.patches.apply import apply_series

        repository = Repository(context.layout.source / REPOSITORY)
        applied = apply_series(
            repository, str(results["source"]["commit"]), load_series(series_folder(context))
        )
        ref = f"refs/sm121/patched/{context.stack_name}"
        repository.point(ref, applied.commit)
        for patch in applied.patches:
            if patch.status == "upstreamed":
                context.ui.note(f"patch {patch.name}: upstream has it, so it makes no commit")
            elif patch.offset:
                context.ui.note(f"patch {patch.name}: applied {patch.offset} lines off")
        texts = {name: repository.read(applied.commit, name) or "" for name in REQUIREMENT_FILES}
        return {
            "commit": applied.commit,
            "tree": repository.tree_of(applied.commit),
            "ref": ref,
            "patches": [asdict(patch) for patch in applied.patches],
            "requirement_files": {name: sha256_text(text) for name, text in texts.items()},
            "required": sorted(
                set(context.stack.family)
                & {name for text in texts.values() for name in _required(text)}
            ),
        }
