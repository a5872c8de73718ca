"""`clean`: what takes how much disk, and freeing what the current state does not need."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sm121.commands.common import layout_of
from sm121.errors import UsageFault
from sm121.files import remove_tree, tree_size
from sm121.layout import Layout
from sm121.pins.load import stack_names
from sm121.state import exclusive
from sm121.ui import Ui, human_bytes

# What each folder of build/ costs to make again.
_COSTS = {
    "cache": "downloads: the network",
    "source": "seconds to minutes",
    "env": "under a minute from the cache",
    "toolkit": "under a minute from the cache",
    "work": "the ninja trees: all compiling again",
    "dist": "seconds, while work/ is there",
    "reports": "seconds: verify-abi's reports, the last build's cost",
    "rebase": "an unfinished rebase: what was resolved by hand",
    "series": "seconds, once it is exported: a series open for editing",
    "verify": "nothing: left over by a killed verify-abi",
    "sync": "nothing: left over by a broken sync",
    "target": "verify-target's environment: a minute, a whole one under emulation half an hour",
    "log": "nothing, but logs and the measured cost of objects are lost",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="*", metavar="WHAT",
        help=f"folders of build/ to remove ({', '.join(_COSTS)}); `unused`: what no stack and no "
        "manifest needs; `all`: everything except the wheelhouse. Without: only list",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed")


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """List sizes; remove what was named. The wheelhouse is never removed.

    Raises UsageFault for a name that is none of build/'s folders.
    """
    layout = layout_of(arguments)
    if unknown := sorted(set(arguments.what) - {*_COSTS, "unused", "all"}):
        raise UsageFault(
            f"There is nothing named {', '.join(unknown)} to remove.",
            remedy=f"Name some of: {', '.join(_COSTS)}, unused, all.",
        )
    ui.table(
        ("folder", "size", "costs to make again"),
        [
            *(
                (name, human_bytes(sum(map(tree_size, paths))), _COSTS[name])
                for name in _COSTS
                if (paths := _paths(layout, name))
            ),
            ("wheelhouse", human_bytes(tree_size(layout.wheelhouse)), "never removed here"),
        ],
    )
    doomed = _doomed(layout, arguments.what, ui)
    _spare_work(layout, doomed)
    if not doomed:
        hint = "" if arguments.what else " Name folders, `unused` or `all` to free space."
        ui.say(f"Nothing was removed.{hint}")
        return 0
    with exclusive(layout.build, "nox -s clean"):
        for path in doomed:
            size = human_bytes(tree_size(path))
            if not arguments.dry_run:
                remove_tree(path)
            ui.say(f"  {'would remove' if arguments.dry_run else 'removed'} {path} ({size})")
    return 0


def _spare_work(layout: Layout, doomed: Sequence[Path]) -> None:
    """Raise UsageFault if what a person made by hand, and is nowhere else, would go."""
    from sm121.gitworktree import Worktree
    from sm121.rebase.session import Place

    faults = []
    at_risk = {"source", "rebase", "series"} & {path.name for path in doomed}
    if at_risk - {"series"} and Place.of(layout).file.is_file():
        faults.append(("an unfinished rebase", "nox -s rebase -- --continue (or --abort)"))
    for marker in (layout.build / "series").glob("*.exported"):
        tree = marker.with_name(marker.name.removesuffix(".exported"))
        if at_risk & {"source", "series"} and tree.is_dir():
            worktree = Worktree(tree)
            if worktree.head() != marker.read_text() or worktree.unstaged() or worktree.staged():
                faults.append((f"{tree}, edited and not exported", "nox -s export"))
    if faults:
        raise UsageFault(
            f"That would destroy {' and '.join(what for what, _ in faults)}.",
            remedy=f"First: {'; '.join(f'`{how}`' for _, how in faults)}.",
        )


def _paths(layout: Layout, name: str) -> list[Path]:
    """What a name of _COSTS stands for, if it is there.

    Of the cache only what sm121 puts there: SM121_CACHE may name a folder that others use.
    """
    if name == "cache":
        paths = [layout.cache / name for name in ("files", "ccache", "abi")]
    else:
        paths = [layout.build / name]
    return [path for path in paths if path.exists()]


def _doomed(layout: Layout, wanted: Sequence[str], ui: Ui) -> list[Path]:
    names = [name for name in _COSTS if name in wanted or "all" in wanted]
    shared = not layout.cache.is_relative_to(layout.build)
    if shared and "cache" not in wanted and {"all", "unused"} & set(wanted):
        ui.note(f"{layout.cache} may serve other checkouts: it is removed only as `clean -- cache`")
        names = [name for name in names if name != "cache"]
    doomed = [path for name in names for path in _paths(layout, name)]
    if "all" in wanted:
        doomed += [p for p in (layout.state, layout.build / "hashes.json") if p.exists()]
    elif "unused" in wanted:
        doomed += [path for path in unused(layout, with_cache=not shared) if path not in doomed]
    return doomed


def unused(layout: Layout, *, with_cache: bool) -> list[Path]:
    """What no stack and no manifest needs: half-made folders, files of the cache that no pin
    names, and environments, toolkits and trees of stacks that are gone."""
    stacks = stack_names(layout.pins)
    naming = [*layout.pins.glob("*/*.toml"), layout.wheelhouse / "manifest.json"]
    text = "".join(path.read_text(encoding="utf-8") for path in naming if path.is_file())
    files = (layout.cache / "files").glob("*") if with_cache else ()
    doomed = [folder for folder in files if folder.name not in text]
    for name in ("env", "toolkit", "work", "dist"):
        for folder in (layout.build / name).glob("*"):
            partial = folder.name.endswith((".partial", ".old"))
            belongs = any(folder.name == s or folder.name.startswith(f"{s}-") for s in stacks)
            if partial or (not belongs and folder.name != "uv-cache"):
                doomed.append(folder)
    return doomed
