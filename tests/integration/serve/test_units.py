"""The rendered units, as systemd itself reads them; and the verb that writes them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm121.__main__ import main
from sm121.pins.load import stack_names
from sm121.serve.load import load_serve
from sm121.serve.nodes import Nodes
from sm121.serve.render import command, render, unit_name
from support.nodes import two_nodes, write_nodes

ROOT = Path(__file__).resolve().parents[3]
_MANAGER = Path("/lib/systemd/systemd")


@dataclass
class Serving:
    nodes: Path
    out: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *argv: str, code: int = 0) -> str:
        assert main(["serve", "--nodes", str(self.nodes), "--out", str(self.out), *argv]) == code
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        return out + err


@pytest.fixture
def serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Serving]:
    monkeypatch.chdir(ROOT)
    before = signal.getsignal(signal.SIGTERM)
    yield Serving(write_nodes(tmp_path / "nodes.toml", two_nodes()), tmp_path / "out", capsys)
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("stack", stack_names(ROOT / "pins"))
def test_systemd_analyze_verify_passes(serving: Serving, stack: str) -> None:
    """No word on standard error: an unknown key is only a warning there, with status 0."""
    serving.run("--stack", stack)
    for unit in ("head/sm121-head.service", "worker/sm121-worker.service"):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", serving.out / unit], capture_output=True, text=True
        )  # fmt: skip
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_verify_would_notice(serving: Serving) -> None:
    serving.run()
    unit = serving.out / "head/sm121-head.service"
    unit.write_text(unit.read_text().replace("KillMode=control-group", "KillMod=control-group"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True
    )
    assert "KillMod" in done.stderr


def as_systemd_reads(folder: Path, unit: str, text: str) -> list[str]:
    """What a manager makes of a unit (systemd --test), line by line. It refuses to do so for root."""
    units = folder / ".config/systemd/user"
    units.mkdir(parents=True)
    # A user's manager can't change the user.
    (units / unit).write_text(text.replace("\nUser=sm121\n", "\n"))
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    argv = [_MANAGER, "--test", "--user", f"--unit={unit}"]
    if os.getuid() == 0:
        argv = ["setpriv", "--reuid", "nobody", "--clear-groups", *argv]
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, "nobody")
    environment = {
        "HOME": str(folder), "XDG_CONFIG_HOME": str(folder / ".config"),
        "XDG_RUNTIME_DIR": str(runtime), "PATH": "/usr/bin:/bin",
    }  # fmt: skip
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    _, _, rest = (done.stdout + done.stderr).partition(f"-> Unit {unit}:")
    own, _, _ = rest.partition("-> Unit ")
    return [line.strip() for line in own.splitlines()]


@pytest.mark.parametrize("rank", [0, 1])
def test_systemd_gives_vllm_the_very_words(tmp_path: Path, rank: int) -> None:
    """Also those with what systemd expands, in a JSON argument of the owner's."""
    folder = Path("/tmp") / f"sm121-units-{os.getpid()}-{rank}"  # nobody may not enter tmp_path
    data = two_nodes() | {
        "arguments": ["--override-generation-config", '{"a": "100%d $HOME \\\\ \'x\'"}']
    }
    nodes, serve = Nodes.model_validate(data), load_serve(ROOT / "pins", "0.26.0")
    text = render(serve, nodes, rank, stack="0.26.0").files[unit_name(rank)]
    folder.mkdir(mode=0o755)
    try:
        lines = as_systemd_reads(folder, unit_name(rank), text)
    finally:
        shutil.rmtree(folder)
    commands = [line.partition(": ")[2] for line in lines if line.startswith("Command Line: ")]
    script = ["/usr/bin/python3", "-I", "/opt/sm121/current/wheelhouse/serve_{}.py"]
    check, start = ([word.format(name) for word in script] for name in ("check", "start"))
    assert len(commands) == 2
    assert shlex.split(commands[0]) == check
    # Printed quoted as for a shell, which shlex does not undo for $; $$ is one at the start.
    words = [w.replace("\\$", "$").replace("$$", "$") for w in shlex.split(commands[1])]
    assert words == [*start, "--", *command(serve, nodes, rank)]
    assert {
        "KillMode: control-group", "Restart: always", "WorkingDirectory: /run/sm121-serve",
        "LimitMEMLOCK: 18446744073709551615", "OOMPolicy: stop", "UnsetEnvironment: PYTHONPATH",
        "EnvironmentFile: /opt/sm121/current/serve/serve.env",
    } <= set(lines)  # fmt: skip


# --- the verb -----------------------------------------------------------------------


def test_one_node_into_the_folder_itself(serving: Serving) -> None:
    said = serving.run("--node-rank", "1")
    assert sorted(p.name for p in serving.out.iterdir()) == ["serve.env", "sm121-worker.service"]
    assert "for spark-b (worker)" in said


def test_check_compares_and_changes_nothing(serving: Serving) -> None:
    said = serving.run("--check", code=1)
    assert "head/serve.env: missing" in said
    assert not serving.out.exists()
    serving.run()
    serving.run("--check")
    file = serving.out / "worker/serve.env"
    file.write_text(file.read_text() + "X=1\n")
    assert "worker/serve.env: differs" in serving.run("--check", code=1)
    assert file.read_text().endswith("X=1\n")


def test_wrong_usage(serving: Serving) -> None:
    assert "has no serve.toml" in serving.run("--stack", "9.9", code=2)
    assert "no manifest" in serving.run("--wheelhouse", str(serving.out), code=2)
    serving.nodes.write_text("schema = 1\nrot = 2\n")
    assert "rot: unknown key; did you mean 'root'?" in serving.run(code=2)
    serving.nodes.unlink()
    assert "cannot be read" in serving.run(code=2)
