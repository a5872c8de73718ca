"""serve.env and the unit of each node, out of serve.toml and the nodes' file.

A release on a node is <root>/current (sync): env/ is the environment, wheelhouse/ what it was
installed from, with the scripts in node/, and serve/ what is rendered here. Formats: systemd.exec(5)
(EnvironmentFile=), systemd.service(5) (COMMAND LINES).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sm121.errors import PinsFault
from sm121.serve.model import Serve
from sm121.serve.nodes import ROLES, Node, Nodes

ENV = "serve.env"
PYTHON = "/usr/bin/python3"
# The operator's own variables, a key for the API among them; never part of a release.
LOCAL_ENV = "/etc/sm121/serve.env"
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


def unit_name(rank: int) -> str:
    """sm121-head.service or sm121-worker.service."""
    return f"sm121-{ROLES[rank]}.service"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Files for one node, by name."""

    node: Node
    files: dict[str, str]


def render(serve: Serve, nodes: Nodes, rank: int, *, stack: str) -> Rendered:
    """Files for the node of a rank (0 is the head). stack: the stack's name, for a person.

    Raises PinsFault if the nodes' own arguments repeat what is rendered.
    """
    node, _ = nodes.of_rank(rank)
    files = {
        ENV: _environment_file(variables(serve, nodes, rank, stack=stack)),
        unit_name(rank): _unit(serve, nodes, rank, stack=stack),
    }
    return Rendered(node=node, files=files)


def variables(serve: Serve, nodes: Nodes, rank: int, *, stack: str) -> dict[str, str]:
    """Everything in serve.env. SM121_* is for the scripts in node/."""
    node, peer = nodes.of_rank(rank)
    values = {
        "root": nodes.root, "address": node.address, "interface": node.interface,
        "hca": ",".join(node.hca), "cuda-home": nodes.cuda_home,
    }  # fmt: skip
    found = {}
    for name, text in serve.environment.variables().items():
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        found[name] = text
    if not node.hca:
        del found["NCCL_IB_HCA"]
        found["NCCL_IB_DISABLE"] = "1"
    utilisation = nodes.gpu_memory_utilization or serve.arguments.gpu_memory_utilization.value
    return found | {
        "SM121_STACK": stack,
        "SM121_ROLE": ROLES[rank],
        "SM121_ROOT": nodes.root,
        "SM121_MODEL": nodes.model,
        "SM121_INTERFACE": node.interface,
        "SM121_ADDRESS": node.address,
        "SM121_PEER": peer.address,
        "SM121_HCA": ",".join(node.hca),
        "SM121_MASTER_PORT": str(serve.arguments.master_port.value),
        "SM121_MEMORY": str(utilisation),
        "SM121_STOP_SECONDS": str(serve.service.stop_seconds.value),
        "SM121_LOST_PEER_SECONDS": str(serve.service.lost_peer_seconds.value),
    }


def command(serve: Serve, nodes: Nodes, rank: int) -> list[str]:
    """The words of `vllm serve` on the node of a rank. Raises PinsFault as render does."""
    flags = {
        **serve.arguments.flags(),
        "--node-rank": str(rank),
        "--master-addr": nodes.head.address,
        "--served-model-name": nodes.api.name,
    }
    if nodes.gpu_memory_utilization is not None:
        flags["--gpu-memory-utilization"] = str(nodes.gpu_memory_utilization)
    if rank == 0:
        flags |= {"--host": nodes.api.host, "--port": str(nodes.api.port)}
    own = {*flags, "--host", "--port", "--headless", "--model"}
    for word in nodes.arguments:
        flag = word.partition("=")[0].replace("_", "-")
        if word.startswith("-") and flag in own:
            raise PinsFault(
                f"arguments: {flag} is set by sm121.",
                remedy="Take it out of the nodes' file; gpu-memory-utilization and api.* are keys "
                "of their own there, the others belong to the stack (serve.toml).",
            )
    words = [f"{nodes.root}/current/env/bin/vllm", "serve", nodes.model]
    words += [word for pair in flags.items() for word in pair]
    words += [] if rank == 0 else ["--headless"]
    return [*words, *nodes.arguments]


def _environment_file(found: dict[str, str]) -> str:
    lines = [
        "# Made by sm121 (`nox -s serve`); an edit is lost with the next release. Own variables:",
        f"# {LOCAL_ENV}. NCCL_IB_GID_INDEX is looked up at each start.",
        *(f"{name}={_quoted_value(value)}" for name, value in found.items()),
    ]
    return "\n".join(lines) + "\n"


def _quoted_value(value: str) -> str:
    """For an EnvironmentFile, which a shell can read, too."""
    if _PLAIN.fullmatch(value):
        return value
    return '"' + re.sub(r'(["\\$`])', r"\\\1", value) + '"'


def quoted_word(word: str) -> str:
    """One word of ExecStart=, such that systemd gives exactly it to the program."""
    word = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unit(serve: Serve, nodes: Nodes, rank: int, *, stack: str) -> str:
    node, _ = nodes.of_rank(rank)
    current = f"{nodes.root}/current"
    script = f"{PYTHON} -I {current}/wheelhouse/serve"
    words = command(serve, nodes, rank)
    # One flag with its value a line.
    starts = [i for i, word in enumerate(words) if i == 0 or word.startswith("--")]
    groups = [words[a:b] for a, b in zip(starts, [*starts[1:], len(words)], strict=True)]
    lines = " \\\n  ".join(" ".join(map(quoted_word, group)) for group in groups)
    stop = serve.service.stop_seconds.value
    return f"""\
# Made by sm121 (`nox -s serve`) for {node.name}; change it with `systemctl edit`.
[Unit]
Description=vLLM on two nodes, {ROLES[rank]} (sm121, stack {stack})
Wants=network-online.target
After=network-online.target
# Tried again for ever: whichever node boots first waits for the other.
StartLimitIntervalSec=0

[Service]
Type=exec
User={nodes.user}
EnvironmentFile={current}/serve/{ENV}
# Own variables, such as VLLM_API_KEY; root's, mode 0600.
EnvironmentFile=-{LOCAL_ENV}
UnsetEnvironment=PYTHONPATH PYTHONHOME
# Made anew and empty for each start, so that no folder there shadows vllm.
RuntimeDirectory=sm121-serve
WorkingDirectory=/run/sm121-serve
CacheDirectory=sm121
ExecStartPre={script}_check.py
ExecStart={script}_start.py -- \\
  {lines}
TimeoutStartSec=120
Restart=always
RestartSec={serve.service.restart_seconds.value}
# Every process of the service ends with it; none of vLLM's keeps memory for the next start.
KillMode=control-group
SendSIGKILL=yes
TimeoutStopSec={stop + 15}
OOMPolicy=stop
# RDMA pins its buffers; a core of this size would fill the disk.
LimitMEMLOCK=infinity
LimitNOFILE=65536
LimitCORE=0
TasksMax=infinity
NoNewPrivileges=yes

[Install]
WantedBy=multi-user.target
"""
