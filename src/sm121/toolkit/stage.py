"""Stages `environment` (the build host's Python) and `toolkit` (CUDA and torch of the target)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.context import Context, Results
from sm121.errors import UsageFault
from sm121.fetch import Cache, fetch_locked
from sm121.files import fresh_directory, write_atomic
from sm121.lock.pylock import LockedFile, Target, lock_path, locked_files
from sm121.lock.resolve import lock_of
from sm121.state import fingerprint
from sm121.toolkit import cuda
from sm121.toolkit.deepgemm import COMPONENT as DEEPGEMM
from sm121.toolkit.deepgemm import deepgemm_python
from sm121.toolkit.machine import find_compilers, host_machine, require_programs
from sm121.toolkit.python import (
    Interpreter,
    cross_headers,
    find_interpreter,
    make_environment,
)
from sm121.toolkit.unpack import unpack_all

# Written last, with the digest of what the folder was made from: one that was made from
# something else, or not to its end, is not taken for the one that is wanted.
COMPLETE = "sm121-complete"


def is_complete(folder: Path, result: Mapping[str, Any]) -> bool:
    marker = folder / COMPLETE
    return marker.is_file() and marker.read_text() == result.get("content")


def host_interpreter(context: Context) -> tuple[Interpreter, Target]:
    """The Python that the host's environment is made of, and the platform it stands for."""
    name = f"linux-{host_machine()}"
    if name not in context.stack.targets:
        raise UsageFault(
            f"This stack can't be built on {name}.",
            cause=f"stack.toml lists {', '.join(context.stack.targets)}",
        )
    pin = context.stack.targets[name]
    interpreter = find_interpreter(pin.pythons)
    return interpreter, Target.make(name, python=interpreter.version, glibc=pin.glibc)


def host_lock_files(
    context: Context, target: Target, digests: Mapping[str, str]
) -> list[LockedFile]:
    """Files of the checked lock of what builds."""
    lock = lock_of(context, "host", target, digests)
    return list(locked_files(lock, target))


def of_toolkit(file: LockedFile) -> bool:
    """Is it of the target's toolkit: what is linked against, but never run here?"""
    return file.distribution == "torch" or file.distribution.startswith("nvidia-")


def _lock_digest(context: Context, target: Target) -> str:
    return context.memory.sha256(lock_path(context.layout.pins, context.stack_name, "host", target))


class EnvironmentStage:
    name = "environment"

    def key(self, context: Context) -> str:
        return f"environment/{context.stack_name}"

    def folder(self, context: Context) -> Path:
        return context.layout.build / "env" / context.stack_name

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        interpreter, target = host_interpreter(context)
        host_lock_files(context, target, results["patch"]["requirement_files"])
        return {
            f"lock host-{target.tag}": _lock_digest(context, target),
            "Python": f"{interpreter.full} {interpreter.executable}",
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        return is_complete(self.folder(context), result)

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        # Not only when it is needed: minutes of downloads lie between.
        require_programs(context.stack.host.programs)
        if DEEPGEMM in context.profile.components:
            deepgemm_python(context)
        interpreter, target = host_interpreter(context)
        files = host_lock_files(context, target, results["patch"]["requirement_files"])
        paths = fetch_locked(
            files,
            target=target,
            cache=Cache(context.layout.cache, context.memory),
            offline=context.options.offline,
            ui=context.ui,
        )
        make_environment(
            self.folder(context), interpreter, list(paths.values()), log=context.log(self.name)
        )
        content = fingerprint(self.inputs(context, results))
        write_atomic(self.folder(context) / COMPLETE, content)
        versions = {f.distribution: f.version for f in files}
        return {
            "content": content,
            "python": interpreter.full,
            "tools": {
                name: versions[name]
                for name in (
                    "cmake",
                    "ninja",
                    "setuptools",
                    "setuptools-scm",
                    "torch",
                    "nvidia-cuda-nvcc",
                )
            },
        }


class ToolkitStage:
    name = "toolkit"

    def key(self, context: Context) -> str:
        return f"toolkit/{context.key}"

    def folder(self, context: Context) -> Path:
        return context.layout.build / "toolkit" / context.key

    def machine(self, context: Context) -> str:
        return context.runtime.machine

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        interpreter, host = host_interpreter(context)
        compilers = find_compilers(self.machine(context))
        inputs = {
            f"lock host-{host.tag}": _lock_digest(context, host),
            f"lock host-{context.runtime.tag}": _lock_digest(context, context.runtime),
            "compiler": f"{compilers.cxx.name} {compilers.version}",
            "compiler programs": " ".join(
                f"{path} {context.memory.sha256(path)}" for path in (compilers.cc, compilers.cxx)
            ),
            "C library headers": compilers.libc,
        }
        if self.machine(context) != host_machine():
            inputs["Python headers"] = f"{interpreter.full} {interpreter.include}"
        return inputs

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        return is_complete(self.folder(context), result)

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        log = context.log(self.name)
        interpreter, host = host_interpreter(context)
        machine = self.machine(context)
        native = machine == host_machine()
        compilers = find_compilers(machine)
        digests = results["patch"]["requirement_files"]
        host_files = host_lock_files(context, host, digests)
        target_files = (
            host_files
            if native
            else [
                file
                for file in host_lock_files(context, context.runtime, digests)
                if of_toolkit(file)
            ]
        )
        cache = Cache(context.layout.cache, context.memory)
        fetched = [
            fetch_locked(
                files, target=target, cache=cache, offline=context.options.offline, ui=context.ui
            )
            for files, target in ((host_files, host), (target_files, context.runtime))
        ]
        with fresh_directory(self.folder(context)) as fresh:
            stub = cuda.assemble(
                fresh / "cuda",
                host_wheels=list(fetched[0].values()),
                target_wheels=list(fetched[1].values()),
                machine=machine,
                compilers=compilers,
                log=log,
            )
            unpack_all(
                [path for path in fetched[1].values() if path.name.startswith("torch-")],
                fresh / "site",
                _torch_member,
            )
            if not native:
                cross_headers(interpreter, fresh / "python", compilers, log=log)
            content = fingerprint(self.inputs(context, results))
            (fresh / COMPLETE).write_text(content)
        return {
            "native": native,
            "compiler": f"{compilers.cxx.name} {compilers.version}",
            "stub_names": len(stub),
            "content": content,
        }


def _torch_member(name: str) -> str | None:
    """Of torch's wheel, what compiling and linking need."""
    wanted = ("torch/include/", "torch/lib/", "torch/share/", "torch/version.py")
    return name if name.startswith(wanted) else None
