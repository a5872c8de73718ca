"""Do the nodes run the same bytes, on machines that fit each other?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sm121.doctor.links import MTU, active, describe
from sm121.sync.agent import agent_on
from sm121.sync.hosts import Node
from sm121.sync.report import Comparison, Deviation, Difference, Level, NodeState

# Facts that must be equal, and what it means if they are not.
_EQUAL: tuple[tuple[str, str, Level, str], ...] = (
    ("driver", "driver", "fault", "libcuda is the driver's: one that differs behaves differently on one node only"),
    ("cuda_driver", "CUDA of the driver", "fault", "the driver decides which CUDA code it loads"),
    ("glibc", "glibc", "warning", "the same wheels, loaded by another C library"),
    ("machine", "machine", "fault", "the wheels are for one kind of machine"),
    ("kernel", "kernel", "warning", "RDMA and memory management are the kernel's"),
)  # fmt: skip


def compare(nodes: Sequence[Node], *, log: Path) -> Comparison:
    """Ask every node at once, without changing anything. Raises an Sm121Error if one does not
    answer."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        states = list(pool.map(lambda node: _state(node, log), nodes))
    raw = [state for _, state in states]
    differences = tuple(find_differences([state for state, _ in states], raw))
    failed = any(one.level == "fault" for one in differences)
    return Comparison(
        schema_version=1, result="fail" if failed else "pass",
        nodes=tuple(state for state, _ in states), differences=differences,
    )  # fmt: skip


def _state(node: Node, log: Path) -> tuple[NodeState, Mapping[str, str]]:
    own = log.with_name(f"{log.stem}-{node.name.replace('@', '-').replace(':', '-')}.log")
    with agent_on(node, make=False, log=own) as agent:
        answer: dict[str, Any] = agent.ask("compare")
    state = NodeState(
        name=node.name, release=answer["release"], files=answer["count"], digest=answer["digest"],
        nccl=answer["nccl"], python=answer["python"], altered=tuple(answer["altered"]),
        deviations=tuple(Deviation(**one) for one in answer["deviations"]), facts=answer["facts"],
    )  # fmt: skip
    return state, answer["files"]


def find_differences(
    states: Sequence[NodeState], files: Sequence[Mapping[str, str]]
) -> Iterator[Difference]:
    """Faults first. files: by node, name → sha256 of its release."""
    yield from _bytes(states, files)
    for key, what, level, why in _EQUAL:
        yield from _unequal(what, level, why, states, lambda s, key=key: str(s.facts[key]))  # type: ignore[misc]
    yield from _unequal(
        "NCCL", "fault", "two builds of one version deadlocked against each other", states,
        lambda s: s.nccl,
    )  # fmt: skip
    yield from _unequal("Python", "warning", "another patch release of the interpreter", states, lambda s: s.python)  # fmt: skip
    yield from _unequal(
        "nvcc on PATH", "warning", "kernels that are compiled at the first start fail, or differ, on "
        "one node only (cases: a PATH that ~/.bashrc sets is not there for a service)", states,
        lambda s: str(s.facts["nvcc"]),
    )  # fmt: skip
    yield from _each(
        "ulimit -l", "RDMA pins more memory than that; LimitMEMLOCK=infinity in the service, "
        "`* - memlock unlimited` in /etc/security/limits.d/", states,
        lambda s: "" if s.facts["memlock"] == "unlimited" else f"{s.facts['memlock']} bytes",
    )  # fmt: skip
    yield from _links(states)
    yield from _each(
        "vllm in the way", "Python takes it before the installed package; start elsewhere, or rename it",
        states, lambda s: ", ".join(f"{s.facts['cwd']}/{name}" for name in s.facts["shadow"]),
    )  # fmt: skip


def _bytes(states: Sequence[NodeState], files: Sequence[Mapping[str, str]]) -> Iterator[Difference]:
    yield from _each("current", "nothing was synced to it, or its environment is not finished",
                     states, lambda s: "" if s.release else "no release", level="fault")  # fmt: skip
    with_release = [state for state in states if state.release]
    if len({state.release for state in with_release}) > 1:
        names = {state.name: have for state, have in zip(states, files, strict=True) if have}
        first = next(iter(names.values()))
        differ = sorted(
            {n for have in names.values() for n in {*have, *first} if have.get(n) != first.get(n)}
        )
        shown = ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
        yield Difference(
            what="release", level="fault", values={s.name: s.release for s in with_release},
            why=f"they were made from different wheelhouses; these files differ: {shown}",
        )  # fmt: skip
    yield from _each("files of the release", "altered after they were sent; sync again", states,
                     lambda s: ", ".join(s.altered), level="fault")  # fmt: skip
    yield from _each(
        "installed files", "not as the release's wheels have them; `sync --reinstall` makes them anew",
        states, lambda s: "; ".join(_told(one) for one in s.deviations), level="fault",
    )  # fmt: skip
    whole = [s for s in with_release if not s.deviations]
    if len({s.release for s in whole}) == 1:
        yield from _unequal("digest of the installed files", "fault", "scripts or paths differ", whole, lambda s: s.digest[:16])  # fmt: skip


def _told(deviation: Deviation) -> str:
    names = list(deviation.files)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    listed = f" ({', '.join(names[:3])}{more})" if names else ""
    return f"{deviation.distribution or 'environment'}: {deviation.found}{listed}"


def _links(states: Sequence[NodeState]) -> Iterator[Difference]:
    """The link that ssh came through, and those with an RDMA port."""
    used = {
        state.name: [one for one in state.facts["links"] if one["name"] == state.facts["direct"] or one["rdma"]]
        for state in states
    }  # fmt: skip
    yield from _each(
        "link MTU", f"below {MTU}, on the link between the nodes: `ip link set NAME mtu {MTU}` on both",
        states, lambda s: ", ".join(f"{one['name']} {one['mtu']}" for one in used[s.name] if (one["mtu"] or 0) < MTU),
    )  # fmt: skip
    speeds = {name: {one["speed"] for one in links if one["speed"]} for name, links in used.items()}
    known = [speed for speed in speeds.values() if speed]
    if len({frozenset(speed) for speed in known}) > 1:
        yield Difference(
            what="link speed", level="warning", why="a cable or port that came up slower",
            values={n: ", ".join(f"{v / 1000:g} Gb/s" for v in sorted(s)) for n, s in speeds.items()},
        )  # fmt: skip
    yield from _each(
        "RoCE", "no RDMA port is active with RoCE: NCCL goes over TCP", states,
        lambda s: "" if any(active(one) for one in s.facts["links"])
        else "; ".join(describe(one) for one in s.facts["links"] if one["rdma"]) or "no RDMA port",
    )  # fmt: skip


def _unequal(
    what: str, level: Level, why: str, states: Sequence[NodeState], get: Callable[[NodeState], str]
) -> Iterator[Difference]:
    values = {state.name: get(state) or "none" for state in states}
    if len(set(values.values())) > 1:
        yield Difference(what=what, level=level, values=values, why=why)


def _each(
    what: str, why: str, states: Sequence[NodeState], get: Callable[[NodeState], str],
    *, level: Level = "warning",
) -> Iterator[Difference]:  # fmt: skip
    """Something that is wrong on a node by itself: get gives what, '' if nothing."""
    if values := {state.name: text for state in states if (text := get(state))}:
        yield Difference(what=what, level=level, values=values, why=why)
