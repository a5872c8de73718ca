"""Dockerfile.verify built without an engine, by buildah with chroot isolation: `--image`.

The base is our own root of Debian (no registry is asked), emulated; docs/verify.md says what of it
is not as with Docker. Needs root, qemu-user-static, mmdebstrap and buildah. About a minute.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm121.target import container
from sm121.target.root import make_root
from sm121.ui import Ui
from support import mapped
from support.checkouts import Checkout
from support.tools import run, tool

pytestmark = pytest.mark.timeout(1200)
MACHINE = "aarch64"


@pytest.fixture
def image(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--image"):
        pytest.skip("Dockerfile.verify is built only with --image (docs/verify.md)")
    tool("buildah")
    assert os.geteuid() == 0, "run it as root: mapping all ids needs it"


@pytest.fixture
def buildah(image: None, tmp_path: Path) -> Iterator[list[str]]:
    """Its command line up to the verb, with storage of its own."""
    store = tmp_path / "store"
    yield [
        tool("buildah"), "--root", str(store / "root"), "--runroot", str(store / "run"),
        "--storage-driver", "vfs",
    ]  # fmt: skip
    shutil.rmtree(store, ignore_errors=True)


def inside(*lines: list[str]) -> str:
    """Run commands where arm64 programs run and all ids exist; returns what they printed."""
    magic = container._MAGIC[MACHINE]
    register = f":sm121-{MACHINE}:M::{magic}:{container.emulator(MACHINE)}:FP"
    script = [
        "set -e",
        "mount -t binfmt_misc none /proc/sys/fs/binfmt_misc",
        f"printf %s {shlex.quote(register)} > /proc/sys/fs/binfmt_misc/register",
        *(shlex.join(line) for line in lines),
    ]
    done = run(sys.executable, Path(mapped.__file__), "sh", "-c", "\n".join(script))
    return done.stdout + done.stderr


@pytest.fixture
def base(buildah: list[str], tmp_path: Path, shared_cache: Path) -> str:
    """An image of the root that verify-target enters."""
    root = make_root("run", MACHINE, cache=shared_cache, ui=Ui(quiet=True)).path
    tar = tmp_path / "root.tar"
    run("tar", "-C", root, "--exclude=./var/cache", "--exclude=./var/lib/apt", "-cf", tar, ".")
    inside(
        [*buildah, "from", "--arch", "arm64", "--name", "base", "scratch"],
        [*buildah, "add", "base", str(tar), "/"],
        [*buildah, "config", "--arch", "arm64", "base"],
        [*buildah, "commit", "-q", "base", "localhost/base:1"],
    )
    return "localhost/base:1"


def build(buildah: list[str], base: str, context: Path) -> str:
    """Build it. buildah of Debian 12 (1.28) has no RUN --network: there is none for all of it."""
    text = (context / "Dockerfile.verify").read_text()
    assert text.count("RUN --network=none ") == 1
    (context / "Dockerfile").write_text(text.replace("RUN --network=none ", "RUN "))
    return inside(
        [
            *buildah, "build", "--isolation", "chroot", "--pull=never", "--arch", "arm64",
            "--build-arg", f"BASE={base}", "-t", "verify", "-f", str(context / "Dockerfile"), str(context),
        ],
        [*buildah, "from", "--name", "made", "localhost/verify"],
        [*buildah, "run", "--isolation", "chroot", "made", "--", "cat", "/home/verify/report.json"],
        [*buildah, "run", "--isolation", "chroot", "made", "--", "ls", "-A", "/home/verify"],
    )  # fmt: skip


@pytest.mark.usefixtures("image")
def test_dockerfile_is_built_and_the_report_stays(
    built: Checkout, buildah: list[str], base: str, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    built.run("verify-target", "--context", str(context), "--image-python", "3.11")
    said = build(buildah, base, context)
    report = json.loads(re.search(r"^\{\n.*?^\}$", said, re.MULTILINE | re.DOTALL)[0])
    assert report["result"] == "pass"
    machine = report["machine"]
    assert (machine["how"], machine["network"], machine["driver"]) == ("emulated", False, "stub")
    rows = {row["step"]: row["verdict"] for row in report["rows"]}
    assert (rows["checksums"], rows["binaries"]) == ("pass", "pass")
    # Of several GB only the report is in the image.
    assert said.splitlines().count("report.json") == 1
    assert "build" not in said.splitlines()


@pytest.mark.usefixtures("image")
def test_an_altered_wheelhouse_ends_the_build(
    built: Checkout, buildah: list[str], base: str, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    built.run("verify-target", "--context", str(context), "--image-python", "3.11")
    (wheel,) = (context / "wheelhouse").glob("*.whl")
    data = bytearray(wheel.read_bytes())
    wheel.unlink()  # it may be a second name of the checkout's own
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(AssertionError, match="The wheelhouse did not pass: checksums"):
        build(buildah, base, context)
