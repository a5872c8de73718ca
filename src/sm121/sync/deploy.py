"""All of a sync in order: every node gets the release, and only then all are switched."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm121.errors import DiskFull, HashMismatch, NetworkFault, NodeFault, Sm121Error, ToolFailed
from sm121.sync.agent import Agent, agent_on
from sm121.sync.hosts import Node
from sm121.sync.release import Release
from sm121.sync.transfer import send
from sm121.ui import Ui, human_bytes, human_seconds

_FILES_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """keep: releases to keep on a node. again: make the environment anew even if it stands.
    installer: options for install.py there. limit_kib: KiB/s of each stream at most. roles: node's
    name → folder of the release that its `serve` is to name (sm121.sync.release.gather)."""

    streams: int = 4
    keep: int = 2
    again: bool = False
    installer: tuple[str, ...] = ()
    limit_kib: int | None = None
    roles: Mapping[str, str] = field(default_factory=dict)


def deploy(
    nodes: Sequence[Node], release: Release, wishes: Wishes, *, scratch: Path, log: Path, ui: Ui
) -> bool:
    """Send, install and switch. False if every node had it already. Raises an Sm121Error; then no
    node was switched unless the failure was in switching itself."""
    with ExitStack() as stack:
        agents = [stack.enter_context(agent_on(node, make=True, log=log)) for node in nodes]
        for agent in agents:
            agent.ask("hold", who=_who())
        changed = [
            agent for agent in agents
            if _bring(agent, release, wishes, scratch=scratch / agent.node.name, log=log, ui=ui)
        ]  # fmt: skip
        for agent in changed:
            agent.ask("switch", release=release.id)
            ui.stage("sync", "done", f"{agent.node.name}: current is {release.id}")
        for agent in changed:
            _prune(agent, wishes.keep, ui)
        return bool(changed)


def _prune(agent: Agent, keep: int, ui: Ui) -> None:
    """Only when all are switched: what can't be removed (root's files in an environment) must not
    leave the nodes with different releases."""
    try:
        removed = agent.ask("prune", keep=keep)["removed"]
    except Sm121Error as error:
        ui.note(f"not all that is older could be removed. {error.what} {error.cause}".strip())
        return
    if removed:
        ui.say(f"       {agent.node.name}: removed {', '.join(removed)}")


def rollback(nodes: Sequence[Node], *, log: Path, ui: Ui) -> None:
    """Make the previous release of every node current again: of all, or of none if one has none."""
    with ExitStack() as stack:
        agents = [stack.enter_context(agent_on(node, make=False, log=log)) for node in nodes]
        for agent in agents:
            agent.ask("hold", who=_who())
        for agent in agents:
            agent.ask("previous")
        for agent in agents:
            answer = agent.ask("rollback")
            ui.stage("sync", "done", f"{agent.node.name}: current is {answer['to']} again, was {answer['from']}")  # fmt: skip


def _who() -> str:
    return f"{getpass.getuser()}@{platform.node()}, process {os.getpid()}"


def _bring(
    agent: Agent, release: Release, wishes: Wishes, *, scratch: Path, log: Path, ui: Ui
) -> bool:
    """Everything but the switch; False if there is nothing to do."""
    name = agent.node.name
    role = wishes.roles.get(name, "")
    plan = agent.ask("plan", text=release.listing, role=role, signature=release.signature)
    if plan["standing"] and not wishes.again:
        ui.stage("sync", "skip", f"{name}: {release.id} is current, its wheels are whole")
        return False
    for file in plan["altered"]:
        ui.note(f"{name}: {file} was altered there; it is sent anew")
    _require_room(agent, release, plan)
    objects = release.objects
    missing = {digest: objects[digest] for digest in plan["missing"]}
    total = sum(path.stat().st_size for path in missing.values())
    arrived = sum(plan["arrived"].values())
    kept = len(set(release.digests.values())) - len(missing)
    ui.stage(
        "sync", "run", f"{name}: {len(missing)} file(s), {human_bytes(total)} to send; {kept} are there"
        + (f", and {human_bytes(arrived)} of a broken transfer" if arrived else ""),
    )  # fmt: skip
    if missing:
        seconds = _send(agent, release, missing, wishes, scratch=scratch, log=log, ui=ui)
        ui.stage("sync", "run", f"{name}: sent in {human_seconds(seconds)}, {human_bytes((total - arrived) / max(seconds, 1e-3))}/s; every digest is right")  # fmt: skip
    with ui.progress("install") as bar:
        answer = agent.ask(
            "install", bar.update, text=release.listing, signature=release.signature, role=role,
            options=list(wishes.installer), again=wishes.again,
        )  # fmt: skip
    if answer["deviations"]:
        raise NodeFault(
            f"{name}: what was installed is not what the wheels hold; nothing was switched.",
            details=[line for one in answer["deviations"] for line in describe(one)],
            remedy="Look at the disk there; then sync with --reinstall.",
        )
    ui.stage("sync", "run", f"{name}: " + ("installed, every file is as in its wheel" if answer["made"] else "its environment stands")
             + (f"; signed by {answer['signer']}" if answer["signer"] else ""))  # fmt: skip
    return True


def _require_room(agent: Agent, release: Release, plan: dict[str, Any]) -> None:
    sizes = {digest: path.stat().st_size for digest, path in release.objects.items()}
    needed = sum(sizes[digest] - plan["arrived"].get(digest, 0) for digest in plan["missing"])
    needed += 0 if plan["has_environment"] else release.installed_bytes
    if needed > plan["free"]:
        raise DiskFull(
            f"{agent.node.name}: not enough space on this node: {human_bytes(plan['free'])} are free below "
            f"{agent.node.root}, and about {human_bytes(needed)} are needed.",
            cause="for what is still to be sent, and the environment that is made of it; `current` is as it was",
            remedy="Free some space there, or sync with --keep 1; `--root` names another disk.",
        )


def _send(
    agent: Agent, release: Release, missing: dict[str, Path], wishes: Wishes, *, scratch: Path,
    log: Path, ui: Ui,
) -> float:  # fmt: skip
    """Send until every digest is right on the node; a file that is not gets one more try."""
    seconds, rest = 0.0, missing
    for _ in range(2):
        try:
            seconds += send(
                agent.node, rest, streams=wishes.streams, limit_kib=wishes.limit_kib,
                scratch=scratch, log=log, ui=ui,
            )  # fmt: skip
        except (NetworkFault, ToolFailed):
            # A receiver whose disk is full often ends before its message gets through.
            with contextlib.suppress(NetworkFault):
                room = agent.ask("room", missing=list(rest))
                _require_room(agent, release, {**room, "has_environment": False})
            raise
        sizes = {digest: path.stat().st_size for digest, path in rest.items()}
        bad = agent.ask("admit", sizes=sizes)["bad"]
        if not bad:
            return seconds
        rest = {digest: missing[digest] for digest in bad}
        ui.note(f"{agent.node.name}: {len(bad)} file(s) are not what was sent; once more")
    raise HashMismatch(
        f"{agent.node.name}: {len(rest)} file(s) arrived altered, twice; nothing was switched.",
        details=[path.name for path in rest.values()][:_FILES_SHOWN],
        remedy="Check disk and memory of that node.",
    )


def describe(deviation: dict[str, Any]) -> list[str]:
    """A deviation as lines for a person, each file with its name."""
    files = list(deviation["files"].items())
    lines = [f"{deviation['distribution'] or 'environment'}: {deviation['found']}"]
    lines += [f"  {path}: {how}" for path, how in files[:_FILES_SHOWN]]
    if len(files) > _FILES_SHOWN:
        lines.append(f"  … and {len(files) - _FILES_SHOWN} more")
    return lines
