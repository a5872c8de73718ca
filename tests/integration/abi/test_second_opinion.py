"""The real dynamic loader, run under emulation, leaves open what we say it leaves open.

`ldd -r` is ld.so with LD_TRACE_LOADED_OBJECTS, LD_WARN and LD_BIND_NOW set: it maps the file
and everything that it needs, relocates all of it, and names each symbol that it did not
find. What the interpreter has (Py*) is no library's and so taken off by our list; libcuda is
a stub made from the toolkit's cuda.h. Real libraries, unpacked from the wheels.
"""

import re
import shutil
import zipfile
from pathlib import Path

import pytest
from make import TARGET

from sm121 import proc
from sm121.abi.policy.load import load_policy
from sm121.abi.scan import installed_path
from sm121.abi.system import System
from sm121.abi.verify import verify
from sm121.toolkit.machine import host_machine

pytestmark = [pytest.mark.network, pytest.mark.compiler, pytest.mark.timeout(3000)]

# libc, libstdc++ and ld.so for arm64, of the cross compiler's own packages.
SYSROOT = Path("/usr/aarch64-linux-gnu")
_UNDEFINED = re.compile(r"(?:undefined symbol: (\S+)|symbol (\S+), version \S+ not defined in file \S+ with link time reference)[,\s]*\(([^)]+)\)")  # fmt: skip
_NOT_FOUND = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)


def unpack_libraries(wheels, site: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if ".so" in member.filename.rpartition("/")[2]:
                    out = site / installed_path(member.filename)
                    out.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(member) as source, out.open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 20)


class Loader:
    """ld.so over one site-packages."""

    def __init__(self, site: Path, tools):
        self.site = site
        folders = [
            site / "torch/lib",
            site / "tvm_ffi/lib",
            *sorted((site / "nvidia").glob("*/lib")),
        ]
        self.path = ":".join(map(str, [*folders, tools.root / "lib64/stubs", SYSROOT / "lib"]))
        stub = tools.root / "lib64/stubs/libcuda.so.1"
        if not stub.exists():
            stub.symlink_to("libcuda.so")

    def ask(self, file: str) -> tuple[set[tuple[str, str]], set[str]]:
        """({(file, symbol)}, {library}) that the loader does not find for a file."""
        trace = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_WARN": "yes", "LD_BIND_NOW": "yes",
                 "LD_LIBRARY_PATH": self.path}  # fmt: skip
        argv: list[str | Path] = []
        if host_machine() != "aarch64":
            argv = ["qemu-aarch64-static", "-L", SYSROOT]
            argv += [a for k, v in trace.items() for a in ("-E", f"{k}={v}")]
        ld = SYSROOT / "lib/ld-linux-aarch64.so.1"
        output = proc.run([*argv, ld, self.site / file], check=False).output
        assert "=>" in output or "statically linked" in output, output[-2000:]
        found = {
            (Path(path).resolve().relative_to(self.site.resolve()).as_posix(), name or versioned)
            for name, versioned, path in _UNDEFINED.findall(output)
            if Path(path).resolve().is_relative_to(self.site.resolve())
        }
        return found, set(_NOT_FOUND.findall(output))


@pytest.fixture(scope="session")
def family(locked):
    names = ("torch", "apache-tvm-ffi", "z3-solver")
    everything = locked("family", "aarch64", None)
    return {n: p for n, p in everything.items() if n in names or n.startswith("nvidia-")}


@pytest.fixture(scope="session")
def base_site(family, tmp_path_factory):
    """torch 2.11.0 and all CUDA libraries, unpacked once (3 GB)."""
    site = tmp_path_factory.mktemp("site")
    unpack_libraries(family.values(), site)
    yield site
    shutil.rmtree(site)


CASES = [
    # wheel, instead of the family's, files to ask about (None: every one that can be loaded)
    ("torchvision==0.26.0", {}, None),
    ("torchaudio==2.11.0", {}, None),
    ("torchvision==0.24.1", {}, ["torchvision/_C.so"]),
    ("xgrammar==0.2.3", {}, None),
    ("tilelang==0.1.9", {}, ["tilelang/lib/libtilelang.so", "tilelang/lib/tilelang_cython_wrapper.abi3.so"]),
    ("tilelang==0.1.9", {"apache-tvm-ffi": "0.1.14.post1"}, ["tilelang/lib/libtilelang.so"]),
    ("vllm==0.26.0", {}, [
        "vllm/_C_stable_libtorch.abi3.so", "vllm/_qutlass_C.abi3.so", "vllm/cumem_allocator.abi3.so",
        "vllm/spinloop.abi3.so", "vllm/_rust_tool_parser.abi3.so",
        "vllm/third_party/deep_gemm/_C.cpython-312-aarch64-linux-gnu.so",
    ]),
    ("vllm==0.26.0", {"torch": "2.12.1"}, [
        "vllm/_qutlass_C.abi3.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/spinloop.abi3.so",
    ]),
    ("apache-tvm-ffi==0.1.9", {}, None),
    ("torch==2.11.0", {}, ["torch/_C.cpython-312-aarch64-linux-gnu.so", "torch/lib/libtorch_cuda_linalg.so"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("requirement", "instead", "files"), CASES,
    ids=[f"{c[0]}{'-' + '-'.join(f'{k}-{v}' for k, v in c[1].items()) if c[1] else ''}" for c in CASES],
)  # fmt: skip
def test_same_answer(
    requirement, instead, files, indexed, family, base_site, tools, tmp_path, layout
):
    wheel = indexed(requirement)
    name = requirement.partition("==")[0]
    swapped = {n: indexed(f"{n}=={v}") for n, v in instead.items()}
    around = [p for n, p in (family | swapped).items() if n != name]
    report = verify(
        [wheel],
        against=around,
        policy=load_policy(),
        target=TARGET,
        arch="12.1a",
        cache=layout.cache,
    )
    ours = {(s.needed_by, s.name) for s in report.open_symbols}
    libraries = {(b.file, n) for b in report.binaries for n in b.libraries}

    site = tmp_path / "site"
    site.mkdir()
    replaced = {"torch": "torch", "apache-tvm-ffi": "tvm_ffi"}
    gone = {replaced[n] for n in swapped}
    for entry in base_site.iterdir():
        if entry.name not in gone:
            # $ORIGIN follows the real path, so folders are hard-linked, not linked.
            shutil.copytree(
                entry, site / entry.name, copy_function=lambda a, b: Path(b).hardlink_to(a)
            )
    for folder in {wheel, *swapped.values()}:
        unpack_libraries([folder], tmp_path / "new")
    shutil.copytree(tmp_path / "new", site, dirs_exist_ok=True, copy_function=_replace)

    python = System.load(machine="aarch64", python="3.12", trusted={}).python
    loader = Loader(site, tools)
    asked = files or [b.file for b in report.binaries if b.loadable]
    assert asked
    judged = {b.file for b in report.binaries}
    for file in asked:
        theirs, missing = loader.ask(file)
        # Only of the judged wheel, and not what the interpreter has.
        theirs = {(f, s) for f, s in theirs if f in judged and s not in python}
        scope = {s for s in ours if s[0] == file or s[0] in {f for f, _ in theirs}}
        assert theirs == scope, file
        assert missing - {"libz.so.1"} == {n for f, n in libraries if f == file}, file
    if instead or requirement == "torchvision==0.24.1":
        assert ours, "this case is here because something is open"
    shutil.rmtree(tmp_path, ignore_errors=True)


def _replace(source, target):
    Path(target).unlink(missing_ok=True)
    shutil.move(source, target)
