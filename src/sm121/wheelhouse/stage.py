"""Stage `wheelhouse`: gather, check, describe, replace in one step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.abi.policy.load import DEFAULT as POLICY
from sm121.compile.stage import CompileStage
from sm121.context import Context, Results
from sm121.errors import CheckFailed
from sm121.files import fresh_directory, link_or_copy, sha256_text
from sm121.jitcache.stage import JitCacheStage
from sm121.lock.pylock import LockedFile, lock_path, make_lock, render_lock
from sm121.repair.stage import RepairStage, family_files, fetch_family
from sm121.rules.model import FILE as RULES
from sm121.rules.model import load_rules
from sm121.serve.load import carried
from sm121.wheelhouse.check import check_set
from sm121.wheelhouse.describe import describe, first_start, tools, wheel_entry
from sm121.wheelhouse.manifest import FILE as MANIFEST
from sm121.wheelhouse.manifest import Check, OriginalEntry, WheelEntry, render
from sm121.wheelhouse.sums import SUMS, listed, verify_sums, write_sums

PYLOCK = "pylock.toml"
INSTALLER = Path(__file__).with_name("install.py")


class WheelhouseStage:
    name = "wheelhouse"

    def key(self, context: Context) -> str:
        return f"wheelhouse/{context.layout.wheelhouse}"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        made = made_wheel(results)
        inputs = {
            "stack": context.stack_name,
            "target": context.options.target,
            "profile": context.options.profile,
            "our wheel": str(made["sha256"]),
            "reasons for leaving components out": sha256_text(
                *(f"{k}={v}" for k, v in context.stack.left_out.items())
            ),
            "patched commit": str(results["patch"]["commit"]),
            "source": str(results["source"]["reason"]),
            "tools": json.dumps(tools(results), sort_keys=True),
            "policy of GPU code": context.memory.sha256(POLICY),
            "dependencies": "with" if context.options.with_deps else "without",
        }
        if context.stack.sources_left_out:
            inputs["reasons for leaving sources out"] = sha256_text(
                *(pin.model_dump_json() for pin in context.stack.sources_left_out)
            )
        if context.stack.jit_cache:
            inputs["what is said of FlashInfer's modules"] = sha256_text(
                context.stack.jit_cache.model_dump_json()
            )
        if (said := first_start(context, results)) is not None:
            inputs["what a node compiles at its first start"] = sha256_text(repr(said))
        if "jit-cache" in results:
            inputs["FlashInfer's modules"] = str(results["jit-cache"]["sha256"])
        if context.options.with_deps:
            inputs["repaired wheels"] = str(results["repair"]["fingerprint"])
            inputs["family rules"] = context.memory.sha256(context.layout.pins / RULES)
            inputs["how to install and serve"] = json.dumps(
                {f.name: context.memory.sha256(f) for f in scripts(context)}
            )
        return inputs

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        folder = context.layout.wheelhouse
        return (
            not verify_sums(context, folder)
            and (folder / MANIFEST).is_file()
            and (sha256_text((folder / MANIFEST).read_text()) == result["manifest"])
        )

    def guard(self, context: Context) -> None:
        """Raises CheckFailed for a folder that may not be replaced."""
        guard_foreign(context.layout.wheelhouse)

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        final = context.layout.wheelhouse
        guard_foreign(final)  # again: compiling may have taken hours
        if (final / MANIFEST).is_file():
            for fault in verify_sums(context, final):
                context.ui.note(f"in the wheelhouse until now: {fault}")
        made = made_wheel(results)
        wheel = CompileStage().dist(context) / str(made["wheel"])
        with fresh_directory(final) as fresh:
            # wheelhouse/README.md belongs to the repository, not to a build.
            if (final / "README.md").is_file():
                shutil.copy2(final / "README.md", fresh / "README.md")
            place(wheel, fresh / wheel.name)
            ours = wheel_entry(
                fresh / wheel.name, context.memory,
                origin="overlay" if "original" in made else "built", libraries=made["libraries"],
                original=OriginalEntry(**made["original"]) if "original" in made else None,
                changes=tuple(made.get("changes", ())),
            )  # fmt: skip
            entries, checks = [ours, *jit_cache(context, results, fresh)], [_NO_DEPENDENCIES]
            extra = scripts(context) if context.options.with_deps else ()
            if context.options.with_deps:
                entries += gather(context, results, fresh)
                (fresh / PYLOCK).write_text(wheelhouse_lock(context, entries), encoding="utf-8")
                for file in extra:
                    shutil.copyfile(file, fresh / file.name)
                wheels, checks = check_set(fresh, load_rules(context.layout.pins), context.runtime)
            files = {f.name: context.memory.sha256(f) for f in extra}
            described = describe(context, results, fresh / wheel.name, entries, checks, files)
            manifest = render(described)
            (fresh / MANIFEST).write_text(manifest, encoding="utf-8")
            if context.options.with_deps:
                from sm121.wheelhouse import sbom

                text = sbom.render_sbom(described, wheels, date=context.stack.vllm.date)
                (fresh / sbom.FILE).write_text(text, encoding="utf-8")
            write_sums(context, fresh)
        for name in [*(entry.filename for entry in entries), MANIFEST]:
            # Renamed with the folder: the same files, known by their hash already.
            context.memory.moved(fresh / name, final / name)
        return {"manifest": sha256_text(manifest)}


def scripts(context: Context) -> tuple[Path, ...]:
    """What runs on a node, and what it reads: install.py, and for a stack that can be served,
    serve.toml and the scripts around a start (sm121.serve)."""
    return (INSTALLER, *carried(context.layout.pins, context.stack_name))


def made_wheel(results: Results) -> Mapping[str, Any]:
    """Result of the stage that made our wheel: `overlay` in that profile, else `compile`."""
    return results["overlay"] if "overlay" in results else results["compile"]


_NO_DEPENDENCIES = Check(
    name="dependencies",
    verdict="not run",
    detail="this wheelhouse holds vllm only; the family's wheels come with --with-deps",
)


def jit_cache(context: Context, results: Results, folder: Path) -> list[WheelEntry]:
    """Put FlashInfer's modules into the folder, if this build has them."""
    made = results.get("jit-cache")
    if made is None:
        return []
    wheel = JitCacheStage().dist(context) / str(made["wheel"])
    place(wheel, folder / wheel.name)
    libraries = {
        facts["file"]: {"machine": context.runtime.machine, "needed": facts["needed"]}
        for facts in made["modules"].values()
    }
    return [wheel_entry(folder / wheel.name, context.memory, origin="built", libraries=libraries)]


