"""`verify-target`: install a wheelhouse and import it, by the target's own Python."""

from __future__ import annotations

import argparse
from pathlib import Path

from sm121 import cli
from sm121.abi.policy.load import load_policy
from sm121.abi.proof import Job, driver_stub
from sm121.commands.common import add_json_option, give_json, layout_of
from sm121.context import Context, Options
from sm121.errors import CheckFailed, EnvironmentFault, UsageFault
from sm121.files import HashMemory
from sm121.layout import Layout
from sm121.lock.pylock import Target
from sm121.pins.load import load_stack
from sm121.state import exclusive
from sm121.target.compare import compare_wheels
from sm121.target.image import DOCKERFILE, write_context
from sm121.target.model import to_json
from sm121.target.native import build_natively
from sm121.target.place import Place, find_place
from sm121.target.root import DEBIAN
from sm121.target.run import Run
from sm121.target.steps import STEPS
from sm121.target.table import show
from sm121.ui import Ui
from sm121.wheelhouse.manifest import Manifest, load_manifest


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "wheelhouse", nargs="?", type=Path, metavar="DIR", help="default: wheelhouse/"
    )
    parser.add_argument(
        "--build", action="store_true",
        help="run `nox -s build -- --profile smoke` first, into DIR: one command from a clean clone",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="only checksums, verify-abi, torch and torchvision"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="STEP", choices=[s.name for s in STEPS],
        help=f"only this step and those before it that it needs: {', '.join(s.name for s in STEPS)}",
    )  # fmt: skip
    parser.add_argument(
        "--fetch", action="store_true",
        help="download what the cache lacks of what is around a wheelhouse without dependencies",
    )  # fmt: skip
    parser.add_argument(
        "--stub", type=Path, metavar="FILE",
        help="libcuda's stand-in where there is no driver (default: the toolkit's, if a build made it)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=Path, metavar="FOLDER",
        help="instead: write the build context of Dockerfile.verify, with the wheelhouse, to FOLDER",
    )  # fmt: skip
    parser.add_argument(
        "--image-python", metavar="X.Y",
        help="of --context: the CPython of the base image (default: the wheelhouse's)",
    )  # fmt: skip
    parser.add_argument(
        "--native-build", action="store_true",
        help="instead: run `nox -s build -- --profile smoke` in a root of linux-aarch64, as on a "
        "Spark, and compare its wheel with the one of DIR; about half an hour when emulated",
    )  # fmt: skip
    add_json_option(parser, " (write DIR first, or --json=FILE)")


def run(arguments: argparse.Namespace, ui: Ui) -> int:
    """Follow the list, print the table, write the report. Raises CheckFailed if a step failed,
    EnvironmentFault if nothing could be run."""
    layout = layout_of(arguments)
    _refuse_what_goes_by(arguments)
    if arguments.native_build:
        with exclusive(layout.build, "nox -s verify-target -- --native-build"):
            return _native_build(layout, arguments.wheelhouse or layout.wheelhouse, ui)
    house = (arguments.wheelhouse or layout.wheelhouse).resolve()
    if arguments.build:
        cli.run(["build", "--profile", "smoke", "--wheelhouse", str(house)], ui)
    manifest = _manifest(house)
    if arguments.context:
        return _context(layout, house, manifest, arguments, ui)
    folder = layout.build / "target"
    with exclusive(layout.build, "nox -s verify-target"):
        report = prepare(
            layout, house, manifest, folder, ui, fetch=arguments.fetch, quick=arguments.quick,
            only=tuple(arguments.only), stub=arguments.stub,
        ).all()  # fmt: skip
    show(ui, report)
    give_json(arguments, ui, to_json(report))
    if report.faults:
        raise CheckFailed(
            f"The wheelhouse did not pass: {', '.join(row.step for row in report.faults)}.",
            cause="each is explained above",
            remedy=f"Whole output of each step: {layout.log / 'target'}",
        )
    if report.no_environment:
        raise EnvironmentFault(
            "Nothing of the wheelhouse was run: there is no environment of it.",
            cause=report.no_environment,
            remedy="`nox -s verify-abi` is for reading alone; docs/verify.md says what running takes.",
        )
    return 0


