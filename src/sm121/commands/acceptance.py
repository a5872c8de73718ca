"""`acceptance`: every step that needs two Sparks, run once, with a table of what was seen."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from sm121.acceptance import service, steps
from sm121.acceptance.model import Acceptance, NotRun, Result, StepFailed, Verdict, table, to_json
from sm121.acceptance.places import places_of
from sm121.acceptance.steps import Bench
from sm121.commands.common import add_json_option, add_stack_option, give_json, layout_of
from sm121.errors import CheckFailed, EnvironmentFault, Sm121Error
from sm121.gitcommand import head_of
from sm121.pins.load import default_stack
from sm121.serve.load import load_serve
from sm121.serve.nodes import load_nodes
from sm121.sync.hosts import Way, has_address
from sm121.ui import Ui

Step = tuple[str, str, Callable[[], str]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=Path, required=True, metavar="FILE",
        help="the two nodes (docs/serve.md); this machine must be its head",
    )  # fmt: skip
    parser.add_argument("--wheelhouse", type=Path, metavar="DIR", help="what to sync (default: wheelhouse/)")  # fmt: skip
    parser.add_argument(
        "--no-service", action="store_true", help="leave the services alone: start, answer and restart nothing",
    )  # fmt: skip
    parser.add_argument(
        "--start-minutes", type=float, default=40, metavar="N",
        help="how long a start may take (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--ssh-config", type=Path, metavar="FILE", help="instead of ~/.ssh/config")
    add_stack_option(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Run all steps, whatever becomes of one. Prints the table. Raises CheckFailed if a step
    failed, else EnvironmentFault if one was not run."""
    nodes = load_nodes(arguments.nodes)
    layout = layout_of(arguments)
    stack = arguments.stack or default_stack(layout.pins)
    port = load_serve(layout.pins, stack).arguments.master_port.value
    scratch = layout.build / "acceptance"
    scratch.mkdir(parents=True, exist_ok=True)
    log = layout.log / "acceptance.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    ssh_config = arguments.ssh_config and arguments.ssh_config.absolute()
    head, worker = places_of(nodes, way=Way(config=ssh_config), log=log)
    bench = Bench(
        nodes=nodes, head=head, worker=worker, stack=stack, wheelhouse=layout.wheelhouse,
        root=layout.root, scratch=scratch, port=port + 2, nodes_file=arguments.nodes.absolute(),
        ssh_config=ssh_config,
    )  # fmt: skip
    limit = arguments.start_minutes * 60
    results = []
    for what, where, step in all_steps(bench, limit=limit, services=not arguments.no_service):
        result = run_step(what, where, step)
        colour = {"pass": "green", "fail": "red", "not run": "yellow"}[result.verdict]
        ui.say(f"{ui.style(f'{result.verdict:>8}', colour)}  {what} ({where}): {result.figures}")
        results.append(result)
    acceptance = Acceptance(
        schema_version=1, stack=stack, commit=head_of(layout.root),
        date=datetime.now(UTC).strftime("%Y-%m-%d"), results=tuple(results),
    )  # fmt: skip
    if arguments.json:
        give_json(arguments, ui, to_json(acceptance))
    else:
        ui.result(table(acceptance))
    ui.say(f"Every command and its output: {log}")
    failed, missing = acceptance.count("fail"), acceptance.count("not run")
    details = [f"{r.step} ({r.where}): {r.figures}" for r in results if r.verdict != "pass"]
    if failed:
        raise CheckFailed(
            f"{failed} step(s) failed, {missing} not run.", details=details,
            remedy=f"Every command and its output: {log}; then run the same command again.",
        )  # fmt: skip
    if missing:
        raise EnvironmentFault(
            f"No step failed, but {missing} could not be run here.", details=details,
            remedy="Provide what each lacks (docs/acceptance.md), and run the same command again.",
        )  # fmt: skip
    return 0


def all_steps(bench: Bench, *, limit: float, services: bool) -> list[Step]:
    """What, where, how; in their order."""
    a, b = bench.nodes.head.name, bench.nodes.worker.name
    if not has_address(bench.nodes.head.address):
        a = f"this machine, which is not {a} (no {bench.nodes.head.address})"
    both = f"{a} and {b}"

    def leave() -> str:
        raise NotRun("--no-service")

    def with_service(step: Callable[[], str]) -> Callable[[], str]:
        return step if services else leave

    return [
        ("`doctor --for run`", a, lambda: steps.doctor(bench)),
        ("`sync`, then again", both, lambda: steps.sync(bench)),
        ("`sync --compare` (doctor's facts of both)", both, lambda: steps.compare(bench)),
        ("every extension imports, real driver", a, lambda: steps.extensions(bench.head)),
        ("every extension imports, real driver", b, lambda: steps.extensions(bench.worker)),
        ("`verify-abi --env`", a, lambda: steps.verify_abi(bench)),
        ("NCCL all-reduce between the nodes", both, lambda: steps.all_reduce(bench)),
        ("service: start", both, with_service(lambda: service.start(bench, limit=limit))),
        ("service: a completion", a, with_service(lambda: service.completion(bench))),
        ("service: restarts in any order", both, with_service(lambda: service.restarts(bench, limit=limit))),
        ("`sync --rollback`, and back", both, lambda: steps.rollback(bench)),
    ]  # fmt: skip


def run_step(what: str, where: str, step: Callable[[], str]) -> Result:
    """Run one step. What a node or a tool does wrong is its result: the steps before it, and the
    table, must not be lost (a service's start alone takes many minutes)."""
    begun = time.monotonic()
    verdict: Verdict = "pass"
    try:
        figures = step()
    except NotRun as error:
        verdict, figures = "not run", str(error)
    except StepFailed as error:
        verdict, figures = "fail", str(error)
    except Sm121Error as error:
        verdict, figures = "fail", f"{error.what} {error.cause}".strip()
    except (OSError, ValueError, LookupError) as error:  # a node said something unexpected
        verdict, figures = "fail", f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - begun, 3)
    return Result(step=what, where=where, verdict=verdict, figures=figures, seconds=seconds)