def place(source: Path, destination: Path) -> None:
    """Copy our wheel into the wheelhouse: a copy of its own, so that no later edit of one
    changes the other; the hard link is not used for the same reason."""
    shutil.copyfile(source, destination)
    destination.chmod(0o644)


def gather(context: Context, results: Results, folder: Path) -> list[WheelEntry]:
    """Put the lock's wheels into the folder, repaired ones in place of theirs.

    Hard links, since it is several GB: the cache notices by itself if one is altered.
    """
    repaired = results["repair"]["repaired"]
    paths = fetch_family(context, results)
    entries = []
    for file in family_files(context, results):
        facts = repaired.get(file.distribution)
        name = str(facts["filename"]) if facts else file.filename
        source = RepairStage().folder(context) / name if facts else paths[file.sha256]
        link_or_copy(source, folder / name)
        context.memory.remember(folder / name, str(facts["sha256"]) if facts else file.sha256)
        original = OriginalEntry(filename=file.filename, sha256=file.sha256) if facts else None
        entries.append(
            wheel_entry(
                folder / name, context.memory, origin="repaired" if facts else "index",
                original=original, changes=tuple(facts["changes"]) if facts else (),
            )
        )  # fmt: skip
    return entries


def wheelhouse_lock(context: Context, entries: list[WheelEntry]) -> str:
    """pylock.toml of the folder itself: bare names, repaired hashes, and our vllm."""
    files = [
        LockedFile(
            distribution=e.distribution, version=e.version, filename=e.filename,
            sha256=e.sha256, size=e.size,
        )
        for e in entries
    ]  # fmt: skip
    family = lock_path(context.layout.pins, context.stack_name, "family", context.runtime)
    lock = make_lock(
        files, python=context.runtime.python, inputs=context.memory.sha256(family), folder=""
    )
    return render_lock(lock, made=f"`nox -s build` from {family.name}")


def _made_by_us(manifest: Path) -> bool:
    """Is it a manifest of ours, of whatever schema version?"""
    try:
        keys = set(json.loads(manifest.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return False
    return {"schema_version", "stack", "profile", "wheels"} <= keys


def guard_foreign(folder: Path) -> None:
    """Refuse to replace a folder with anything in it that no build put there.

    Ours are: README.md, and what the SHA256SUMS of a folder with a manifest of ours lists.
    Raises CheckFailed naming the rest, which replacing the folder would lose.
    """
    if not folder.is_dir():
        return
    ours = {"README.md"}
    if _made_by_us(folder / MANIFEST):
        ours |= {MANIFEST, SUMS, *listed(folder)}
    if foreign := sorted(p.name for p in folder.iterdir() if p.name not in ours):
        raise CheckFailed(
            f"{folder} holds what no build made: {', '.join(foreign[:5])}"
            + (f" and {len(foreign) - 5} more." if len(foreign) > 5 else "."),
            cause="a build replaces the whole folder, and these would be lost",
            remedy="Move them away, or build into another folder with --wheelhouse.",
        )
