"""The environment under test: what it has, and what is known to be wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121 import proc
from sm121.jit.verify import COMPILERS, Fault
from sm121.repair.installed import Environment, Installed, differing, family_members, read_installed
from sm121.rules.engine import evaluate
from sm121.rules.model import load_rules

# Published shapes, as the lock's transformers has them; without torch, so in a second.
_CONFIG = (
    "import json; from transformers.models.deepseek_v4.configuration_deepseek_v4 import "
    "DeepseekV4Config as C; d = C().to_dict(); d['qk_rope_head_dim'] = "
    "round(C.default_partial_rotary_factor * d['head_dim']); print('\\n' + json.dumps(d, default=str))"
)


def environment_faults(pins: Path, environment: Environment) -> list[Fault]:
    """Broken rules of pins/rules.toml, and files of CuTeDSL that are not their wheel's."""
    installed = read_installed(environment)
    findings = evaluate(load_rules(pins), family_members(environment, installed))
    faults = [
        Fault(
            distribution=found.distribution,
            text=f"{found.distribution}: found {found.found}, wanted {found.wanted}",
            symptom=found.symptom,
        )
        for found in findings
        if found.distribution.startswith(tuple(n for names in COMPILERS.values() for n in names))
        or found.rule.startswith(("cutedsl", "tvm", "cuda"))
    ]
    return faults + _mixed_files(environment, installed)


def _mixed_files(environment: Environment, installed: list[Installed]) -> list[Fault]:
    """libs-cu13 is the one whose files must all be its own (facts of 4.5.1: see docs/lock.md)."""
    for one in installed:
        if one.distribution == "nvidia-cutlass-dsl-libs-cu13":
            wrong = differing(environment, one.record)
            if wrong:
                return [
                    Fault(
                        distribution=one.distribution,
                        text=f"{one.distribution}: {len(wrong)} files are not its wheel's, e.g. "
                        f"{sorted(wrong)[0]}",
                        symptom="the CuTeDSL compiler ends with an internal error (ICE) that reads "
                        "as if the GPU were unsupported",
                    )
                ]
    return []


def versions(environment: Environment) -> dict[str, str]:
    """Of the distributions that JIT families are made of."""
    prefixes = tuple(n for names in COMPILERS.values() for n in names if n != "vllm")
    return {
        one.distribution: one.version
        for one in read_installed(environment)
        if one.distribution.startswith((*prefixes, "torch", "nvidia-nvvm"))
    }


def published_config(python: Path, log: Path) -> Mapping[str, Any]:
    """The model's config with its published defaults; {} if this environment can't say."""
    finished = proc.run([python, "-W", "ignore", "-c", _CONFIG], check=False)
    with log.open("a", encoding="utf-8") as file:
        file.write(finished.output + "\n")
    lines = [line for line in finished.output.splitlines() if line.startswith("{")]
    if finished.returncode != 0 or not lines:
        return {}
    found: dict[str, Any] = json.loads(lines[-1])
    return found
