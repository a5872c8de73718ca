"""Stage `overlay`: takes the place of environment, toolkit and compile in profile `overlay`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm121.compile.stage import ABI, CompileStage, wheel_version
from sm121.compile.wheel import check_wheel
from sm121.context import Context, Results
from sm121.errors import UsageFault
from sm121.fetch import Cache, fetch_locked
from sm121.lock.pylock import LockedFile
from sm121.lock.resolve import REQUIREMENT_FILES, lock_of
from sm121.overlay.metadata import (
    corrected_metadata,
    corrected_tags,
    corrected_version_file,
    listed_requirements,
)
from sm121.overlay.plan import Fate
from sm121.overlay.release import (
    PACKAGE,
    VERSION_FILE,
    Comparison,
    Release,
    compare,
    contents,
    platform_tag,
    read_release,
)
from sm121.overlay.series import fates_of, python_series
from sm121.overlay.wheel import write_overlay
from sm121.pins.model import OverlayPin, ReleaseWheel
from sm121.source.stage import REPOSITORY

if TYPE_CHECKING:
    from sm121.gitrepo import Repository

# In the dist-info, as repaired wheels have sm121-repair.json.
NOTE = "sm121-overlay.json"


def overlay_pin(context: Context) -> tuple[OverlayPin, ReleaseWheel]:
    """The pins of the overlay, and the release's wheel for the target. Raises UsageFault."""
    pin = context.stack.overlay
    wheel = pin.wheels.get(context.options.target) if pin else None
    if pin is None or wheel is None:
        raise UsageFault(
            f"The release has no wheel for {context.options.target} in this stack.",
            cause="stack.toml, overlay.wheels, does not name one",
            remedy="Choose another --target, or build it with another profile.",
        )
    return pin, wheel


