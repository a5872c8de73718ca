"""Make a workshop: what FlashInfer's generators and its ninja files need on the build host."""

from __future__ import annotations

import os
from pathlib import Path

from sm121.compile import launcher
from sm121.compile.jobs import choose_jobs, usable_cores
from sm121.compile.launching import cost_folder
from sm121.compile.memory import available_memory
from sm121.compile.records import CostFolder
from sm121.compile.stage import make_tools
from sm121.compile.toolchain import (
    Tools,
    cache_environment,
    compiler_cache,
    prefix_flags,
    prefix_maps,
    system_path,
)
from sm121.context import Context
from sm121.errors import LockStale, UsageFault
from sm121.fetch import Cache, fetch_locked
from sm121.files import fresh_directory, remove_tree, sha256_text
from sm121.jitcache.workshop import Workshop
from sm121.lock.pylock import LockedFile, lock_path, locked_files, read_lock
from sm121.pins.model import FLASHINFER, TVM_FFI, JitCachePin
from sm121.proc import pasteable
from sm121.toolkit.stage import COMPLETE, ToolkitStage, host_interpreter
from sm121.toolkit.unpack import unpack_all


def jit_cache_pin(context: Context) -> JitCachePin:
    """Raises UsageFault for a stack that lists no modules."""
    if context.stack.jit_cache is None:
        raise UsageFault(
            f"Stack {context.stack_name} lists no FlashInfer modules.",
            cause="its stack.toml has no [jit-cache]",
            remedy="Leave --jit-cache out, or use another --stack.",
        )
    return context.stack.jit_cache


def flashinfer_files(context: Context) -> list[LockedFile]:
    """FlashInfer and what importing it needs beside the host's lock, for the build host.

    From the family's lock of the build host's platform and Python: what runs there is what is
    compiled here. Raises LockStale if that lacks one.
    """
    _, host = host_interpreter(context)
    path = lock_path(context.layout.pins, context.stack_name, "family", host)
    locked = {f.distribution: f for f in locked_files(read_lock(path), host)}
    wanted = [FLASHINFER, TVM_FFI, *jit_cache_pin(context).imports]
    if lacking := [name for name in wanted if name not in locked]:
        raise LockStale(
            f"{path.name} has no {', '.join(lacking)}.",
            cause="stack.toml, jit-cache.imports, asks for it",
            remedy="Correct stack.toml, or run `nox -s lock`.",
        )
    return [locked[name] for name in wanted]


def jit_cost_folder(context: Context) -> CostFolder:
    """What objects of these modules cost, in all builds of this stack and target in this folder."""
    return CostFolder(folder=cost_folder(context).folder / "flashinfer")


def open_workshop(context: Context) -> Workshop:
    """Make what is missing of it; the stages `environment` and `toolkit` must have run.

    Raises UsageFault if they have not, NetworkFault if something can't be fetched.
    """
    pin, tools, files = jit_cache_pin(context), make_tools(context), flashinfer_files(context)
    toolkit = ToolkitStage().folder(context) / COMPLETE
    if not toolkit.is_file() or not (tools.environment / COMPLETE).is_file():
        raise UsageFault(
            "There is no toolkit to compile FlashInfer's modules with.",
            remedy=f"`nox -s build -- --profile {context.options.profile} --target "
            f"{context.options.target}` makes it.",
        )
    # Not the digest of ours: a reworded comment shall not compile anything.
    identity = sha256_text(
        toolkit.read_text(), tools.python_version, context.arch, *(f.sha256 for f in files)
    )[:8]
    work = context.layout.build / "work" / context.key
    folder = work / f"flashinfer-{identity}"
    for other in work.glob("flashinfer-*"):
        if other != folder:
            remove_tree(other)
    site = folder / "site"
    _fill(context, site, files)
    jobs = choose_jobs(
        asked=context.options.jobs, cores=usable_cores(), available=available_memory()
    )
    costs = jit_cost_folder(context)
    return Workshop(
        folder=folder, site=site, tools=tools, arch=context.arch, jobs=jobs, costs=costs,
        version=next(f.version for f in files if f.distribution == FLASHINFER),
        memory_per_job=int(pin.memory_per_job_gib * (1 << 30)),
        environment=_environment(context, tools, folder=folder, site=site, costs=costs),
    )  # fmt: skip


def _fill(context: Context, site: Path, files: list[LockedFile]) -> None:
    content = sha256_text(*(f.sha256 for f in files))
    marker = site / COMPLETE
    if marker.is_file() and marker.read_text() == content:
        return
    _, host = host_interpreter(context)
    paths = fetch_locked(
        files, target=host, cache=Cache(context.layout.cache, context.memory),
        offline=context.options.offline, ui=context.ui,
    )  # fmt: skip
    with fresh_directory(site) as fresh:
        unpack_all(paths.values(), fresh, lambda name: name)
        (fresh / COMPLETE).write_text(content)


def _environment(
    context: Context, tools: Tools, *, folder: Path, site: Path, costs: CostFolder
) -> dict[str, str]:
    """FlashInfer's own variables (jit/cpp_ext.py, jit/env.py, compilation_context.py) and ours."""
    path = os.pathsep.join(
        [
            str(tools.environment / "bin"),
            str(tools.cuda / "bin"),
            *system_path(os.environ.get("PATH", "")),
        ]
    )
    maps = prefix_maps(
        {
            tools.cuda: "cuda", tools.python_include: "python", site: "site", folder: "build",
        },
        ninja_tree=folder,
    )  # fmt: skip
    options = prefix_flags(maps)
    replaced = [f"{old}={new}" for old, new in maps.items() if not Path(old).is_absolute()]
    cache = [found] if (found := compiler_cache(path)) else []
    launch = pasteable([tools.environment / "bin/python", "-IS", launcher.__file__, *cache])
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    return {
        "PATH": path,
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "CUDA_HOME": str(tools.cuda),
        # nvcc's -ccbin.
        "CC": str(tools.compilers.cxx),
        # As Debian's GCC has it by default; its place in FlashInfer's rule is before the libraries.
        "CXX": f"{tools.compilers.cxx} -Wl,--as-needed",
        "FLASHINFER_CUDA_ARCH_LIST": context.arch,
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_CXX_LAUNCHER": launch,
        "FLASHINFER_NVCC_LAUNCHER": launch,
        "FLASHINFER_EXTRA_CFLAGS": " ".join(options),
        "FLASHINFER_EXTRA_CUDAFLAGS": " ".join(f"-Xcompiler={option}" for option in options),
        "FLASHINFER_EXTRA_LDFLAGS": "-Wl,-s,--build-id=sha1",
        "FLASHINFER_LOGGING_LEVEL": "warning",
        # tvm-ffi would compile a helper for torch when it is imported.
        "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
        "NINJA_STATUS": "[sm121 %f/%t] ",
        "SOURCE_DATE_EPOCH": str(int(context.stack.vllm.date.timestamp())),
        "PYTHONHASHSEED": "0",
        "SM121_LAUNCH": str(costs.settings),
        **cache_environment(context.layout.cache / "ccache", context.layout.build, replaced),
    }