def prepare(
    layout: Layout, house: Path, manifest: Manifest, folder: Path, ui: Ui, *, fetch: bool,
    quick: bool, only: tuple[str, ...], stub: Path | None = None,
) -> Run:  # fmt: skip
    """A run over that wheelhouse, by its own stack, target and Python."""
    stack = load_stack(layout.pins, manifest.stack)
    if manifest.target not in stack.targets:
        raise UsageFault(f"Stack {manifest.stack} has no target {manifest.target!r}.")
    pin = stack.targets[manifest.target]
    memory = HashMemory(layout.build / "hashes.json")
    context = Context(
        layout=layout, stack_name=manifest.stack, stack=stack, ui=ui, memory=memory,
        options=Options(profile=manifest.profile, target=manifest.target),
    )  # fmt: skip
    job = Job(
        layout=layout, stack_name=manifest.stack, stack=stack, arch=manifest.arch, ui=ui,
        target=Target.make(manifest.target, python=manifest.python, glibc=manifest.glibc),
        policy=load_policy(), memory=memory, targets=(house,), pythons=pin.pythons, fetch=fetch,
        stub=_stub(stub),
    )  # fmt: skip

    def find() -> Place:
        scratch = layout.build / "verify"
        scratch.mkdir(exist_ok=True)
        return find_place(
            job.target, (manifest.python, *pin.pythons), folder=folder, seen=(house, scratch),
            cache=layout.cache, stub=driver_stub(job), ui=ui,
        )  # fmt: skip

    return Run(
        context=context, house=house, manifest=manifest, job=job, folder=folder, find=find,
        quick=quick, only=only,
    )  # fmt: skip


def _stub(given: Path | None) -> Path | None:
    """--stub, if there is such a file: a context that was made without a toolkit has none."""
    return given.resolve() if given and given.is_file() else None


def _context(
    layout: Layout, house: Path, manifest: Manifest, arguments: argparse.Namespace, ui: Ui
) -> int:
    run = prepare(
        layout, house, manifest, layout.build / "target", ui, fetch=False, quick=False, only=()
    )
    stub = _stub(arguments.stub) or driver_stub(run.job)
    python = arguments.image_python or manifest.python
    target = Target.make(manifest.target, python=python, glibc=manifest.glibc)
    write_context(layout, house, target, arguments.context, stub=stub)
    if stub is None:
        ui.note(
            "no stub of libcuda is here (`nox -s build` makes one): what needs it will not load"
        )
    ui.say(f"Wrote {arguments.context}.")
    ui.say(
        f"  next: docker build --platform linux/{DEBIAN[run.job.target.machine]} --progress=plain "
        f"-f {arguments.context}/{DOCKERFILE} {arguments.context}"
    )
    return 0


def _refuse_what_goes_by(arguments: argparse.Namespace) -> None:
    """Options that `--native-build` and `--context` would not look at."""
    for instead in ("native_build", "context"):
        other = [n for n in ("build", "quick", "only", "json", "stub") if getattr(arguments, n)]
        if getattr(arguments, instead) and other:
            raise UsageFault(
                f"--{other[0]} is not for --{instead.replace('_', '-')}, which follows no steps.",
                remedy=f"Leave --{other[0]} out.",
            )


def _native_build(layout: Layout, house: Path, ui: Ui) -> int:
    """Build inside of a root, and compare. Raises ToolFailed if it fails."""
    built = build_natively(layout, "aarch64", ("--profile", "smoke"), ui)
    ui.say(f"Built natively, in {built.root}: {built.wheelhouse}")
    for line in built.drift:
        ui.note(f"package not as recorded: {line}")
    (wheel,) = built.wheelhouse.glob("vllm-*.whl")
    other = house / wheel.name
    if not other.is_file():
        ui.note(f"{house} holds no {wheel.name} to compare it with")
        return 0
    same, different = compare_wheels(other, wheel)
    ui.say(f"Of {wheel.name}, {same} files are the same in {house}, {len(different)} are not:")
    for one in different:
        ui.say(f"  {one.file}: {one.why or 'another content'}")
    return 0


def _manifest(house: Path) -> Manifest:
    found = load_manifest(house)
    if found is None:
        raise UsageFault(
            f"{house} is no wheelhouse: it has no manifest.json.",
            remedy="`nox -s build` makes one; or name one: verify-target DIR",
        )
    return found
