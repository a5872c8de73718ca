"""`sync`: the wheelhouse to the nodes, installed, compared and switched."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from sm121 import proc
from sm121.commands.common import STDOUT, add_json_option, give_json, layout_of
from sm121.errors import NodeFault, UsageFault
from sm121.files import HashMemory
from sm121.layout import Layout
from sm121.serve.nodes import Nodes, load_nodes
from sm121.sync.compare import compare
from sm121.sync.deploy import Wishes, deploy, rollback
from sm121.sync.hosts import HERE, Way, nodes_of
from sm121.sync.release import Release, gather, lacking, sign
from sm121.sync.report import Comparison, to_json
from sm121.sync.roles import roles_of, write_serving
from sm121.ui import Ui
from sm121.wheelhouse.manifest import load_manifest

ROOT = "/opt/sm121"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "hosts", nargs="+", metavar="HOST",
        help=f"HOST or USER@HOST, as ssh takes it; `{HERE}` is this machine",
    )  # fmt: skip
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--compare", action="store_true", help="only compare: change nothing; exit 1 if they differ")  # fmt: skip
    doing.add_argument("--rollback", action="store_true", help="make the previous release current again")  # fmt: skip
    parser.add_argument("--wheelhouse", type=Path, metavar="DIR", help="what to send (default: wheelhouse/)")  # fmt: skip
    parser.add_argument(
        "--nodes", type=Path, metavar="FILE",
        help="who is head and who worker: their units and serve.env go with the release (docs/serve.md)",
    )  # fmt: skip
    parser.add_argument("--root", metavar="DIR", help=f"folder on the nodes (default: that of --nodes, else {ROOT})")  # fmt: skip
    parser.add_argument("--interface", metavar="NAME", help="go out by this interface (the direct link)")  # fmt: skip
    parser.add_argument("--address", metavar="IP", help="or from this address of this machine")
    parser.add_argument("--identity", type=Path, metavar="FILE", help="ssh key (default: as ssh chooses)")  # fmt: skip
    parser.add_argument("--ssh-config", type=Path, metavar="FILE", help="instead of ~/.ssh/config")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="ssh connections at once (default: %(default)s)")  # fmt: skip
    parser.add_argument("--bwlimit", type=int, metavar="KIB", help="KiB/s of each stream at most")
    parser.add_argument("--keep", type=int, default=2, metavar="N", help="releases to keep on a node (default: %(default)s)")  # fmt: skip
    parser.add_argument("--python", metavar="PATH", help="interpreter on the nodes to make the environment from")  # fmt: skip
    parser.add_argument("--allow-partial", action="store_true", help="send a profile that is not a whole vLLM")  # fmt: skip
    parser.add_argument("--reinstall", action="store_true", help="make the environment anew even if it stands")  # fmt: skip
    parser.add_argument("--sign", type=Path, metavar="KEY", help="sign the release's list with this ssh key")  # fmt: skip
    add_json_option(parser, " (of --compare; write HOSTs first, or --json=FILE)")


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Send, install, switch; or compare, or roll back. Raises NodeFault if nodes differ."""
    for name, least, most in (("streams", 1, 32), ("keep", 1, 99), ("bwlimit", 1, 1 << 30)):
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            raise UsageFault(f"--{name} {value}: from {least} to {most}.")
    if arguments.json and not arguments.compare:
        raise UsageFault("--json is the report of --compare.", remedy="Add --compare.")
    if arguments.json not in (None, STDOUT) and not arguments.json.endswith(".json"):
        # As in `--json here spark2`, which would compare one node only.
        raise UsageFault(
            f"--json {arguments.json}: a FILE that ends in .json is wanted.",
            remedy="Name the hosts first: `-- here HOST --compare --json`; or --json=FILE.json.",
        )
    layout = layout_of(arguments)
    # A build that starts meanwhile ends what earlier builds left running; not our streams.
    proc.set_scope(layout.build / "sync")
    way = Way(
        interface=arguments.interface, address=arguments.address,
        identity=arguments.identity and arguments.identity.absolute(),
        config=arguments.ssh_config and arguments.ssh_config.absolute(),
    )  # fmt: skip
    file = load_nodes(arguments.nodes) if arguments.nodes else None
    if file and arguments.root not in (None, file.root):
        raise UsageFault(f"--root {arguments.root}: {arguments.nodes} says {file.root}.")
    nodes = nodes_of(arguments.hosts, way=way, root=arguments.root or (file.root if file else ROOT))
    roles = roles_of(nodes, file) if file else {}
    log = layout.log / "sync.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    if arguments.compare:
        comparison = compare(nodes, log=log)
        show(ui, comparison)
        give_json(arguments, ui, to_json(comparison))
        require(comparison)
        return 0
    if arguments.rollback:
        rollback(nodes, log=log, ui=ui)
        return 0
    scratch = layout.build / "sync"
    scratch.mkdir(parents=True, exist_ok=True)
    # Another sync from here, to other nodes, must not find its files exchanged.
    with tempfile.TemporaryDirectory(prefix=".release-", dir=scratch) as own:
        release = make_release(arguments, layout, file, Path(own))
        say_what(ui, release)
        options = [*(["--python", arguments.python] if arguments.python else []), *(["--allow-partial"] if arguments.allow_partial else [])]  # fmt: skip
        wishes = Wishes(
            streams=arguments.streams, keep=arguments.keep, again=arguments.reinstall,
            installer=tuple(options), limit_kib=arguments.bwlimit, roles=roles,
        )  # fmt: skip
        changed = deploy(nodes, release, wishes, scratch=scratch, log=log, ui=ui)
    if changed and len(nodes) > 1:
        comparison = compare(nodes, log=log)
        show(ui, comparison)
        require(comparison)
    return 0


