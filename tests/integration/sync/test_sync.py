"""`sync` between two hosts with a real sshd, rsync, install.py and uv: when all goes well."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sm121.errors import UsageFault
from sm121.files import HashMemory
from sm121.sync.release import gather
from support.hosts import Hosts
from support.wheels import make_wheel


def objects(hosts: Hosts, host: str = "worker") -> dict[str, tuple[int, int]]:
    """Digest → inode and size of what is in a host's store."""
    folder = hosts.disk(host) / "store"
    return {f.name: (f.stat().st_ino, f.stat().st_size) for f in folder.iterdir()}


def model(folder: Path, version: str) -> Path:
    return make_wheel(folder, {"model/__init__.py": f"version = {version!r}\n"}, name="model", version=version)  # fmt: skip


def says(hosts: Hosts) -> str:
    """What the current environment of the worker imports."""
    python = hosts.root / "current/env/bin/python"
    return hosts.on("worker", python, "-I", "-c", "import model; print(model.version)").strip()


def moved(before: Mapping[str, object], after: Mapping[str, object]) -> int:
    assert {k: v for k, v in after.items() if k in before} == {k: before[k] for k in before if k in after}  # fmt: skip
    return len(set(after) - set(before))


def test_releases_come_and_go(hosts: Hosts, make_house, tmp_path: Path) -> None:
    """The first sync, the second, one wheel changed, rollback, and what is kept."""
    houses = {
        v: make_house(f"house{v}", model(tmp_path / f"m{v}", v), without="model")
        for v in ("1.0", "2.0", "3.0")
    }
    hosts.seed(houses["1.0"])
    seeded = objects(hosts)
    said = hosts.sync("worker", "--wheelhouse", str(houses["1.0"]))
    first, stored = hosts.current(), objects(hosts)
    assert f"current is {first}" in said
    assert "1 are there" in said
    assert moved(seeded, stored) == len(list(houses["1.0"].iterdir())) - 1  # all but uv
    assert says(hosts) == "1.0"
    release = hosts.disk("worker") / "releases" / first
    assert {f.name for f in release.iterdir()} == {"RELEASE", "env", "wheelhouse"}
    assert {f.name for f in (release / "wheelhouse").iterdir()} == {f.name for f in houses["1.0"].iterdir()}  # fmt: skip
    for file in [release / "RELEASE", *(release / "wheelhouse").iterdir()]:
        assert file.is_dir() or file.stat().st_mode & 0o777 == 0o644

    said = hosts.sync("worker", "--wheelhouse", str(houses["1.0"]))
    assert "skip" in said
    assert "to send" not in said
    assert objects(hosts) == stored

    said = hosts.sync("worker", "--wheelhouse", str(houses["2.0"]))
    second = hosts.current()
    # The wheel, and the three files that list it.
    assert moved(stored, objects(hosts)) == 4
    assert "4 file(s)" in said
    assert says(hosts) == "2.0"
    assert (hosts.disk("worker") / "previous").readlink() == Path("releases") / first

    said = hosts.sync("worker", "--rollback")
    assert f"current is {first} again, was {second}" in said
    assert says(hosts) == "1.0"
    hosts.sync("worker", "--rollback")
    assert (hosts.current(), says(hosts)) == (second, "2.0")

    said = hosts.sync("worker", "--wheelhouse", str(houses["3.0"]))
    assert f"removed {first}" in said
    assert {f.name for f in (hosts.disk("worker") / "releases").iterdir()} == {second, hosts.current()}  # fmt: skip
    assert len(list((hosts.disk("worker") / "environments").iterdir())) == 2
    listed = {line[:64] for one in (second, hosts.current())
              for line in (hosts.disk("worker") / "releases" / one / "RELEASE").read_text().splitlines()}  # fmt: skip
    assert set(objects(hosts)) == listed
    assert says(hosts) == "3.0"


def test_both_nodes_at_one_path(hosts: Hosts, make_house) -> None:
    """`here` and a host over ssh: the same environment path, and the same bytes, scripts too."""
    house = make_house()
    hosts.seed(house, "head", "worker")
    said = hosts.sync("here", "worker", "--wheelhouse", str(house), "--interface", "direct0")
    assert hosts.current("head") == hosts.current("worker")
    assert said.index("worker: installed") < said.index("here: current is")  # switched together
    paths = [
        hosts.on(host, hosts.root / "current/env/bin/python", "-I", "-c", "import model; print(model.__file__)")
        for host in ("head", "worker")
    ]  # fmt: skip
    assert paths[0] == paths[1]
    scripts = [
        sorted((hosts.site(host).parents[2] / "bin").iterdir()) for host in ("head", "worker")
    ]
    for one, other in zip(*scripts, strict=True):
        assert one.name == other.name
        assert one.is_symlink() or one.read_bytes() == other.read_bytes()
    said = hosts.sync("here", "worker", "--compare", code=None)
    assert "digest of the installed files" not in said


def test_what_a_role_needs(hosts: Hosts, old: str, old_house: Path, tmp_path: Path) -> None:
    """Both roles' files are in the release; each node's `serve` names its own, and other settings
    make another release with the same environment, in seconds."""
    release = serving(hosts, old_house, tmp_path, "NCCL_DEBUG=WARN")
    disk = hosts.disk("worker")
    assert hosts.current() == release != old
    assert (disk / "current/serve/serve.env").read_text() == "NCCL_DEBUG=WARN worker"
    assert (disk / "current/head/serve.env").read_text() == "NCCL_DEBUG=WARN head"
    assert (disk / "current/env").resolve() == (disk / "releases" / old / "env").resolve()
    assert len(list((disk / "environments").iterdir())) == 1
    with pytest.raises(UsageFault, match="looks as if it held a credential"):
        serving(hosts, old_house, tmp_path, "VLLM_API_KEY=hunter2secret")


