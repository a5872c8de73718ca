"""The native path, as on a Spark: `nox -s build` inside a root of the target.

The aarch64 nvcc, g++, Python, uv and git do everything; only the kernel and the processor are
this machine's. Emulated it takes about half an hour (docs/builds/), so it is run once per release.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.errors import ToolFailed
from sm121.files import remove_tree
from sm121.layout import Layout
from sm121.target.container import Container
from sm121.target.root import make_root
from sm121.ui import Ui, human_seconds

_SCRIPT = Path(__file__).with_name("native.sh")
_STAMP = "sm121-native "
# What a person has set to reach an index is needed inside as well.
_PASSED = ("UV_", "PIP_", "SSL_CERT_", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy",
           "http_proxy", "no_proxy")  # fmt: skip
_CERTIFICATES = Path("/etc/ssl/certs")


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeRun:
    """wheelhouse: what came of it. seconds: of each part. log: all that was printed."""

    wheelhouse: Path
    seconds: dict[str, float]
    log: Path
    root: str
    drift: tuple[str, ...]


def build_natively(layout: Layout, machine: str, options: Sequence[str], ui: Ui) -> NativeRun:
    """Clone the checkout's HEAD into a root of the target and build there.

    options: of `nox -s build`. Raises ToolFailed if the build fails, with the log's place.
    """
    root = make_root("build", machine, cache=layout.cache, ui=ui)
    folder = layout.build / "target" / "native"
    remove_tree(folder)
    work = folder / "work"
    work.mkdir(parents=True)
    layout.cache.mkdir(parents=True, exist_ok=True)
    certificates = (_CERTIFICATES,) if _CERTIFICATES.is_dir() else ()
    container = Container(
        root=root, scratch=folder / "scratch", network=True,
        binds=(work, layout.cache, layout.root, *certificates, _SCRIPT.parent),
    )  # fmt: skip
    ui.note(f"{root.described}, CPython {container.check()}: about half an hour")
    log = layout.log / "native.log"
    passed = {
        k: v for k, v in os.environ.items() if k.startswith(_PASSED) and k != "PIP_FIND_LINKS"
    }
    stamps: list[tuple[float, str]] = []

    def follow(line: str) -> None:
        if line.startswith(_STAMP):
            when, name = line.removeprefix(_STAMP).split(" ", 1)
            stamps.append((float(when), name))
        else:
            ui.say(f"       {line}")

    log.unlink(missing_ok=True)
    finished = proc.run(
        container.command(["/bin/bash", _SCRIPT, layout.root, work, *options]),
        env=container.environment({**passed, "SM121_CACHE": str(layout.cache)}),
        log=log, on_line=follow, check=False,
    )  # fmt: skip
    if finished.returncode:
        raise ToolFailed(
            "The native build failed.", returncode=finished.returncode, log=log,
            cause=f"whole output: {log}",
            remedy="It runs the README's commands in a clone of HEAD: what is not committed is not in it.",
        )  # fmt: skip
    seconds = {name: after - when for (when, name), (after, _) in itertools.pairwise(stamps)}
    for name, taken in seconds.items():
        ui.say(f"  {name:<6} {human_seconds(taken)}")
    return NativeRun(
        wheelhouse=work / "sm121" / "wheelhouse", seconds=seconds, log=log,
        root=root.described, drift=root.drift,
    )  # fmt: skip
