"""Facts of a machine that two nodes must agree on, read with the standard library alone.

`doctor` judges them on this machine; `sync --compare` sends this module to every node and compares
what comes back. Sources: sysfs (Documentation/ABI/testing/sysfs-class-net and
-infiniband of Linux), proc(5), getrlimit(2), sshd(8) for SSH_CONNECTION.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A program that asks a driver which hangs does not end by itself.
ANSWER_S = 20
_IGNORED = ("lo", "docker", "br-", "virbr", "veth-docker", "tailscale", "wg", "tun", "tap")


def gather(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> dict[str, Any]:
    """All facts, as JSON values; '' and None where a machine has none.

    links: see links(). direct: the link through which this ssh session came. shadow: what in the
    current directory hides the installed vllm (cases.md 24).
    """
    own = links(root)
    here = cwd or Path.cwd()
    path = environ.get("PATH", "")
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "glibc": " ".join(platform.libc_ver()),
        "driver": driver_version(_read(root, "proc/driver/nvidia/version")) or _smi("driver_version", path),
        "cuda_driver": cuda_driver(),
        "nvcc": nvcc(path),
        "path": path,
        "memlock": memlock(),
        "links": own,
        "direct": direct_link(environ),
        "cwd": str(here),
        "shadow": [name for name in ("vllm", "vllm.py") if (here / name).exists()],
    }  # fmt: skip


def links(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Network interfaces but loopback and virtual bridges: name, mtu, speed (Mb/s, None if the
    kernel knows none), state, and the RDMA port that sits on it: rdma, rdma_state, roce (types of
    its GIDs)."""
    ports = rdma_ports(root)
    found = []
    try:
        folders = sorted((root / "sys/class/net").iterdir())
    except OSError:
        folders = []
    for folder in folders:
        if folder.name.startswith(_IGNORED) or not folder.is_dir():
            continue
        mtu, speed = _text(folder / "mtu"), _text(folder / "speed")
        found.append(
            {
                "name": folder.name,
                "mtu": int(mtu) if mtu.isdigit() else None,
                "speed": int(speed) if speed.isdigit() and int(speed) > 0 else None,
                "state": _text(folder / "operstate"),
                **ports.get(folder.name, {"rdma": "", "rdma_state": "", "roce": []}),
            }
        )
    return found


def rdma_ports(root: Path = Path("/")) -> dict[str, dict[str, Any]]:
    """Network interface → its RDMA port, as `links` gives it (gid_attrs/ndevs, gid_attrs/types)."""
    ports: dict[str, dict[str, Any]] = {}
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        kinds: dict[str, set[str]] = {}
        for ndev in port.glob("gid_attrs/ndevs/*"):
            if name := _text(ndev):
                kinds.setdefault(name, set()).add(_text(port / "gid_attrs/types" / ndev.name))
        for name, types in kinds.items():
            ports[name] = {
                "rdma": f"{port.parents[1].name}:{port.name}",
                "rdma_state": _text(port / "state").partition(":")[2].strip(),
                "roce": sorted(t for t in types if "RoCE" in t),
            }
    return ports


def direct_link(environ: Mapping[str, str]) -> str:
    """Interface that has the address which this ssh session reached; '' outside of ssh."""
    fields = environ.get("SSH_CONNECTION", "").split()
    if len(fields) != 4:
        return ""
    return link_of(fields[2])


def link_of(address: str) -> str:
    """Interface that has an address of this machine, '' if none."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    for _, name in socket.if_nameindex():
        if wanted.version == 4 and _ipv4(name) == str(wanted):
            return name
    for line in _read(Path("/"), "proc/net/if_inet6").splitlines():
        fields = line.split()
        if wanted.version == 6 and len(fields) == 6 and ipaddress.ip_address(bytes.fromhex(fields[0])) == wanted:  # fmt: skip
            return fields[5]
    return ""


def _ipv4(name: str) -> str:
    """First IPv4 address of an interface (netdevice(7), SIOCGIFADDR)."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def memlock() -> str:
    """`ulimit -l` of this process: 'unlimited' or bytes."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def driver_version(text: str) -> str:
    """Of '… Kernel Module for aarch64  580.95.05  Release Build …'; '' if there is none."""
    match = re.search(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def cuda_driver() -> str:
    """Newest CUDA that the driver knows, by cuDriverGetVersion; '' without a driver."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def nvcc(path: str) -> str:
    """The nvcc that a PATH finds, with its release; '' if none."""
    program = shutil.which("nvcc", path=path) if path else None
    if not program:
        return ""
    match = re.search(r"release (\d+\.\d+)", _run([program, "--version"]))
    return f"{program} {match[1] if match else '?'}"


def _smi(query: str, path: str) -> str:
    program = shutil.which("nvidia-smi", path=path) if path else None
    if not program:
        return ""
    lines = _run([program, f"--query-gpu={query}", "--format=csv,noheader"]).split("\n")
    return lines[0].strip() if lines and re.match(r"\d+\.", lines[0]) else ""


def _run(argv: list[str]) -> str:
    # Not through sm121.proc: this module also runs where only the standard library is.
    try:
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
        )
    except OSError:
        return ""
    try:
        return child.communicate(timeout=ANSWER_S)[0]
    except subprocess.TimeoutExpired:
        # Not waited for without end, as subprocess.run would: one that hangs in a driver never ends.
        child.kill()
        try:
            child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            child.returncode = -9  # Popen would warn of a child that runs on
        return ""
    finally:
        assert child.stdout is not None
        child.stdout.close()


def _read(root: Path, path: str) -> str:
    return _text(root / path)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
