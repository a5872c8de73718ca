"""Run recipes, one after another, in the environment under test; one JSON line per event.

    python work.py JOB.json

JOB.json: tree (folder that holds vllm/), mode (a family), recipes (names), shapes, out (file that
the lines are appended to), cubins (folder), seconds (for one recipe), arch ('12.1a'), modules
(FlashInfer's, by recipe).
Events: {"begin": recipe}, a record of catch.py with "recipe", {"launches": ...} with "recipe" (of all
its records: modules.py), {"end": recipe, "error": ...}.
A recipe that does not end in time ends the process with its stack: the parent goes on behind it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any


def bare_package(name: str, tree: Path) -> None:
    """A package whose __init__ is not run: it would import the whole model."""
    module = types.ModuleType(name)
    module.__path__ = [str(tree / name.replace(".", "/"))]
    sys.modules[name] = module


def main(job_file: str) -> int:
    job = json.loads(Path(job_file).read_text())
    tree, cubins = Path(job["tree"]), Path(job["cubins"])
    here = str(Path(__file__).parent)
    sys.path[:0] = [str(tree), here]
    dump = cubins / f"dump-{os.getpid()}"
    dump.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_KEEP_PTX="1", CUTE_DSL_DUMP_DIR=str(dump),
        CUTE_DSL_CACHE_DIR=str(dump), CUTE_DSL_NO_CACHE="1",
        FLASHINFER_CUDA_ARCH_LIST=job["arch"], FLASHINFER_WORKSPACE_BASE=str(cubins / "flashinfer"),
        FLASHINFER_LOGGING_LEVEL="warning", DG_JIT_CACHE_DIR=str(cubins / "deepgemm"), DG_JIT_USE_NVRTC="0", DG_JIT_PTXAS_VERBOSE="1",
        # Else its host library asks for device memory when it begins.
        DG_USE_PYTORCH_CUBLASLT_HANDLE="1", DG_USE_TEMP_CUBLASLT_WORKSPACE="1",
        TRITON_CACHE_DIR=str(cubins / "triton"), TILELANG_DISABLE_CACHE="1",
        TILELANG_CACHE_DIR=str(cubins / "tilelang"), TILELANG_PRINT_ON_COMPILATION="0",
        # Triton's process does without: what is common is the same, and fallbacks are reached.
        VLLM_DISABLE_CUTEDSL="1" if job["mode"] == "triton" else "0",
    )  # fmt: skip

    out = Path(job["out"])

    def tell(event: dict[str, Any]) -> None:
        # Opened each time: a compiler that crashes takes no line with it.
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, default=str) + "\n")

    tell({"begin": "imports"})
    faulthandler.dump_traceback_later(job["seconds"], exit=True)
    try:
        pretend = importlib.import_module("pretend")
        pretend.environment(job["arch"])
        pretend.gb10()
        pretend.platform()
        bare_package("vllm.models.deepseek_v4", tree)
        bare_package("vllm.models.deepseek_v4.nvidia", tree)
        catch = importlib.import_module("catch")
        calls = importlib.import_module("calls")
        for part in ("attention", "moe", "mhc", "deepgemm"):
            importlib.import_module(f"calls_{part}")
        current = {"recipe": ""}
        outputs = catch.Outputs(cubins)

        def report(record: dict[str, Any]) -> None:
            tell({**current, "mode": job["mode"], **record})

        mode = job["mode"]
        if mode == "deepgemm":
            catch.catch_deepgemm(report, outputs, dump)
        # TileLang's import may abort, CuTeDSL's may crash: each in its own process.
        catch.catch_triton(report, outputs)
        if mode == "cutedsl":
            catch.catch_cutedsl(report, outputs, dump)
        if mode == "tilelang":
            catch.catch_tilelang(report, outputs)
        run = calls.RECIPES
        shapes = calls.Shapes(**job["shapes"])
        if job["mode"] == "flashinfer":
            modules = importlib.import_module("modules")
            run = {
                name: lambda shapes, name=name, module=module: modules.compile_module(
                    name, module, shapes, report, outputs
                )
                for name, module in job["modules"].items()
            }
    except BaseException as error:
        tell(
            {
                "end": "imports",
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(),
            }
        )
        return 1
    tell({"end": "imports", "error": ""})
    for name in job["recipes"]:
        tell({"begin": name})
        current["recipe"] = name
        faulthandler.dump_traceback_later(job["seconds"], exit=True)
        said, trace = "", ""
        try:
            run[name](shapes)
        except BaseException as problem:
            said, trace = f"{type(problem).__name__}: {problem}", traceback.format_exc()
        tell({"end": name, "error": said, "trace": trace})
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    # Not sys.exit: CuTeDSL's and TVM's finalizers look for a GPU.
    code = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
