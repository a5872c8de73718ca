"""Run FlashInfer's ninja files: our launcher before each compile, one ninja for all modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm121 import proc
from sm121.compile.build import diagnose
from sm121.compile.progress import NinjaProgress
from sm121.compile.records import (
    Record,
    known_costs,
    new_run,
    read_records,
    write_settings,
)
from sm121.errors import ToolFailed
from sm121.files import write_atomic
from sm121.jitcache.workshop import Spec, Workshop
from sm121.ui import Ui


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A module that is compiled. records: of the objects that this run compiled, none if it was
    up to date; what each cost, and whether the cache had it."""

    spec: Spec
    records: tuple[Record, ...]

    @property
    def library(self) -> Path:
        return self.spec.library


def compile_specs(
    workshop: Workshop, specs: Sequence[Spec], *, log: Path, ui: Ui
) -> list[Compiled]:
    """Compile what is not up to date, all modules together.

    Raises OutOfMemory, DiskFull, or ToolFailed with the compiler's own error lines; objects that
    are done stay.
    """
    run = new_run()
    costs = known_costs(read_records(workshop.costs.records))
    write_settings(
        workshop.costs, run=run, costs=costs, memory=workshop.jobs.memory,
        default=workshop.memory_per_job,
    )  # fmt: skip
    # As FlashInfer's build_jit_specs puts several together.
    together = workshop.folder / "modules.ninja"
    lines = ["ninja_required_version = 1.3", *(f"subninja {spec.ninja}" for spec in specs), ""]
    write_atomic(together, "\n".join(lines))
    workshop.ninja_folder.mkdir(exist_ok=True)
    said: list[str] = []
    with ui.progress("jit-cache") as progress:
        ninja = NinjaProgress(progress)

        def on_line(line: str) -> None:
            said.append(line)
            ninja(line)

        try:
            proc.run(
                [
                    workshop.tools.environment / "bin/ninja", "-C", workshop.ninja_folder,
                    "-f", together, "-j", str(workshop.jobs.count),
                ],
                env=workshop.environment, log=log, on_line=on_line,
            )  # fmt: skip
        except ToolFailed as failure:
            error = diagnose(said, failure, jobs=workshop.jobs.count, log=log)
            if type(error) is not ToolFailed:
                raise error from failure
            raise ToolFailed(
                "A FlashInfer module could not be compiled.",
                returncode=failure.returncode, tail=error.details, log=log, cause=error.cause,
                remedy="`--jit-cache none` builds without; FlashInfer then compiles on the node.",
            ) from failure  # fmt: skip
    done = read_records(workshop.costs.records, run=run)
    return [
        Compiled(spec=spec, records=tuple(r for r in done if r.object in spec.objects))
        for spec in specs
    ]
