"""Stage `wheelhouse`: gather, describe, replace in one step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from sm121.compile.stage import CompileStage
from sm121.context import Context, Results
from sm121.errors import CheckFailed
from sm121.files import fresh_directory, sha256_text
from sm121.lock.pylock import lock_path
from sm121.patches.series import load_series
from sm121.patches.stage import series_folder
from sm121.wheelhouse.manifest import (
    Base,
    Check,
    ComponentEntry,
    LibraryEntry,
    Manifest,
    PatchEntry,
    WheelEntry,
    render,
)

SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"
# A build for deployment; anything less says so (sync refuses it unless told otherwise).
_WHOLE_PROFILES = ("full",)


class WheelhouseStage:
    name = "wheelhouse"

    def key(self, context: Context) -> str:
        return f"wheelhouse/{context.layout.wheelhouse}"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        compiled = results["compile"]
        return {
            "stack": context.stack_name,
            "target": context.options.target,
            "profile": context.options.profile,
            "our wheel": str(compiled["sha256"]),
            "reasons for leaving components out": sha256_text(
                *(f"{k}={v}" for k, v in context.stack.left_out.items())
            ),
            "patched commit": str(results["patch"]["commit"]),
            "source": str(results["source"]["reason"]),
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        folder = context.layout.wheelhouse
        return (
            not verify_sums(context, folder)
            and (folder / MANIFEST).is_file()
            and (sha256_text((folder / MANIFEST).read_text()) == result["manifest"])
        )

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        final = context.layout.wheelhouse
        guard_foreign(final)
        compiled = results["compile"]
        wheel = CompileStage().dist(context) / str(compiled["wheel"])
        with fresh_directory(final) as fresh:
            # wheelhouse/README.md belongs to the repository, not to a build.
            if (final / "README.md").is_file():
                shutil.copy2(final / "README.md", fresh / "README.md")
            place(wheel, fresh / wheel.name)
            manifest = render(describe(context, results, [fresh / wheel.name]))
            (fresh / MANIFEST).write_text(manifest, encoding="utf-8")
            write_sums(context, fresh)
        return {"manifest": sha256_text(manifest)}


def place(source: Path, destination: Path) -> None:
    """Copy a wheel into the wheelhouse: a copy of its own, so that no later edit of one
    changes the other; the hard link is not used for the same reason."""
    shutil.copyfile(source, destination)
    destination.chmod(0o644)


def guard_foreign(folder: Path) -> None:
    """Refuse to replace a folder that no build made. Raises CheckFailed."""
    if not folder.is_dir() or (folder / MANIFEST).is_file():
        return
    foreign = sorted(p.name for p in folder.iterdir() if p.name != "README.md")
    if foreign:
        raise CheckFailed(
            f"{folder} holds files that no build made: {', '.join(foreign[:5])}.",
            cause="a build replaces the whole folder, and these would be lost",
            remedy="Move them away, or build into another folder with --wheelhouse.",
        )


def describe(context: Context, results: Results, wheels: list[Path]) -> Manifest:
    """The manifest of a gathered wheelhouse."""
    source, patch, compiled = results["source"], results["patch"], results["compile"]
    stack = context.stack
    sums = {p.name: p.sha256 for p in load_series(series_folder(context))}
    built = tuple(context.profile.components)
    left_out = {
        name: stack.left_out.get(name, f"not in profile {context.options.profile}")
        for name in stack.components
        if name not in built
    }
    family = lock_path(context.layout.pins, context.stack_name, "family", context.runtime)
    entries = []
    for wheel in wheels:
        distribution, version, _, _ = parse_wheel_filename(wheel.name)
        entries.append(
            WheelEntry(
                filename=wheel.name,
                distribution=distribution,
                version=str(version),
                size=wheel.stat().st_size,
                sha256=context.memory.sha256(wheel),
                origin="built",
                libraries={
                    name: LibraryEntry(machine=lib["machine"], needed=tuple(lib["needed"]))
                    for name, lib in compiled["libraries"].items()
                },
            )
        )
    return Manifest(
        schema_version=1,
        stack=context.stack_name,
        target=context.options.target,
        python=context.runtime.python,
        glibc=stack.targets[context.options.target].glibc,
        profile=context.options.profile,
        partial=context.options.profile not in _WHOLE_PROFILES,
        arch=context.arch,
        base=Base(
            version=stack.vllm.version,
            commit=stack.vllm.commit,
            provider=source["provider"],
            provider_reason=source["reason"],
            sdist_sha256=stack.vllm.sdist_sha256,
        ),
        patches=tuple(
            PatchEntry(**{k: v for k, v in p.items() if k != "offset"}, sha256=sums[p["name"]])
            for p in patch["patches"]
        ),
        patched_commit=patch["commit"],
        lock_sha256={family.name: context.memory.sha256(family)},
        components=ComponentEntry(built=built, left_out=left_out),
        tools={
            **results["environment"]["tools"],
            "python": results["environment"]["python"],
            "compiler": results["toolkit"]["compiler"],
            "build": "native" if results["toolkit"]["native"] else "cross",
        },
        wheels=tuple(entries),
        checks=(
            Check(
                name="wheel",
                verdict="passed",
                detail="platform, version, components, NEEDED, RUNPATH, build paths, METADATA",
            ),
            Check(
                name="dependencies",
                verdict="not run",
                detail="this wheelhouse holds vllm only; the family's wheels are in the lock",
            ),
        ),
    )


def write_sums(context: Context, folder: Path) -> None:
    """SHA256SUMS of all wheels and the manifest, in the format of sha256sum(1)."""
    files = sorted([*folder.glob("*.whl"), folder / MANIFEST], key=lambda f: f.name)
    lines = [f"{context.memory.sha256(file)}  {file.name}\n" for file in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def verify_sums(context: Context, folder: Path) -> list[str]:
    """Faults of a wheelhouse against its own SHA256SUMS: missing, altered and extra files."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return [f"{SUMS} is missing"]
    wanted = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    faults = []
    for name, digest in wanted.items():
        file = folder / os.path.basename(name)  # noqa: PTH119 - never outside the folder
        if not file.is_file():
            faults.append(f"{name} is missing")
        elif context.memory.sha256(file) != digest:
            faults.append(f"{name} was altered")
    faults += [f"{p.name} is not listed" for p in folder.glob("*.whl") if p.name not in wanted]
    return faults


def load_manifest(folder: Path) -> Manifest | None:
    """The manifest of a wheelhouse, None if there is none."""
    try:
        return Manifest.model_validate(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except OSError:
        return None
