"""`--report`: one archive for a bug report, with nothing secret in it (see mask)."""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import json
import os
import platform
import re
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sm121.doctor.machine import Machine
from sm121.doctor.mask import mask_json, masker, own_names
from sm121.doctor.model import Diagnosis, to_json
from sm121.files import write_atomic
from sm121.wheelhouse.manifest import FILE as MANIFEST

NAME = "sm121-report"
_TAIL = 400  # lines of a log
_LARGEST = 4 << 20
# By name, so that nothing else of a person's environment gets in.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR", "MAX_JOBS", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV")  # fmt: skip
_PREFIXES = ("SM121_", "UV_", "VLLM_", "NCCL_", "TRITON_", "FLASHINFER_", "CCACHE_")


def write_report(machine: Machine, diagnosis: Diagnosis, output: Path) -> list[str]:
    """Write a .tar.gz; returns the names in it. Every text goes through mask()."""
    hide = masker(machine.environment, names=own_names(machine.environment))
    buffer = io.BytesIO()
    names: list[str] = []
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as archive,
    ):
        for name, text in _members(machine, diagnosis):
            data = (mask_json(text, hide) if name.endswith(".json") else hide(text)).encode()
            info = tarfile.TarInfo(f"{NAME}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
            names.append(name)
    write_atomic(output, buffer.getvalue())
    return names


def _members(machine: Machine, diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    layout = machine.context.layout
    yield "doctor.json", to_json(diagnosis)
    yield "versions.txt", _versions(layout.root)
    yield "environment.txt", _variables(machine.environment)
    files = {
        "state.json": layout.state,
        "manifest.json": layout.wheelhouse / MANIFEST,
        f"pins/{machine.context.stack_name}/stack.toml":
            layout.pins / machine.context.stack_name / "stack.toml",
        "pins/rules.toml": layout.pins / "rules.toml",
        f"patches/vllm/{machine.context.stack_name}/series":
            layout.patches / "vllm" / machine.context.stack_name / "series",
        **{f"reports/{f.name}": f for f in sorted((layout.build / "reports").glob("*.json"))},
    }  # fmt: skip
    for name, file in files.items():
        if (text := _text(file)) is not None:
            yield name, text
    for log in sorted(layout.log.rglob("*.log")):
        if (text := _text(log, tail=_TAIL)) is not None:
            yield f"log/{log.relative_to(layout.log)}", text
    units = machine.root / "etc/systemd/system"
    for file in sorted([*units.glob("sm121-*.service"), *units.glob("sm121-*.service.d/*.conf")]):
        if (text := _text(file)) is not None:
            yield f"system/{file.relative_to(machine.root)}", unit_text(text)
    for name in ("/etc/os-release", "/proc/driver/nvidia/version", "/proc/meminfo"):
        if text := machine.read(name):
            yield f"system{name}", text


def _text(file: Path, *, tail: int = 0) -> str | None:
    """A file's text, or its last lines; None if there is none."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > _LARGEST:
                stream.seek(size - _LARGEST)
            text = stream.read().decode(errors="replace")
    except OSError:
        return None
    if size > _LARGEST and not tail:
        return f"(left out: {size} bytes)\n"
    lines = text.splitlines()
    if tail and len(lines) > tail:
        lines = [f"(the last {tail} lines)", *lines[-tail:]]
    return "\n".join(lines) + "\n"


def _versions(root: Path) -> str:
    """What runs us, and which commit of the project it is."""
    packages = sorted(
        f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()
    )
    head = (root / ".git/HEAD").read_text().strip() if (root / ".git/HEAD").is_file() else "no git"
    if head.startswith("ref: ") and (ref := root / ".git" / head[5:]).is_file():
        head = f"{head[5:]} {ref.read_text().strip()}"
    facts = {"sm121": head, "python": platform.python_version(), "platform": platform.platform()}
    return json.dumps(facts, indent=1) + "\n" + "\n".join(packages) + "\n"


def unit_text(text: str) -> str:
    """A systemd unit without what its Environment= lines set, but for the variables that may be
    shown: `systemctl edit` is where people put their tokens."""
    lines = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        name, _, value = line.partition("=")
        if name.strip() not in (
            "Environment",
            "PassEnvironment",
            "SetCredential",
            "LoadCredential",
        ):
            lines.append(line)
            continue
        try:
            words = shlex.split(value)
        except ValueError:
            words = [""]
        kept = [w for w in words if _shown(w.partition("=")[0])]
        left = ["(left out)"] if len(kept) < len(words) else []
        lines.append(f"{name.strip()}={' '.join([*map(shlex.quote, kept), *left])}")
    return "\n".join(lines) + "\n"


def _shown(name: str) -> bool:
    return name in _VARIABLES or name.startswith(_PREFIXES)


def _variables(environment: Mapping[str, str]) -> str:
    """Variables that decide something here; of the others not even the names."""
    return "".join(
        f"{name}={value}\n" for name, value in sorted(environment.items()) if _shown(name)
    )
