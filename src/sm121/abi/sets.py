"""Checks over the whole set: who owns which file, which builds belong together, which NCCL."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from sm121.abi.context import Context, finding, matches
from sm121.abi.facts import Binary, Wheel
from sm121.abi.policy.model import CudaBuild
from sm121.abi.report import FamilyRow, Finding
from sm121.abi.scan import record_hashes

_VERSION = re.compile(r"""^__version__\s*(?::[^=]*)?=\s*['"]([^'"]+)['"]""", re.MULTILINE)
_CUDA = re.compile(r"""^cuda\s*(?::[^=]*)?=\s*['"]([^'"]+)['"]""", re.MULTILINE)


def check_ownership(context: Context) -> Iterator[Finding]:
    """Two wheels that own one path: the one installed last wins, which is chance."""
    seen: dict[str, Wheel] = {}
    for wheel in context.subjects:
        if (other := seen.setdefault(wheel.distribution, wheel)) is not wheel:
            yield finding(
                "ownership", wheel, "", f"a second wheel of {wheel.distribution}, beside {other.filename}"
            )  # fmt: skip
    owners: dict[str, list[Wheel]] = defaultdict(list)
    for wheel in context.subjects:
        for path in wheel.files:
            if not path.endswith("/"):
                owners[path].append(wheel)
    shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
    by_name = {wheel.filename: wheel for wheel in context.subjects}
    for path, wheels in owners.items():
        hashes = {wheel.files[path] for wheel in wheels}
        if len(wheels) > 1 and (len(hashes) > 1 or "" in hashes):
            shared[tuple(w.filename for w in wheels)].append(path)
    for names, paths in shared.items():
        distributions = {by_name[name].distribution for name in names}
        for rule in context.policy.overlaps:
            if distributions <= set(rule.distributions) and all(
                matches(path, rule.files) for path in paths
            ):
                order = f"; {rule.winner} must be installed last" if rule.winner else ""
                yield finding(
                    "ownership", by_name[names[0]], "",
                    f"{' and '.join(sorted(distributions))} own {len(paths)} files with different "
                    f"content{order}",
                    why=rule.why, note=True, names=sorted(paths)[:10],
                )  # fmt: skip
                break
        else:
            yield finding(
                "ownership", by_name[names[0]], sorted(paths)[0],
                f"{' and '.join(sorted(distributions))} own the same {len(paths)} file(s) with "
                "different content: whichever is installed last wins",
                names=sorted(paths)[:10],
            )  # fmt: skip


def check_overlap_groups(context: Context) -> Iterator[Finding]:
    """Distributions that overlap by design: one version, the winner there, its files on disk."""
    present = {w.distribution: w for w in context.subjects if w.distribution}
    for rule in context.policy.overlaps:
        if rule.winner is None:
            continue
        group = [present[d] for d in rule.distributions if d in present]
        if not group:
            continue
        winner = present.get(rule.winner)
        versions = {w.distribution: w.version for w in group}
        if len(set(versions.values())) > 1:
            yield finding(
                "mixture", group[0], "", "mixed versions: " + _pairs(versions), why=rule.why,
                names=sorted(versions),
            )  # fmt: skip
        if winner is None:
            yield finding(
                "mixture", group[0], "",
                f"{rule.winner} is not in the set, although {group[0].distribution} is",
                why=rule.why, names=[rule.winner],
            )  # fmt: skip
        elif context.installed:
            yield from _mixture(winner, present, rule.why)


def _mixture(winner: Wheel, present: Mapping[str, Wheel], why: str) -> Iterator[Finding]:
    on_disk = {path: digest for w in present.values() for path, digest in w.files.items()}
    recorded = record_hashes(winner.texts.get("RECORD", ""), set(on_disk))
    wrong = sorted(p for p, digest in recorded.items() if on_disk[p] and on_disk[p] != digest)
    if wrong:
        yield finding(
            "mixture", winner, wrong[0],
            f"{len(wrong)} of {len(recorded)} files are not those of {winner.distribution}: the "
            "files of two packages are mixed",
            why=why, names=wrong[:20],
        )  # fmt: skip


def check_cuda_builds(context: Context) -> tuple[list[Finding], list[FamilyRow]]:
    """torch, torchvision, torchaudio: CUDA builds, of one CUDA, for this torch."""
    out: list[Finding] = []
    rows: list[FamilyRow] = []
    torch = context.distribution("torch")
    torch_build = _build(torch, "torch/version.py") if torch else ("", "")
    for rule in context.policy.cuda_builds:
        wheel = context.distribution(rule.distribution)
        if wheel is None or (wheel not in context.subjects and wheel is not torch):
            continue
        version, cuda = _build(wheel, rule.version_file)
        problems = list(_problems(rule, wheel, (version, cuda), torch, torch_build))
        judged = wheel in context.subjects
        out += [
            finding("cuda-build", wheel, rule.version_file, p, note=not judged) for p in problems
        ]
        rows.append(
            FamilyRow(
                name=rule.distribution, found=version or wheel.version,
                wanted=_wanted(rule, torch, torch_build),
                result="fail" if problems else "pass",
                text="; ".join(problems) or f"a CUDA {cuda or _dotted(version)} build",
            )
        )  # fmt: skip
    return out, rows


def _build(wheel: Wheel, file: str) -> tuple[str, str]:
    """(__version__, cuda) of a version.py; cuda is '' where the file does not say."""
    text = wheel.texts.get(file, "")
    version, cuda = _VERSION.search(text), _CUDA.search(text)
    return (version[1] if version else "", cuda[1] if cuda else "")


def _dotted(version: str) -> str:
    """'2.11.0+cu130' → '13.0'; '' without a cuXYZ local part."""
    match = re.search(r"\+cu(\d+)(\d)\b", version)
    return f"{match[1]}.{match[2]}" if match else ""


def _wanted(rule: CudaBuild, torch: Wheel | None, torch_build: tuple[str, str]) -> str:
    if rule.distribution == "torch" or torch is None:
        return "a CUDA build"
    return f"a build for torch {torch.version}, CUDA {torch_build[1] or _dotted(torch_build[0])}"


def _problems(
    rule: CudaBuild, wheel: Wheel, build: tuple[str, str], torch: Wheel | None,
    torch_build: tuple[str, str],
) -> Iterator[str]:  # fmt: skip
    name = f"{rule.distribution} {wheel.version}"
    version, cuda = build[0], build[1] or _dotted(build[0])
    if rule.library is not None:
        library = next((b for b in wheel.binaries if matches(b.path, [rule.library])), None)
        if library is None:
            yield f"{name} has no {rule.library}"
        elif not _is_cuda(rule, library):
            yield (
                f"{name} is a CPU build: {library.path} needs none of {', '.join(rule.needed)}"
                + ("; it imports cleanly and fails at the first call on a GPU tensor"
                   if rule.distribution != "torch" else "")
            )  # fmt: skip
    if torch is None or rule.distribution == "torch":
        return
    torch_cuda = torch_build[1] or _dotted(torch_build[0])
    if cuda and torch_cuda and cuda != torch_cuda:
        yield f"{name} is a CUDA {cuda} build ({version}); torch is a CUDA {torch_cuda} build"
    wanted = _torch_wanted(rule, wheel)
    if wanted and not _same_release(wanted, torch.version):
        yield f"{name} was built for torch {wanted}; the set has torch {torch.version}"


def _is_cuda(rule: CudaBuild, library: Binary) -> bool:
    elf = library.elf
    if elf is None:
        return False
    return any(fnmatchcase(n, g) for n in elf.needed for g in rule.needed) or any(
        fnmatchcase(n, g) for n in elf.exports.plain for g in rule.exports
    )


def _torch_wanted(rule: CudaBuild, wheel: Wheel) -> str:
    if rule.same_version:
        return wheel.version
    for line in wheel.texts.get("Requires-Dist", "").splitlines():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name == "torch":
            for one in requirement.specifier:
                if one.operator == "==":
                    return one.version
    return ""


def _same_release(one: str, other: str) -> bool:
    try:
        return Version(one).release == Version(other).release
    except InvalidVersion:
        return one == other


def check_nccl(context: Context) -> tuple[list[Finding], list[FamilyRow]]:
    """Which NCCL is it: by the version in its text and by build id, never by its name."""
    rule = context.policy.nccl
    out: list[Finding] = []
    rows: list[FamilyRow] = []
    found: list[tuple[Wheel, Binary]] = [
        (wheel, binary)
        for wheel in context.wheels
        for binary in wheel.binaries
        if binary.elf and binary.elf.soname.startswith("libnccl.so")
    ]
    for wheel, binary in found:
        assert binary.elf is not None
        version = binary.strings[0] if binary.strings else "unknown"
        release = version.split("+")[0]
        problem = ""
        if wheel.distribution == rule.distribution and wheel.version and version != "unknown":
            if not _same_release(release, wheel.version):
                problem = f"says it is NCCL {release}, in a package of version {wheel.version}"
        elif version == "unknown":
            problem = "names no NCCL version"
        if problem:
            out.append(
                finding("nccl", wheel, binary.path, problem, note=wheel not in context.subjects)
            )
        rows.append(
            FamilyRow(
                name=f"NCCL ({binary.path})", found=f"{version}, build id {binary.elf.build_id or 'none'}",
                wanted=f"{wheel.distribution} {wheel.version}".strip(),
                result="fail" if problem else "pass", text=problem or "identified",
            )
        )  # fmt: skip
    builds = {b.elf.build_id: (b.strings, w, b) for w, b in found if b.elf}
    if len(builds) > 1:
        listed = ", ".join(
            f"{b.path} of {w.distribution} ({', '.join(s) or 'no version'}, build id {build or 'none'})"
            for build, (s, w, b) in sorted(builds.items())
        )
        out.append(
            finding(
                "nccl", found[0][0], found[0][1].path,
                f"{len(builds)} different builds of NCCL in one set: {listed}", names=sorted(builds),
            )
        )  # fmt: skip
    return out, rows


def check_versions(
    context: Context, wanted: Mapping[str, str]
) -> tuple[list[Finding], list[FamilyRow]]:
    """Every pinned distribution that is present has the pinned version."""
    out: list[Finding] = []
    rows: list[FamilyRow] = []
    for name, version in sorted(wanted.items()):
        wheel = next((w for w in context.subjects if w.distribution == name), None)
        if wheel is None:
            continue
        good = _same_release(wheel.version, version)
        if not good:
            out.append(
                finding("family", wheel, "", f"{name} {wheel.version} is here; the stack wants {version}")
            )  # fmt: skip
        rows.append(
            FamilyRow(
                name=name, found=wheel.version, wanted=version,
                result="pass" if good else "fail", text="" if good else "not the pinned version",
            )
        )  # fmt: skip
    return out, rows


def _pairs(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
