"""All static checks over wheels or an environment: the one entry point. No printing here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sm121.abi import cached, coverage, family, floors, identity, loading, patched, sets
from sm121.abi.context import Context, Expected
from sm121.abi.facts import Wheel
from sm121.abi.gpu import Arch, check_arch
from sm121.abi.inputs import (
    check_listed,
    environment_site,
    manifest_beside,
    overlap_paths,
    promises,
    wheel_paths,
)
from sm121.abi.patched import PatchFile
from sm121.abi.policy.model import Policy
from sm121.abi.report import (
    BinaryRow,
    ComponentRow,
    FamilyRow,
    Finding,
    NotRun,
    OpenSymbol,
    Report,
    WheelRow,
)  # fmt: skip
from sm121.abi.scan import FactsCache, scan_environment, scan_wheels
from sm121.files import HashMemory
from sm121.lock.pylock import Target
from sm121.rules.model import Rules
from sm121.ui import Ui, human_bytes
from sm121.wheelhouse.manifest import Manifest


def verify(
    targets: Sequence[Path],
    *,
    policy: Policy,
    target: Target,
    arch: str,
    cache: Path,
    env: Path | None = None,
    against: Sequence[Path] = (),
    neighbours: Sequence[Path] = (),
    wanted: Mapping[str, str] | None = None,
    patches: Sequence[PatchFile] = (),
    rules: Rules | None = None,
    expected: Expected | None = None,
    lacking: Sequence[str] = (),
    memory: HashMemory | None = None,
    ui: Ui | None = None,
) -> Report:
    """Judge wheels (files or folders of them) or an environment for a target.

    against: wheels that are loaded with them but not judged; a distribution that is among
    the targets is not taken from there. neighbours: wheels that are only asked who has a
    missing symbol (the lock's). wanted: distribution → pinned version. patches: the series,
    for the patch check. rules: the family's. expected: instead of what a wheelhouse's
    manifest.json promises. lacking: surroundings that are not here; a library that is found
    nowhere is then 'not run' and no fault. cache: folder for facts and reports, by content.
    memory: hashes that are known already.

    Raises UsageFault (no such file, an arch that the stack can't be built for), OSError.
    What is wrong with a binary is never an exception but a finding.
    """
    gpu = Arch.parse(arch)
    check_arch(gpu, policy.gpu.accepted_archs)
    store = FactsCache(cache)
    memory = memory or HashMemory(cache / "abi" / "hashes.json")
    manifest = manifest_beside(targets)
    promised = expected or promises(manifest)
    paths = wheel_paths(targets)
    around = [p for p in wheel_paths(against) if p not in paths]
    try:
        hashes = {path: memory.sha256(path) for path in (*paths, *around, *neighbours)}
        key = None if env else cached.key(
            hashes={p.name: hashes[p] for p in (*paths, *around, *neighbours)},
            judged=[p.name for p in paths], parts=(
                policy.model_dump_json(), target.tag, str(target.glibc), str(gpu), repr(promised),
                repr(sorted((wanted or {}).items())), repr(patches),
                manifest.model_dump_json(include={"wheels"}) if manifest else "", repr(sorted(lacking)),
                rules.model_dump_json() if rules else "",
            ),
        )  # fmt: skip
        report = cached.find(cache, key) if key else None
        if report is None:
            context = _context(
                paths, around, env, policy=policy, target=target, arch=gpu,
                expected=promised, store=store, memory=memory, ui=ui,
            )  # fmt: skip
            report = judge(
                context, lambda: scan_wheels(list(neighbours), cache=store, memory=memory),
                wanted=wanted or {}, patches=patches, manifest=manifest, paths=paths, rules=rules,
                lacking=lacking,
            )  # fmt: skip
            if key:
                cached.store(cache, key, report)
    finally:
        memory.save()
    return report


def _context(
    paths: Sequence[Path], around: Sequence[Path], env: Path | None, *, policy: Policy,
    target: Target, arch: Arch, expected: Expected, store: FactsCache, memory: HashMemory,
    ui: Ui | None,
) -> Context:  # fmt: skip
    every = (*paths, *around)
    if ui is not None:
        with ui.progress("verify-abi") as progress:
            scanned = scan_wheels(
                every, cache=store, memory=memory,
                progress=lambda done, total: progress.update(
                    f"{human_bytes(done)} of {human_bytes(total)} read"
                ),
            )  # fmt: skip
    else:
        scanned = scan_wheels(every, cache=store, memory=memory)
    subjects, others = scanned[: len(paths)], scanned[len(paths) :]
    if env is not None:
        site = environment_site(env)
        shared = overlap_paths(site, policy)
        subjects += scan_environment(
            site, cache=store, memory=memory, read_hashes=shared.__contains__
        )
    named = {wheel.distribution for wheel in subjects}
    return Context(
        subjects=tuple(subjects), others=tuple(w for w in others if w.distribution not in named),
        target=target, arch=arch, policy=policy, expected=expected, installed=env is not None,
    )  # fmt: skip


def judge(
    context: Context,
    neighbours: Callable[[], Sequence[Wheel]],
    *,
    wanted: Mapping[str, str],
    patches: Sequence[PatchFile] = (),
    manifest: Manifest | None = None,
    paths: Sequence[Path] = (),
    rules: Rules | None = None,
    lacking: Sequence[str] = (),
) -> Report:
    """All static checks over facts. Pure but for reading patched files out of the wheel.

    neighbours: called only if a symbol is open.
    """
    resolution = loading.resolve(context)
    findings, open_symbols = loading.findings(
        context, resolution, neighbours() if resolution.open else ()
    )
    not_run: list[NotRun] = []
    if lacking:
        findings, not_run = loading.without(findings, lacking)
    findings += identity.check_identity(context)
    findings += identity.check_paths(context)
    findings += floors.check_floors(context)
    findings += floors.check_abi3(context)
    gpu, components = coverage.check_coverage(context)
    findings += gpu
    findings += sets.check_ownership(context)
    findings += sets.check_overlap_groups(context)
    table: list[FamilyRow] = []
    for found, rows in (
        sets.check_versions(context, wanted),
        sets.check_cuda_builds(context),
        sets.check_nccl(context),
        family.check_family(context, rules) if rules else ([], []),
    ):
        findings += found
        table += rows
    if manifest is not None:
        findings += check_listed(manifest, context)
    vllm = next((p for p in paths if p.name.startswith("vllm-")), None)
    wheel = next((w for w in context.subjects if w.distribution == "vllm"), None)
    if vllm is not None and wheel is not None and patches and not wheel.damage:
        findings += patched.check_patches(context, wheel, patches, _reader(vllm))
    elif context.expected.patches:
        not_run.append(
            NotRun(check="patches", reason="the series was not given, or there is no git")
        )
    return _report(context, findings, open_symbols, components, table, not_run,
                   resolution.checked)  # fmt: skip


def _reader(path: Path) -> Callable[[str], str | None]:
    from sm121.abi.archive import Archive

    def read(name: str) -> str | None:
        archive = Archive(path)
        try:
            member = next((m for m in archive.members if m.name == name), None)
            return archive.text(member) if member else None
        finally:
            archive.close()

    return read


def _report(
    context: Context, findings: Sequence[Finding], open_symbols: Sequence[OpenSymbol],
    components: Sequence[ComponentRow], family: Sequence[FamilyRow], not_run: Sequence[NotRun],
    checked: Mapping[str, int],
) -> Report:  # fmt: skip
    rows: list[WheelRow] = []
    binaries: list[BinaryRow] = []
    for wheel in context.subjects:
        mine = [f for f in findings if f.wheel == wheel.filename]
        faults = sum(f.severity == "fault" for f in mine)
        binaries += _binaries(wheel, mine, checked)
        rows.append(
            WheelRow(
                filename=wheel.filename, sha256=wheel.sha256, binaries=len(wheel.binaries),
                symbols=sum(checked.get(b.path, 0) for b in wheel.binaries),
                floors=floors.floors_of(wheel, context), faults=faults, notes=len(mine) - faults,
                result="fail" if faults else "pass",
            )
        )  # fmt: skip
    return Report(
        schema_version=1, target=context.target.name, machine=context.target.machine,
        python=context.target.python, arch=str(context.arch), profile=context.expected.profile,
        result="fail" if any(f.severity == "fault" for f in findings) else "pass",
        wheels=tuple(rows), binaries=tuple(binaries), against=tuple(w.filename for w in context.others),
        components=tuple(components), open_symbols=tuple(open_symbols), findings=tuple(findings),
        family=tuple(family), not_run=tuple(not_run),
    )  # fmt: skip


def _binaries(wheel: Wheel, mine: Sequence[Finding], checked: Mapping[str, int]) -> list[BinaryRow]:
    rows = []
    for binary in wheel.binaries:
        about = [f for f in mine if f.file == binary.path and f.kind in ("symbol", "library")]
        rows.append(
            BinaryRow(
                wheel=wheel.filename, file=binary.path, symbols=checked.get(binary.path, 0),
                open=sum(f.kind == "symbol" for f in about),
                libraries=tuple(n for f in about if f.kind == "library" for n in f.names),
                allowed=bool(about) and all(f.severity == "note" for f in about),
                loadable=binary.path in checked,
            )
        )  # fmt: skip
    return rows


def with_findings(
    report: Report, findings: Sequence[Finding], not_run: Sequence[NotRun] = ()
) -> Report:
    """The report with more findings (of the dynamic part)."""
    every = report.findings + tuple(findings)
    failed = any(f.severity == "fault" for f in every)
    return dataclasses.replace(
        report, findings=every, not_run=report.not_run + tuple(not_run),
        result="fail" if failed else "pass",
    )  # fmt: skip
