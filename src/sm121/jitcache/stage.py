"""Stage `jit-cache`: FlashInfer's modules of this stack as a wheel."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm121.abi.gpu import Arch
from sm121.context import Context, Results
from sm121.errors import WheelFault
from sm121.fetch import Cache, fetch_locked
from sm121.files import sha256_text
from sm121.jitcache.build import Compiled, compile_specs
from sm121.jitcache.check import check_library, codes_of
from sm121.jitcache.prepare import flashinfer_files, open_workshop
from sm121.jitcache.wheel import member_of, unpack_package, wheel_name, write_wheel
from sm121.jitcache.workshop import Workshop
from sm121.lock.pylock import lock_path, locked_files, read_lock
from sm121.lock.resolve import lock_of
from sm121.pins.model import FLASHINFER, TVM_FFI, JitModule
from sm121.toolkit.stage import host_interpreter
from sm121.ui import human_bytes, human_seconds


def cache_version(context: Context) -> str:
    """'0.6.17+sm121.1a2b3c4d': FlashInfer's, as it demands, and a digest of what is in."""
    family = context.stack.family
    digest = sha256_text(
        _modules_digest(context.jit_modules),
        context.arch,
        *(f"{name}:{family[name].version}" for name in (FLASHINFER, TVM_FFI)),
        *(f"{name}:{version}" for name, version in sorted(context.stack.cuda.toolkit.items())),
    )
    # PEP 440 reads a part of digits only as a number and drops its leading zeros.
    start = next(i for i in range(56) if not digest[i : i + 8].isdigit())
    return f"{family[FLASHINFER].version}+sm121.{digest[start : start + 8]}"


def _modules_digest(modules: Mapping[str, JitModule]) -> str:
    return sha256_text(
        *(
            f"{name}:{module.model_dump_json(include={'generator', 'arguments', 'functions'})}"
            for name, module in sorted(modules.items())
        )
    )