def serving(hosts: Hosts, house: Path, folder: Path, text: str) -> str:
    """Deploy to the worker with files of its role, through Python (the rendered ones are another
    part's); returns the release's id."""
    files = {}
    for role in ("head", "worker"):
        files[f"{role}/serve.env"] = folder / role
        files[f"{role}/serve.env"].write_text(f"{text} {role}")
    release = gather(house, HashMemory(folder / "hashes.json"), allow_partial=False, serve=files)
    script = folder / "deploy.py"
    script.write_text(_DEPLOY)
    names = [f"{name}={path}" for name, path in files.items()]
    hosts.on("head", sys.executable, script, hosts.folder, hosts.root, house, *names)
    return release.id


_DEPLOY = """
import sys
from pathlib import Path
from sm121.files import HashMemory
from sm121.sync.deploy import Wishes, deploy
from sm121.sync.hosts import Way, nodes_of
from sm121.sync.release import gather
from sm121.ui import Ui

folder, root, house = map(Path, sys.argv[1:4])
serve = {n: Path(p) for n, p in (word.split("=") for word in sys.argv[4:])}
release = gather(house, HashMemory(folder / "hashes.json"), allow_partial=False, serve=serve)
nodes = nodes_of(["worker"], way=Way(config=folder / "ssh_config"), root=str(root))
deploy(nodes, release, Wishes(roles={"worker": "worker"}), scratch=folder / "scratch", log=folder / "log", ui=Ui())
"""


def test_partial_incomplete_and_overlay(hosts: Hosts, make_house) -> None:
    house = make_house("partial", partial=True, profile="smoke")
    said = hosts.sync("worker", "--wheelhouse", str(house), code=2)
    assert "profile smoke, which is not a whole vLLM" in said
    assert "--allow-partial" in said
    assert not list(hosts.disk("worker").iterdir())
    hosts.seed(house)
    said = hosts.sync("worker", "--wheelhouse", str(house), "--allow-partial")
    assert "can't serve" in said
    assert hosts.current()
    said = hosts.sync("worker", "--wheelhouse", str(make_house("bare", complete=False)), code=2)
    assert "without its dependencies" in said
    overlay = make_house("overlay", profile="overlay")
    hosts.seed(overlay)
    said = hosts.sync("worker", "--wheelhouse", str(overlay))
    assert "an overlay: the release's own binaries" in said


def test_signed(hosts: Hosts, make_house) -> None:
    """A node with allowed_signers takes what a listed key signed, and nothing else."""
    house = make_house()
    hosts.seed(house)
    kind, key, *_ = (hosts.folder / "client.pub").read_text().split()
    signers = hosts.disk("worker") / "allowed_signers"
    signers.write_text(f'ada@example.com namespaces="sm121" {kind} {key}\n')
    arguments = ("worker", "--wheelhouse", str(house))
    assert "takes signed releases only" in hosts.sync(*arguments, code=1)
    other = hosts.folder / "host_key"
    assert "signature is not one that this node takes" in hosts.sync(*arguments, "--sign", str(other), code=1)  # fmt: skip
    assert hosts.current() == ""
    said = hosts.sync(*arguments, "--sign", str(hosts.folder / "client"))
    assert "signed by ada@example.com" in said
    release = hosts.disk("worker") / "releases" / hosts.current()
    check = f"ssh-keygen -Y verify -f {signers} -I ada@example.com -n sm121 -s {release}/RELEASE.sig < {release}/RELEASE"  # fmt: skip
    assert "Good" in hosts.on("head", "sh", "-c", check)
    signers.write_text(f'ada@example.com namespaces="other" {kind} {key}\n')
    hosts.sync(*arguments, "--reinstall", "--sign", str(hosts.folder / "client"), code=1)


def test_links_and_damage_in_the_wheelhouse_are_refused(hosts: Hosts, make_house, tmp_path: Path) -> None:  # fmt: skip
    house = make_house()
    wheel = next(house.glob("torch-*.whl"))
    wheel.rename(tmp_path / "elsewhere.whl")
    wheel.symlink_to(tmp_path / "elsewhere.whl")
    assert "is a link" in hosts.sync("worker", "--wheelhouse", str(house), code=2)
    wheel.unlink()
    said = hosts.sync("worker", "--wheelhouse", str(house), code=1)
    assert f"{wheel.name} is missing" in said
    wheel.write_bytes(b"PK")
    assert f"{wheel.name} was altered" in hosts.sync("worker", "--wheelhouse", str(house), code=1)
    assert not list(hosts.disk("worker").iterdir())


def test_another_ones_folder_is_refused(hosts: Hosts, make_house) -> None:
    house = make_house()
    hosts.disk("worker").chmod(0o777)
    try:
        said = hosts.sync("worker", "--wheelhouse", str(house), code=3)
    finally:
        hosts.disk("worker").chmod(0o755)
    assert "is not this user's alone" in said
    assert f"sudo install -d -o root -m 755 {hosts.root}" in said
    assert "nothing was synced to it" in hosts.sync("worker", "--compare", "--root", f"{hosts.root}-not", code=3)  # fmt: skip
