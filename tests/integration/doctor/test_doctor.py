"""`doctor` through the command line and on made-up machines with real programs on PATH."""

from __future__ import annotations

import json
import re
import signal
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from sm121.__main__ import main
from sm121.context import Context
from sm121.doctor import gpu, tools
from sm121.doctor.archive import write_report
from sm121.doctor.gpu import check_gpu
from sm121.doctor.links import check_links
from sm121.doctor.machine import Machine
from sm121.doctor.model import SCHEMA_FILE, Check, Diagnosis
from sm121.doctor.tools import check_compilers, check_nvcc
from sm121.toolkit.machine import host_machine
from support.environments import snapshot
from support.gits import Work
from support.stacks import minimal, write_stack
from support.upstream import make_checkout


@dataclass
class Doctor:
    root: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *argv: str, code: int = 0) -> str:
        assert main(["doctor", *argv]) == code, self.capsys.readouterr().err
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        return err + out

    def json(self, *argv: str, code: int = 0) -> dict[str, Any]:
        file = self.root.parent / "doctor.json"
        self.run("--offline", f"--json={file}", *argv, code=code)
        data: dict[str, Any] = json.loads(file.read_text())
        jsonschema.validate(data, json.loads(SCHEMA_FILE.read_text()))
        return data


@pytest.fixture
def doctor(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Doctor]:
    checkout = make_checkout(tmp_path / "checkout", minimal())
    (checkout / "pins/rules.toml").write_bytes((root / "pins/rules.toml").read_bytes())
    monkeypatch.chdir(checkout)
    before = signal.getsignal(signal.SIGTERM)
    yield Doctor(checkout, capsys)
    signal.signal(signal.SIGTERM, before)


def program(folder: Path, name: str, text: str) -> Path:
    """A program that prints a text."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return path


def one(checks: Iterator[Check], name: str) -> Check:
    (found,) = (check for check in checks if check.name == name)
    return found


def test_json_is_valid_and_each_problem_has_cause_and_remedy(doctor: Doctor) -> None:
    data = doctor.json(code=1)  # offline, and the cache is empty
    levels = {check["name"]: check for check in data["checks"]}
    assert {"system", "memory", "cores", "disk", "build folder", "git", "compilers", "GPU", "driver",
            "nvcc", "ulimit -l", "links", "vllm in the way", "package index"} <= levels.keys()  # fmt: skip
    for check in data["checks"]:
        bad = {check["build"], check["run"]} & {"warning", "fault"}
        assert bool(check["cause"]) == bool(check["remedy"]) == bool(bad), check
    assert (data["role"], data["result"]) == ("build", "fail")
    assert [plan["profile"] for plan in data["plans"]] == ["smoke"]


def test_it_changes_nothing(doctor: Doctor) -> None:
    before = snapshot(doctor.root)
    doctor.run("--offline", code=1)
    assert snapshot(doctor.root) == before


def test_json_alone_on_standard_output(doctor: Doctor) -> None:
    assert main(["doctor", "--offline", "--json"]) == 1
    assert json.loads(doctor.capsys.readouterr().out)["schema_version"] == 1


def test_the_asked_role_decides(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an empty PATH can't build; what is missing is named (cases.md 20)."""
    monkeypatch.setenv("PATH", "")
    said = doctor.run("--offline", "--for", "run", code=1)
    assert "This machine can't run stack 1.2.3" in said
    data = doctor.json(code=1)
    levels = {check["name"]: check for check in data["checks"]}
    assert levels["git"]["build"] == levels["compilers"]["build"] == "fault"
    assert "apt-get install" in levels["compilers"]["remedy"] or "install" in levels["compilers"]["remedy"]  # fmt: skip
    assert levels["compiler of this machine"]["run"] == "fault"


def test_wrong_usage(doctor: Doctor) -> None:
    assert "--for" in doctor.run("--for", "fly", code=2)
    assert "no profile 'smok'" in doctor.run("--profile", "smok", code=2)
    assert "not a virtual environment" in doctor.run("--offline", "--env", "/nonexistent", code=2)