class OverlayStage:
    name = "overlay"

    def key(self, context: Context) -> str:
        return f"overlay/{context.key}"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        pin, wheel = overlay_pin(context)
        lock_of(context, "family", context.runtime, results["patch"]["requirement_files"])
        return {
            "patched tree": str(results["patch"]["tree"]),
            "the release's wheel": wheel.model_dump_json(),
            "what is said of mixed patches": pin.model_dump_json(
                include={"python_alone", "left_out"}
            ),
            "components": " ".join(context.profile.components),
            "version": self._version(context, results),
            "release date": context.stack.vllm.date.isoformat(),
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        wheel = self.dist(context) / str(result["wheel"])
        return wheel.is_file() and context.memory.sha256(wheel) == result["sha256"]

    def dist(self, context: Context) -> Path:
        return CompileStage().dist(context)

    def _version(self, context: Context, results: Results) -> str:
        pin, wheel = overlay_pin(context)
        return wheel_version(context, results, wheel.sha256, *sorted(pin.left_out))

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        from sm121.gitrepo import Repository

        pin, pinned = overlay_pin(context)
        release = read_release(_fetch(context, pinned))
        repository = Repository(context.layout.source / REPOSITORY)
        base = str(results["source"]["commit"])
        compared = compare(release, repository.blobs(base, PACKAGE), commit=base)
        commit, patches = python_series(context, results, repository, pin)
        fates = fates_of(repository, base, patches, release, pin)
        changed = set(repository.changed_paths(base, commit))
        there = repository.blobs(commit, PACKAGE)
        inside = {path for fate in fates for path in fate.files} & changed
        removed = {path for path in inside if path in release.sizes and path not in there}
        version = self._version(context, results)
        tag = f"{ABI}-abi3-{platform_tag(release, context.runtime.machine)}"
        edits = {p: repository.read_bytes(commit, p) for p in sorted(inside & there.keys())}
        dist_info = f"vllm-{version}.dist-info"
        texts, changes = self._texts(context, repository, (base, commit), release, version, tag)
        changes.insert(0, f"{len(edits)} Python files replaced or added, {len(removed)} removed")
        note = {
            "schema_version": 1,
            "original": {"filename": pinned.filename, "sha256": pinned.sha256},
            "changes": changes,
            "patches": [asdict(fate) for fate in fates],
        }
        texts[NOTE] = json.dumps(note, indent=1) + "\n"
        edits |= {f"{dist_info}/{name}": text.encode() for name, text in texts.items()}
        edits[VERSION_FILE] = self._version_file(context, release, version)
        final = self.dist(context) / f"vllm-{version}-{tag}.whl"
        write_overlay(
            release, final, dist_info=dist_info, edits=edits, removed=removed,
            epoch=int(context.stack.vllm.date.timestamp()),
        )  # fmt: skip
        libraries = check_wheel(
            final,
            machine=context.runtime.machine,
            filename=final.name,
            components=context.profile.components,
            # No binary in it was compiled here. Upstream's hold paths of its own build, which this
            # checkout's may happen to be (/workspace).
            forbidden=(),
            family=context.stack.family,
            required=results["patch"]["required"],
            python=context.runtime.python,
        )
        for old in self.dist(context).glob("*.whl"):
            if old != final:
                old.unlink()
        _tell(context, pinned, compared, fates)
        return {
            "wheel": final.name,
            "sha256": context.memory.sha256(final),
            "version": version,
            "libraries": {
                name: {"machine": lib.machine, "needed": list(lib.needed)}
                for name, lib in libraries.items()
            },
            "original": {"filename": pinned.filename, "sha256": pinned.sha256},
            "changes": changes,
            "patches": {fate.name: asdict(fate) for fate in fates},
            "commit": commit,
            "contents": contents(context.profile.components, release, there),
            "differing": list(compared.differing),
        }

    def _texts(
        self, context: Context, repository: Repository, commits: tuple[str, str],
        release: Release, version: str, tag: str,
    ) -> tuple[dict[str, str], list[str]]:  # fmt: skip
        """METADATA and WHEEL, and what was changed in them."""
        pristine, patched = (
            listed_requirements({n: repository.read(ref, n) or "" for n in REQUIREMENT_FILES})
            for ref in commits
        )
        metadata, changes = corrected_metadata(
            release.wheel.metadata, version=version, pristine=pristine, patched=patched
        )
        changes.append(f"tag: {release.wheel.filename.split('-', 2)[2]} is now {tag}.whl")
        return {"METADATA": metadata, "WHEEL": corrected_tags(release.wheel.tags, tag)}, changes

    def _version_file(self, context: Context, release: Release, version: str) -> bytes:
        import zipfile

        with zipfile.ZipFile(release.wheel.path) as archive:
            text = archive.read(VERSION_FILE).decode()
        return corrected_version_file(text, old=context.stack.vllm.version, new=version).encode()


def _fetch(context: Context, pinned: ReleaseWheel) -> Path:
    file = LockedFile(
        distribution="vllm", version=context.stack.vllm.version, filename=pinned.filename,
        sha256=pinned.sha256, size=0,
    )  # fmt: skip
    return fetch_locked(
        [file], target=context.runtime, cache=Cache(context.layout.cache, context.memory),
        offline=context.options.offline, ui=context.ui,
    )[file.sha256]  # fmt: skip


def _tell(
    context: Context, pinned: ReleaseWheel, compared: Comparison, fates: Sequence[Fate]
) -> None:
    ui = context.ui
    ui.say(f"       release     {pinned.filename}: {compared.same} files are as in its source")
    for name in compared.differing:
        ui.say(f"                   {name} differs: generated when the wheel was built")
    ui.say(f"                   not from vLLM's own tree: {', '.join(f'{f} ({n})' for f, n in compared.only_wheel.items())}")  # fmt: skip
    ui.table(
        ("patch", "in the overlay", "files", "not applied"),
        [
            (f.name, f.status, str(len(f.files)), ", ".join(f.not_applied) or "-")
            for f in fates
        ],
    )  # fmt: skip
    for fate in fates:
        if fate.reason:
            ui.note(f"patch {fate.name} {fate.status}: {fate.reason}")
