"""The same wheelhouse for the CPython that a root has, where that is not the wheelhouse's.

An arm64 CPython 3.12 is in no Debian release that the stacks have a lock for. What is for one
CPython alone is then taken from the stack's lock for the other; ours, which is for the stable ABI,
and all that is pure Python are the wheelhouse's own files. It is made by the stages that made the
wheelhouse (repair, wheelhouse), from what the build remembers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sm121.compile.stage import CompileStage
from sm121.context import Context
from sm121.errors import EnvironmentFault
from sm121.files import link_or_copy, sha256_text
from sm121.lock.pylock import Target
from sm121.pipeline import all_stages
from sm121.repair.stage import RepairStage
from sm121.state import State
from sm121.wheelhouse.check import wrong_tags
from sm121.wheelhouse.manifest import FILE, Manifest, load_manifest, render
from sm121.wheelhouse.stage import WheelhouseStage, made_wheel
from sm121.wheelhouse.sums import verify_sums, write_sums


def counterpart(
    context: Context, house: Path, manifest: Manifest, *, python: str, glibc: str, folder: Path
) -> tuple[Path, Manifest, str]:
    """The other wheelhouse, its manifest, and how much of it is the first one's, as a sentence.

    Raises EnvironmentFault if this checkout did not build the first one, or locks no such Python.
    """
    own = {w.filename: w.sha256 for w in manifest.wheels}
    pin = context.stack.targets[context.options.target]
    if python not in pin.pythons:
        raise EnvironmentFault(f"Stack {context.stack_name} has no lock for CPython {python}.")
    options = dataclasses.replace(context.options, with_deps=True, python=python)
    state = State.load(context.layout.state)
    whole = dataclasses.replace(context, options=dataclasses.replace(options, python=None))
    results = {
        stage.name: {**record.result, "fingerprint": record.fingerprint}
        for stage in all_stages(whole)
        if (record := state.records.get(stage.key(whole)))
    }
    made = made_wheel(results) if {"compile", "overlay"} & results.keys() else {}
    wheel = str(made.get("wheel", ""))
    if not {"source", "patch"} <= results.keys() or own.get(wheel) != made.get("sha256"):
        raise EnvironmentFault(
            f"The wheelhouse is for CPython {manifest.python}, here is {python}, and this checkout "
            "did not build it, so it can't make the same for the other.",
            remedy="Run it where it was built, or use Dockerfile.verify.",
        )
    other = folder / f"cp{python.replace('.', '')}-{sha256_text(*sorted(own.values()))[:12]}"
    there = dataclasses.replace(
        context, options=options,
        layout=dataclasses.replace(context.layout, build=other, wheelhouse=other / "wheelhouse"),
    )  # fmt: skip
    target = there.layout.wheelhouse
    if not (target / "manifest.json").is_file() or verify_sums(there, target):
        dist = CompileStage().dist(there)
        dist.mkdir(parents=True, exist_ok=True)
        link_or_copy(house / wheel, dist / wheel)
        results["repair"] = {**RepairStage().run(there, results), "fingerprint": ""}
        WheelhouseStage().run(there, results)
    found = load_manifest(target)
    assert found is not None
    if found.glibc != glibc:  # also if an earlier run ended before, or refused it
        found = _for_glibc(there, target, found, glibc)
    same = sum(own.get(w.filename) == w.sha256 for w in found.wheels)
    text = (
        f"{same} of {len(found.wheels)} wheels are the wheelhouse's own, the others the lock's for "
        f"CPython {python}"
    )
    return target, found, text


def _for_glibc(context: Context, folder: Path, manifest: Manifest, glibc: str) -> Manifest:
    """Let install.py accept the root's C library, if the wheels do: a stack's manifest names what
    its nodes have, which is newer than what the wheels ask for. Raises EnvironmentFault if not."""
    target = Target.make(manifest.target, python=manifest.python, glibc=glibc)
    if wrong := wrong_tags([w.filename for w in manifest.wheels], target):
        raise EnvironmentFault(
            f"{len(wrong)} wheel(s) ask for a newer C library than the root's.", details=wrong
        )
    changed = manifest.model_copy(update={"glibc": glibc})
    (folder / FILE).write_text(render(changed), encoding="utf-8")
    write_sums(context, folder)
    return changed
