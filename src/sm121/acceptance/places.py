"""The two nodes as places where commands run: this machine is the head, the worker is by ssh."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.acceptance.model import NotRun
from sm121.errors import CompilerMissing
from sm121.proc import Finished
from sm121.serve.nodes import Node, Nodes
from sm121.sync.hosts import Way

PAYLOAD = Path(__file__).with_name("payload")
_SSH_FAILED = 255  # ssh(1), EXIT STATUS


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One node. ssh: words before a command; none where it is this machine."""

    rank: int
    node: Node
    root: str
    ssh: tuple[str, ...]
    log: Path

    def run(self, script: str, *, stdin: str | None = None) -> Finished:
        """Run a shell script there. Raises NotRun if the node can't be reached."""
        argv = [*self.ssh, script] if self.ssh else ["sh", "-c", script]
        try:
            done = proc.run(argv, check=False, stdin=stdin)
        except CompilerMissing as error:
            raise NotRun(error.what) from error
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {proc.pasteable(argv)}\n{done.output}\n# exit {done.returncode}\n")
        if self.ssh and done.returncode == _SSH_FAILED:
            raise NotRun(f"{self.node.name} can't be reached by ssh: {last_line(done.output)}")
        return done

    def require_gpu(self) -> str:
        """The GPU's name, compute capability and driver. Raises NotRun: no GPU."""
        done = self.run(
            "nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader"
        )
        if done.returncode:
            raise NotRun(f"no GPU on {self.node.name}")
        name, capability, driver = (f.strip() for f in done.output.splitlines()[0].split(","))
        return f"{name} {capability}, driver {driver}"

    def require_release(self) -> str:
        """Id of the current release. Raises NotRun: nothing is installed."""
        done = self.run(f"readlink {shlex.quote(self.root)}/current")
        if done.returncode:
            raise NotRun(f"no release in {self.root} on {self.node.name}")
        return done.output.strip().rpartition("/")[2]

    def python(self, payload: str, *arguments: str, first: str = ":") -> Finished:
        """Run a script of payload/ with the release's Python, in an empty folder, with the
        variables of serve.env and those that `first` sets (shell; it may exit instead)."""
        current = f"{shlex.quote(self.root)}/current"
        words = " ".join(map(shlex.quote, arguments))
        script = (
            f"set -a; . {current}/serve/serve.env; {first}; set +a; d=$(mktemp -d); cd $d; "
            f"{current}/env/bin/python - {words}; s=$?; rmdir $d; exit $s"
        )
        return self.run(script, stdin=(PAYLOAD / payload).read_text(encoding="utf-8"))


def places_of(nodes: Nodes, *, way: Way, log: Path) -> tuple[Place, Place]:
    """Head and worker, which is reached as `sync` reaches it."""
    ssh = (*way.ssh(), nodes.worker.name)
    return (
        Place(rank=0, node=nodes.head, root=nodes.root, ssh=(), log=log),
        Place(rank=1, node=nodes.worker, root=nodes.root, ssh=ssh, log=log),
    )


def own(*words: str) -> list[str]:
    """A verb of ours, as a command."""
    return [sys.executable, "-m", "sm121", *words]


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
