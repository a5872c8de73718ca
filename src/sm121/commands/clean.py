"""`clean`: what takes how much disk, and freeing what the current state does not need."""

from __future__ import annotations

import argparse
from pathlib import Path

from sm121.commands.common import layout_of
from sm121.files import remove_tree, tree_size
from sm121.layout import Layout
from sm121.pins.load import load_stack, stack_names
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
    "log": "nothing, but logs are lost",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="*", choices=[[], *sorted(_COSTS), "unused", "all"],
        help="folders of build/ to remove; `unused`: what no stack and no manifest needs; "
        "`all`: everything except the wheelhouse. Without: only list",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed")


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """List sizes; remove what was named. The wheelhouse is never removed."""
    layout = layout_of(arguments)
    folders = {name: layout.build / name for name in _COSTS}
    folders["cache"] = layout.cache
    ui.table(
        ("folder", "size", "costs to make again"),
        [
            *(
                (name, human_bytes(tree_size(path)), _COSTS[name])
                for name, path in folders.items()
                if path.exists()
            ),
            ("wheelhouse", human_bytes(tree_size(layout.wheelhouse)), "never removed here"),
        ],
    )
    wanted = list(arguments.what)
    doomed: list[Path] = []
    if "all" in wanted:
        doomed = [p for p in folders.values() if p.exists()]
        doomed += [layout.state, layout.build / "hashes.json"]
    else:
        doomed = [folders[name] for name in wanted if name in folders]
        if "unused" in wanted:
            doomed += unused(layout)
    doomed = [path for path in doomed if path.exists()]
    if not doomed:
        ui.say(
            "Nothing was removed."
            + ("" if wanted else " Name folders, `unused` or `all` to free space.")
        )
        return 0
    with exclusive(layout.build, "clean"):
        for path in doomed:
            size = human_bytes(tree_size(path))
            if not arguments.dry_run:
                remove_tree(path)
            ui.say(f"  {'would remove' if arguments.dry_run else 'removed'} {path} ({size})")
    return 0


def unused(layout: Layout) -> list[Path]:
    """What no stack needs: half-made folders, files of the cache that no pin names, and
    environments, toolkits and trees of stacks that are gone."""
    stacks = stack_names(layout.pins)
    needed = {load_stack(layout.pins, name).vllm.sdist_sha256 for name in stacks}
    text = "".join(p.read_text() for p in layout.pins.glob("*/pylock.*.toml"))
    doomed = [
        folder
        for folder in (layout.cache / "files").glob("*")
        if folder.name not in needed and folder.name not in text
    ]
    for name in ("env", "toolkit", "work", "dist"):
        for folder in (layout.build / name).glob("*"):
            partial = folder.name.endswith((".partial", ".old"))
            belongs = any(folder.name == s or folder.name.startswith(f"{s}-") for s in stacks)
            if partial or (not belongs and folder.name != "uv-cache"):
                doomed.append(folder)
    return doomed