def make_release(
    arguments: argparse.Namespace, layout: Layout, file: Nodes | None, folder: Path
) -> Release:
    """What is sent: the wheelhouse, with --nodes what head and worker serve by, signed with --sign.
    folder: an empty one, for what is made for it."""
    memory = HashMemory(layout.build / "hashes.json")
    serving = {}
    if file and (manifest := load_manifest(layout.wheelhouse)):
        serving = write_serving(layout.wheelhouse, file, stack=manifest.stack, folder=folder / "serve")  # fmt: skip
    try:
        release = gather(layout.wheelhouse, memory, allow_partial=arguments.allow_partial, serve=serving)  # fmt: skip
    finally:
        memory.save()
    return sign(release, arguments.sign, folder) if arguments.sign else release


def say_what(ui: Ui, release: Release) -> None:
    """The release in a line, and what it lacks."""
    manifest = release.manifest
    ui.say(f"Release {release.id}: stack {manifest.stack}, profile {manifest.profile}, {manifest.target}, {len(release.files)} files")  # fmt: skip
    for line in lacking(manifest):
        ui.note(line)


def show(ui: Ui, comparison: Comparison) -> None:
    """Every node in a line, then every difference with what it means."""
    for node in comparison.nodes:
        what = f"release {node.release}, {node.files} files" if node.release else "no release"
        ui.say(f"  {node.name}: {what}, NCCL {node.nccl or 'none'}, driver {node.facts['driver'] or 'none'}")  # fmt: skip
    for one in comparison.differences:
        ui.say(f"  {ui.style(one.level, 'red' if one.level == 'fault' else 'yellow')} {one.what}:")
        for name, value in one.values.items():
            ui.say(f"      {name}: {value}")
        ui.say(f"      why it matters: {one.why}")


def require(comparison: Comparison) -> None:
    """Raises NodeFault naming what differs, with the files."""
    faults = [one for one in comparison.differences if one.level == "fault"]
    if not faults:
        return
    raise NodeFault(
        f"{len(faults)} thing(s) make these nodes differ.",
        details=[f"{one.what}: {name}: {value}" for one in faults for name, value in one.values.items()],
        remedy="Sync the same wheelhouse to all of them; --reinstall where files were changed.",
    )  # fmt: skip