class JitCacheStage:
    name = "jit-cache"

    def key(self, context: Context) -> str:
        return f"jit-cache/{context.key}"

    def dist(self, context: Context) -> Path:
        return context.layout.build / "dist" / f"{context.key}-jit-cache"

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        digests = results["patch"]["requirement_files"]
        for target in (context.runtime, host_interpreter(context)[1]):
            lock_of(context, "family", target, digests)
        return {
            "host environment": str(results["environment"]["fingerprint"]),
            "toolkit": str(results["toolkit"]["fingerprint"]),
            **{f"wheel {f.distribution}": f.sha256 for f in flashinfer_files(context)},
            **{
                f"module {name}": _modules_digest({name: module})
                for name, module in context.jit_modules.items()
            },
            "arch": context.arch,
            "version": cache_version(context),
            "release date": context.stack.vllm.date.isoformat(),
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        wheel = self.dist(context) / str(result["wheel"])
        return wheel.is_file() and context.memory.sha256(wheel) == result["sha256"]

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        modules, log = context.jit_modules, context.log(self.name)
        workshop = open_workshop(context)
        specs = workshop.write_specs(modules, log=log)
        context.ui.say(f"       modules     {', '.join(modules)}; {workshop.jobs.reason}")
        compiled = compile_specs(workshop, specs, log=log, ui=context.ui)
        _tell_cost(context, compiled)
        contents = {one.spec.name: one.library.read_bytes() for one in compiled}
        facts = checked(context, workshop, contents, modules)
        for spec in specs:
            facts[spec.name]["file"] = member_of(spec.inside)
        version = cache_version(context)
        machine = context.runtime.machine
        final = self.dist(context) / wheel_name(version, machine)
        write_wheel(
            final,
            {spec.inside: contents[spec.name] for spec in specs},
            version=version, machine=machine, arch=context.arch,
            requires=[
                f"{name}=={context.stack.family[name].version}" for name in (FLASHINFER, TVM_FFI)
            ],
            license_expression=workshop.license_expression,
            licenses={f.name: f.read_bytes() for f in workshop.licenses if f.is_file()},
            note={
                "schema_version": 1, "flashinfer": workshop.version, "arch": context.arch,
                "modules": facts,
            },
            epoch=int(context.stack.vllm.date.timestamp()),
        )  # fmt: skip
        require_found(workshop, final, modules, log=log)
        for old in self.dist(context).glob("*.whl"):
            if old != final:
                old.unlink()
        fetch_linked(context)
        context.ui.say(
            f"       wheel       {final.name} ({human_bytes(final.stat().st_size)}); FlashInfer "
            f"{workshop.version} finds its {len(modules)} module(s)"
        )
        return {
            "wheel": final.name,
            "sha256": context.memory.sha256(final),
            "version": version,
            "flashinfer": workshop.version,
            "modules": facts,
            "objects": sum(len(one.records) for one in compiled),
        }


def checked(
    context: Context, workshop: Workshop, contents: Mapping[str, bytes],
    modules: Mapping[str, JitModule],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Facts of each module's library for the manifest. Raises WheelFault listing every fault."""
    faults: list[str] = []
    facts: dict[str, dict[str, Any]] = {}
    for name, data in contents.items():
        binary, found = check_library(
            data, name, modules[name], machine=context.runtime.machine,
            arch=Arch.parse(context.arch),
            forbidden=[str(context.layout.build), str(context.layout.root)],
        )  # fmt: skip
        faults += found
        facts[name] = {
            "bytes": len(data),
            "codes": codes_of(binary),
            "needed": list(binary.elf.needed) if binary.elf else [],
        }
    if faults:
        raise WheelFault(
            f"FlashInfer's modules have {len(faults)} fault(s).", details=faults,
            remedy=f"No wheel was made of them; they lie in {workshop.folder}.",
        )  # fmt: skip
    return facts


def require_found(
    workshop: Workshop, wheel: Path, modules: Mapping[str, JitModule], *, log: Path
) -> None:
    """Let FlashInfer's own code look for each module in the finished wheel's package.

    Raises CheckFailed if it refuses the package, WheelFault if it finds a module not.
    """
    with tempfile.TemporaryDirectory(dir=workshop.folder) as scratch:
        package = unpack_package(wheel, Path(scratch))
        found = workshop.find(modules, package=package, log=log)
        lacking = [
            f"{name}: looked for {facts['inside']} in {facts['folder']}"
            for name, facts in found.items()
            if not facts["found"] or not Path(facts["folder"]).is_relative_to(package)
        ]
    if lacking:
        wheel.unlink()
        raise WheelFault(
            f"FlashInfer {workshop.version} does not find what is in {wheel.name}.",
            details=lacking,
            cause="its rule for modules made ahead of time is another one (docs/jit-cache.md)",
            remedy="`--jit-cache none` builds without; FlashInfer then compiles on the node.",
        )


def fetch_linked(context: Context) -> None:
    """Bring the target's tvm-ffi into the cache: whose symbols the modules need, for `verify`."""
    path = lock_path(context.layout.pins, context.stack_name, "family", context.runtime)
    fetch_locked(
        [f for f in locked_files(read_lock(path), context.runtime) if f.distribution == TVM_FFI],
        target=context.runtime, cache=Cache(context.layout.cache, context.memory),
        offline=context.options.offline, ui=context.ui,
    )  # fmt: skip


def _tell_cost(context: Context, compiled: Sequence[Compiled]) -> None:
    records = [record for one in compiled for record in one.records]
    hits = sum(record.cache == "hit" for record in records)
    cpu = sum(record.cpu for record in records)
    largest = max((record.rss for record in records), default=0)
    context.ui.say(
        f"       objects     {len(records)} compiled, {human_seconds(cpu)} of CPU, largest process "
        f"{human_bytes(largest)}; from the compiler cache: {hits}"
        if records
        else "       objects     0 compiled"
    )


def left_to_compile(context: Context) -> dict[str, str]:
    """Modules that are not in this build's cache and why: FlashInfer compiles them where it runs."""
    pin = context.stack.jit_cache
    if pin is None:
        return {}
    made = context.jit_modules
    missing = {} if made else dict.fromkeys(pin.modules, "no JIT cache in this build")
    return missing | {n: m.reason for n, m in pin.left_out.items() if n not in made}
