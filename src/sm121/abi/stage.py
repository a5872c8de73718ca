"""Stage `verify`: the end of a build. Whoever has a wheelhouse has seen that it fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm121.abi.inputs import manifest_beside
from sm121.abi.page import to_html
from sm121.abi.policy.load import DEFAULT, load_policy
from sm121.abi.proof import Job, find_interpreter, job_driver, prove
from sm121.abi.report import Report, to_json
from sm121.abi.table import fits, how_run, render_table
from sm121.context import Context, Results
from sm121.errors import AbiFault
from sm121.files import sha256_file, sha256_text, write_atomic
from sm121.jit.last import last_file, read_last
from sm121.jit.page import in_verify_abi
from sm121.jit.recipes import has_recipes
from sm121.lock.pylock import lock_path
from sm121.rules.model import FILE as RULES

_DATA = (".toml", ".json")


class VerifyStage:
    name = "verify"

    def key(self, context: Context) -> str:
        return f"verify/{context.key}-{context.options.profile}"

    def report(self, context: Context, suffix: str) -> Path:
        name = f"{context.key}-{context.options.profile}"
        return context.layout.build / "reports" / f"{name}.{suffix}"

    def job(self, context: Context) -> Job:
        return Job(
            layout=context.layout, stack_name=context.stack_name, stack=context.stack,
            target=context.runtime, arch=context.arch, policy=load_policy(),
            memory=context.memory, ui=context.ui, targets=(context.layout.wheelhouse,),
            pythons=tuple(context.stack.targets[context.options.target].pythons),
        )  # fmt: skip

    def inputs(self, context: Context, results: Results) -> Mapping[str, str]:
        lock = lock_path(context.layout.pins, context.stack_name, "family", context.runtime)
        job = self.job(context)
        python = find_interpreter(job)
        return {
            "wheelhouse": str(results["wheelhouse"]["manifest"]),
            "policy": sha256_text(
                *(sha256_file(f) for f in sorted(DEFAULT.parent.iterdir()) if f.suffix in _DATA)
            ),
            "family rules": context.memory.sha256(context.layout.pins / RULES),
            "lock of what is around it": context.memory.sha256(lock),
            "Python that runs it": python if isinstance(python, str) else python.identity,
            "the GPU's driver": "" if isinstance(python, str) else job_driver(job, python),
            "what verify-jit found": sha256_text(jit_section(job)),
        }

    def standing(self, context: Context, result: Mapping[str, Any]) -> bool:
        try:
            text = self.report(context, "json").read_text("utf-8")
        except OSError:
            return False
        return sha256_text(text) == result["report"] and self.report(context, "html").is_file()

    def run(self, context: Context, results: Results) -> Mapping[str, Any]:
        """Raises AbiFault, with the report written and its table printed."""
        report = prove(self.job(context))
        text, page = to_json(report), self.report(context, "html")
        write_atomic(self.report(context, "json"), text)
        write_atomic(page, to_html(report, jit=jit_section(self.job(context))))
        lines = render_table(report)
        with context.log(self.name).open("a", encoding="utf-8") as log:
            log.write("\n".join(lines) + "\n")
        if report.result != "pass":
            for line in lines:
                context.ui.say(f"       {line}".rstrip())
            require(report, where=str(page))
        return {"report": sha256_text(text), "verdict": report.result, "summary": summary(report)}


def jit_section(job: Job) -> str:
    """HTML: the last verify-jit of the source that the judged wheelhouse was made of, or why none
    can be shown."""
    manifest = manifest_beside(job.targets)
    last = read_last(last_file(job.layout.build, job.stack_name))
    return in_verify_abi(
        last, commit=manifest.patched_commit if manifest else "",
        without="" if has_recipes(job.layout.pins, job.stack_name) else job.stack_name,
    )  # fmt: skip


def summary(report: Report) -> str:
    """One line for the end of a build."""
    binaries = sum(wheel.binaries for wheel in report.wheels)
    symbols = sum(wheel.symbols for wheel in report.wheels)
    ran = how_run(report) or "; ".join(
        f"{one.check} not run: {one.reason}" for one in report.not_run if one.check == "imports"
    )
    return f"{fits(report)} ({binaries} files, {symbols} symbols); {ran}"


def require(report: Report, *, where: str) -> None:
    """Raise AbiFault if the report has faults. where: the written report, if there is one."""
    if report.result == "pass":
        return
    kinds = sorted({fault.kind for fault in report.faults})
    raise AbiFault(
        f"verify-abi found {len(report.faults)} fault(s): {', '.join(kinds)}.",
        cause="each is explained above" + (f" and in {where}" if where else ""),
        remedy="docs/verify-abi.md explains each check; exceptions belong into its policy, with a "
        "reason.",
    )