def test_unreachable_index_and_its_password(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://ada:hunter2secret@127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    file = doctor.root.parent / "d.json"
    said = doctor.run(f"--json={file}", code=1)
    (check,) = (c for c in json.loads(file.read_text())["checks"] if c["name"] == "package index")
    assert check["build"] == "fault"
    assert "could not be reached" in check["found"]
    assert "127.0.0.1:9" in check["cause"]
    assert "hunter2secret" not in said + file.read_text()


def test_compilers_of_the_target_are_not_this_machines(
    small: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "aarch64" if host_machine() == "x86_64" else "x86_64"
    options = replace(small.options, target=f"linux-{other}")
    machine = Machine(context=replace(small, options=options))
    for named, level in (("g++", "fault"), (f"{other}-linux-gnu-g++", "ok")):
        monkeypatch.setenv("SM121_CXX", named)
        checks = list(check_compilers(machine))
        assert one(iter(checks), "compilers").build == level
        own = one(iter(checks), "compiler of this machine")
        assert own.run == "ok"
        assert f"/g++ {own.found.split()[1]} for {host_machine()}" in own.found


NVCC = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {}, V{}.88"


@pytest.mark.parametrize(
    ("shell", "service", "home", "release", "level"),
    [
        (True, True, False, "13.0", "ok"),
        (True, False, False, "13.0", "warning"),  # ~/.bashrc put it there
        (False, True, False, "13.0", "ok"),
        (False, False, False, "13.0", "fault"),  # only in /usr/local/cuda
        (False, False, True, "13.0", "ok"),  # CUDA_HOME says where
        (True, True, False, "12.8", "fault"),
        (True, True, False, "13.2", "warning"),
    ],
)
def test_nvcc_that_the_service_sees(
    small: Context, tmp_path: Path, shell: bool, service: bool, home: bool, release: str, level: str
) -> None:
    """cases.md 20."""
    cuda = tmp_path / "usr/local/cuda"
    program(cuda / "bin", "nvcc", NVCC.format(release, release))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/environment").write_text(
        f"PATH={cuda}/bin\n" if service else "PATH=/nowhere\n"
    )
    environment = {"PATH": str(cuda / "bin") if shell else ""}
    if home:
        environment["CUDA_HOME"] = str(cuda)
    check = one(check_nvcc(Machine(context=small, root=tmp_path, environment=environment)), "nvcc")
    assert (check.build, check.run) == ("not needed", level)
    assert f"CUDA {release}" in check.found
    if level == "warning" and not service:
        assert "/nowhere" in check.cause
        assert f"{cuda}/bin" in check.remedy


def test_no_nvcc_anywhere(small: Context, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/environment").write_text("PATH=/nowhere\n")
    check = one(check_nvcc(Machine(context=small, root=tmp_path, environment={})), "nvcc")
    assert check.run == "fault"
    assert "CUDA 13.0 toolkit" in check.remedy


@pytest.mark.parametrize(
    ("smi", "gpu", "driver"),
    [
        ("NVIDIA GB10, 12.1, [N/A], 580.95.05", "ok", "ok"),
        ("NVIDIA GB10, 12.1, [N/A], 570.10", "ok", "fault"),
        ("NVIDIA GeForce RTX 5090, 12.0, 32607, 580.95.05", "fault", "ok"),
        ("NVIDIA GB10, 12.1, [N/A], 580.95.05\nNVIDIA L4, 8.9, 23034, 580.95.05", "warning", "ok"),
    ],
)
def test_gpu_and_driver(small: Context, tmp_path: Path, smi: str, gpu: str, driver: str) -> None:
    program(tmp_path / "bin", "nvidia-smi", smi)
    machine = Machine(context=small, root=tmp_path, environment={"PATH": f"{tmp_path}/bin:/bin"})
    checks = list(check_gpu(machine))
    assert one(iter(checks), "GPU").run == gpu
    assert one(iter(checks), "driver").run == driver
    assert ("unified memory" in {c.name for c in checks}) == ("GB10" in smi)
    assert all(c.build in ("not needed", "ok") for c in checks)


@pytest.fixture
def hung(small: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """A machine on which a program never answers."""

    def make(asking: ModuleType, name: str) -> Machine:
        monkeypatch.setattr(asking, "ANSWER_S", 0.3)
        program(tmp_path / "bin", name, "").write_text("#!/bin/sh\nexec sleep 60\n")
        path = {"PATH": f"{tmp_path}/bin:/bin"}
        return Machine(context=small, root=tmp_path, environment=path)

    return make


def test_driver_that_hangs_is_a_fault(hung: Callable[..., Machine]) -> None:
    check = one(check_gpu(hung(gpu, "nvidia-smi")), "GPU")
    assert (check.build, check.run) == ("not needed", "fault")
    assert check.found == "nvidia-smi does not answer within 0.3 s"
    assert "journalctl -k" in check.remedy


def test_nvcc_that_hangs_is_a_fault(hung: Callable[..., Machine], tmp_path: Path) -> None:
    check = one(check_nvcc(hung(tools, "nvcc")), "nvcc")
    assert (check.build, check.run) == ("not needed", "fault")
    assert f"{tmp_path}/bin/nvcc does not answer within 0.3 s" in check.found
    assert check.cause
    assert "--version" in check.remedy


def test_driver_of_the_kernel_counts_first(small: Context, tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build\n"
    )
    checks = list(check_gpu(Machine(context=small, root=tmp_path, environment={})))
    assert one(iter(checks), "driver").run == "ok"
    assert "gpus all" in one(iter(checks), "GPU").remedy


@pytest.mark.parametrize(
    ("mtu", "state", "level", "says"),
    [
        (9000, "4: ACTIVE", "ok", "enp1s0f0np0 up, MTU 9000, 200 Gb/s, rocep1s0f0:1 ACTIVE RoCE v2"),
        (1500, "4: ACTIVE", "warning", "MTU 1500"),
        (9000, "1: DOWN", "warning", "rocep1s0f0:1 DOWN"),
        (0, "", "warning", "no RDMA port"),
    ],
)  # fmt: skip
def test_links_between_nodes(
    small: Context, tmp_path: Path, mtu: int, state: str, level: str, says: str
) -> None:
    if mtu:
        net = tmp_path / "sys/class/net/enp1s0f0np0"
        port = tmp_path / "sys/class/infiniband/rocep1s0f0/ports/1"
        values = {
            net / "mtu": str(mtu), net / "speed": "200000", net / "operstate": "up", port / "state": state,
            port / "gid_attrs/ndevs/3": "enp1s0f0np0", port / "gid_attrs/types/3": "RoCE v2",
        }  # fmt: skip
        for file, text in values.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
    check = one(check_links(Machine(context=small, root=tmp_path, environment={})), "links")
    assert (check.build, check.run) == ("not needed", level)
    assert says in check.found
    assert bool(check.cause) == bool(check.remedy) == (level == "warning")


def test_nccl_of_an_environment(doctor: Doctor, tmp_path: Path) -> None:
    site = tmp_path / "env/lib/python3.12/site-packages"
    (site / "nvidia/nccl/lib").mkdir(parents=True)
    (tmp_path / "env/pyvenv.cfg").write_text("")
    (site / "nvidia/nccl/lib/libnccl.so.2").write_bytes(b"NCCL version 2.30.4+cuda13.0")
    data = doctor.json("--env", str(tmp_path / "env"), code=1)
    (check,) = (c for c in data["checks"] if c["name"] == "NCCL")
    assert "unreadable" in check["found"]


def install(site: Path, name: str, release: str, **files: str) -> None:
    info = site / f"{name}-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    (info / "RECORD").write_text("")
    for path, text in files.items():
        file = site / name / f"{path}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def test_environment_by_the_rules_that_the_other_verbs_use(doctor: Doctor, tmp_path: Path) -> None:
    """cases.md 1 and 9: a CPU torch, and tilelang beside a tvm-ffi that breaks it."""
    env = tmp_path / "env"
    site = env / "lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (env / "pyvenv.cfg").write_text("")
    install(site, "torch", "2.11.0", version="__version__ = '2.11.0+cpu'\n")
    install(site, "tilelang", "0.1.9")
    install(site, "apache_tvm_ffi", "0.1.13")
    (site / "halved-1.0.dist-info").mkdir()
    data = doctor.json("--for", "run", "--env", str(env), code=1)
    faults = {c["name"]: c for c in data["checks"] if c["run"] == "fault"}
    assert "found +cpu" in faults["rule torch-cpu"]["found"] or "cpu" in faults["rule torch-cpu"]["found"]  # fmt: skip
    assert "tvm::ffi::json::Stringify" in faults["rule tvm-ffi-symbols"]["cause"]
    assert "METADATA is missing" in faults["environment"]["found"]
    assert f"repair -- --env {env}" in faults["rule torch-cpu"]["remedy"]


def test_sound_environment(doctor: Doctor, tmp_path: Path) -> None:
    site = tmp_path / "env/lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (tmp_path / "env/pyvenv.cfg").write_text("")
    install(site, "tilelang", "0.1.9")
    data = doctor.json("--env", str(tmp_path / "env"), code=1)
    (check,) = (c for c in data["checks"] if c["name"] == "environment")
    assert check["run"] == "ok"
    assert "rules hold" in check["found"]


SECRETS = ("hunter2secret", "tok-abcdef123", "netrc-pass-9", "s3cr3t-in-log", "Bearer-xyz-987654")


def test_report_has_what_is_needed_and_nothing_secret(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home-of-ada"
    home.mkdir()
    (home / ".netrc").write_text("machine index.example login ada password netrc-pass-9\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://ada:hunter2secret@index.example/simple")
    monkeypatch.setenv("UV_INDEX_CORP_PASSWORD", "tok-abcdef123")
    monkeypatch.setenv("HF_TOKEN", "tok-abcdef123")
    monkeypatch.setenv("UNRELATED_VARIABLE", "private-value")
    log = doctor.root / "build/log/compile.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "".join(f"line {n}\n" for n in range(1000))
        + "$ GIT_PASSWORD=s3cr3t-in-log git fetch https://x:s3cr3t-in-log@host/\n"
        + f"Authorization: Bearer Bearer-xyz-987654\nin {home}/src: tok-abcdef123 netrc-pass-9\n"
        + "error: the last line\n"
    )
    (doctor.root / "build/state.json").write_text(
        json.dumps({"schema": 1, "stages": {}, "url": "https://ada:hunter2secret@index.example/"})
    )
    output = tmp_path / "report.tar.gz"
    said = doctor.run("--offline", f"--report={output}", code=1)
    assert f"Wrote {output}" in said
    with tarfile.open(output) as archive:
        texts = {m.name: archive.extractfile(m).read().decode() for m in archive.getmembers()}  # type: ignore[union-attr]
    everything = "\n".join([*texts, *texts.values()])
    for secret in (*SECRETS, "private-value", "home-of-ada", "UNRELATED_VARIABLE"):
        assert secret not in everything, secret
    names = {name.removeprefix("sm121-report/") for name in texts}
    assert {"doctor.json", "versions.txt", "environment.txt", "state.json", "log/compile.log",
            "pins/1.2.3/stack.toml", "patches/vllm/1.2.3/series"} <= names  # fmt: skip
    tail = texts["sm121-report/log/compile.log"]
    assert tail.endswith("error: the last line\n")
    assert "line 999\n" in tail
    assert "line 10\n" not in tail
    jsonschema.validate(
        json.loads(texts["sm121-report/doctor.json"]), json.loads(SCHEMA_FILE.read_text())
    )
    assert json.loads(texts["sm121-report/state.json"])["url"] == "https://***@index.example/"
    assert "UV_DEFAULT_INDEX=https://***@index.example/simple" in texts["sm121-report/environment.txt"]  # fmt: skip


@pytest.fixture
def with_source(doctor: Doctor, tmp_path: Path) -> tuple[Doctor, Work]:
    """A profile that needs a source, which no wheel has and whose remote can't be reached."""
    work = Work.init(tmp_path / "cutlass.git")
    data = minimal()
    source = data["sources"]["cutlass"]
    source |= {"git": "http://127.0.0.1:9/x.git", "commit": work.commit({"include/a.h": "a"})}
    del source["wheels"]
    data["profiles"]["smoke"]["sources"] = ["cutlass"]
    write_stack(doctor.root / "pins", data)
    return doctor, work


def sources_of(doctor: Doctor, *argv: str) -> dict[str, Any]:
    file = doctor.root.parent / "doctor.json"
    doctor.run(f"--json={file}", *argv, code=1)
    (check,) = (c for c in json.loads(file.read_text())["checks"] if c["name"] == "sources")
    return dict(check)


def test_source_that_cannot_be_had_is_a_fault_before_the_build(
    with_source: tuple[Doctor, Work],
) -> None:
    doctor, work = with_source
    unreachable = sources_of(doctor)
    assert unreachable["build"] == "fault"
    assert unreachable["found"] == "nowhere that can be reached: cutlass"
    assert "127.0.0.1" in unreachable["cause"]
    assert "--clone" in unreachable["remedy"]
    assert "--offline" in sources_of(doctor, "--offline")["cause"]
    before = snapshot(work.path)
    there = sources_of(doctor, "--offline", f"--clone={work.path}")
    assert (there["build"], there["found"]) == ("ok", "in clones: cutlass")
    assert snapshot(work.path) == before


def test_report_takes_the_units_but_not_what_people_set_in_them(
    small: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a log that holds a key and tokens, and the names of the person and the machine."""
    monkeypatch.setattr("socket.gethostname", lambda: "adas-spark")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    own = tmp_path / "etc/systemd/system/sm121-head.service.d/override.conf"
    own.parent.mkdir(parents=True)
    own.write_text("[Service]\nEnvironment=HF_TOKEN=hunter2secret OWN=hunter2\nRestartSec=3\n")
    (own.parents[1] / "sm121-head.service").write_text("[Service]\nExecStart=/x --api-key hunter2secret\n")  # fmt: skip
    (own.parents[1] / "other.service").write_text("[Service]\nExecStart=/other\n")
    (tmp_path / "etc/sm121").mkdir()
    (tmp_path / "etc/sm121/serve.env").write_text("VLLM_API_KEY=hunter2secret\n")
    log = small.layout.log / "sync.log"
    log.parent.mkdir(parents=True)
    log.write_text("ada@adas-spark: ssh-ed25519 AAAAC3hunter2 ada@adas-spark\nsaid " + "hf" + "_hunter2hunter2hunter2\n")  # fmt: skip
    diagnosis = Diagnosis(
        schema_version=1, role="run", stack="1.2.3", target="linux-aarch64", profile="smoke",
        result="fail", plans=(), checks=(
            Check(name="x", found='of "ada" on adas-spark, --token=hunter2secret', build="ok", run="ok"),
        ),
    )  # fmt: skip
    output = tmp_path / "r.tar.gz"
    write_report(Machine(context=small, root=tmp_path, environment={}), diagnosis, output)
    with tarfile.open(output) as archive:
        texts = {m.name: archive.extractfile(m).read().decode() for m in archive.getmembers()}  # type: ignore[union-attr]
    everything = "\n".join(texts.values())
    assert "hunter2" not in everything
    assert "adas-spark" not in everything
    assert not re.search(r"\bada\b", everything)
    assert "OWN" not in everything
    assert "RestartSec=3" in texts["sm121-report/system/etc/systemd/system/sm121-head.service.d/override.conf"]  # fmt: skip
    assert not any("other.service" in name or "serve.env" in name for name in texts)
    (check,) = json.loads(texts["sm121-report/doctor.json"])["checks"]
    assert check["found"] == 'of "USER" on HOST, --token=***'
