"""The GPU and its driver, if there is one."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from sm121 import proc
from sm121.abi.gpu import Arch
from sm121.doctor.facts import ANSWER_S, driver_version
from sm121.doctor.machine import Machine
from sm121.doctor.model import Check, Level
from sm121.ui import human_bytes

# First driver branch of CUDA 13 (CUDA toolkit release notes, table "CUDA Driver").
_DRIVER_MIN = {13: 580, 12: 525}
_QUERY = (
    "--query-gpu=name,compute_cap,memory.total,driver_version",
    "--format=csv,noheader,nounits",
)


def check_gpu(machine: Machine) -> Iterator[Check]:
    """The kernel's driver (/proc/driver/nvidia/version) and what nvidia-smi says of the GPUs."""
    driver = driver_version(machine.read("/proc/driver/nvidia/version"))
    smi = machine.which("nvidia-smi")
    rows: list[list[str]] = []
    why = "nvidia-smi lists none" if smi else "nvidia-smi is not on PATH"
    late = False
    if smi:
        finished = proc.run([smi, *_QUERY], check=False, limit=ANSWER_S)
        late = finished.late
        if finished.returncode == 0:
            rows = [[f.strip() for f in line.split(",")] for line in finished.output.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    driver = driver or (rows[0][3] if rows else "")
    yield _driver(machine, driver)
    yield _hung() if late else _devices(machine, rows, driver=driver, why=why)
    if any(not row[2].isdigit() for row in rows) or any("GB10" in row[0] for row in rows):
        memory = psutil.virtual_memory()
        yield Check(
            name="unified memory", build="ok", run="ok",
            found=f"the GPU uses the system's {human_bytes(memory.total)}, "
            f"{human_bytes(memory.available)} available: compilers and models compete for it",
        )  # fmt: skip


def _driver(machine: Machine, driver: str) -> Check:
    major = int(machine.context.stack.cuda.version.split(".")[0])
    least = _DRIVER_MIN.get(major, 0)
    run: Level = "ok"
    cause = remedy = ""
    if not driver:
        run, cause = "fault", "without the driver's libcuda no extension of vLLM loads"
        remedy = f"Install NVIDIA's driver {least} or newer (DGX OS brings it)."
    elif int(driver.split(".")[0]) < least:
        run, cause = (
            "fault",
            f"CUDA {machine.context.stack.cuda.version} needs driver {least} or newer",
        )
        remedy = "Update the driver (DGX OS: apt-get dist-upgrade)."
    return Check(name="driver", found=f"NVIDIA {driver}" if driver else "no NVIDIA driver is loaded",
                 build="not needed", run=run, cause=cause, remedy=remedy)  # fmt: skip


def _hung() -> Check:
    return Check(
        name="GPU", found=f"nvidia-smi does not answer within {ANSWER_S} s", build="not needed",
        run="fault", cause="the driver hangs, or the GPU has fallen off its bus",
        remedy="Look for NVRM and Xid in `journalctl -k`, and start the machine anew; a process that "
        "hangs in the driver can't be killed.",
    )  # fmt: skip


def _devices(machine: Machine, rows: list[list[str]], *, driver: str, why: str) -> Check:
    wanted = Arch.parse(machine.context.arch)
    if not rows:
        return Check(
            name="GPU", found="none seen", build="not needed", run="fault", cause=why,
            remedy="Run nvidia-smi by hand; in a container, give it the GPU (--gpus all)."
            if driver else "Run it on a node.",
        )  # fmt: skip
    found = "; ".join(f"{name}, compute capability {capability}" for name, capability, _, _ in rows)
    fitting = [r for r in rows if r[1] == f"{wanted.number // 10}.{wanted.number % 10}"]
    if len(fitting) == len(rows):
        return Check(name="GPU", found=found, build="not needed", run="ok")
    return Check(
        name="GPU", found=found, build="not needed", run="warning" if fitting else "fault",
        cause=f"what this stack compiles is for {wanted.sm}{wanted.suffix} and runs on no other GPU",
        remedy="Serve on a GB10" + ("; CUDA_VISIBLE_DEVICES can hide the others." if fitting else "."),
    )  # fmt: skip
