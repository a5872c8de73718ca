"""What the user points at: wheels, a wheelhouse with its manifest, an environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from sm121.abi.context import Context, Expected, finding
from sm121.abi.policy.model import Policy
from sm121.abi.report import Finding
from sm121.errors import UsageFault
from sm121.wheelhouse.manifest import Manifest, load_manifest


def wheel_paths(targets: Sequence[Path]) -> list[Path]:
    """Wheel files of the targets, folders expanded, in a stable order. Raises UsageFault."""
    found: list[Path] = []
    for target in targets:
        if target.is_dir():
            inside = sorted(target.glob("*.whl"))
            if not inside:
                raise UsageFault(
                    f"{target} holds no wheel.", remedy="Name a wheelhouse, or wheel files."
                )
            found += inside
        elif target.is_file():
            found.append(target)
        else:
            raise UsageFault(f"{target} does not exist.", remedy="Name a wheelhouse or a wheel.")
    return list(dict.fromkeys(found))


def environment_site(env: Path) -> Path:
    """site-packages of an environment: the folder itself, or below a venv. Raises UsageFault."""
    if any(env.glob("*.dist-info")):
        return env
    for pattern in ("lib/python3*/site-packages", "lib/python3*/dist-packages"):
        for site in sorted(env.glob(pattern)):
            return site
    raise UsageFault(
        f"{env} is no Python environment.",
        cause="no *.dist-info in it and no lib/python3*/site-packages below it",
    )


def overlap_paths(site: Path, policy: Policy) -> frozenset[str]:
    """Paths that any RECORD of the overlapping distributions names: their content matters."""
    names = {d for rule in policy.overlaps if rule.winner for d in rule.distributions}
    paths: set[str] = set()
    for folder in site.glob("*.dist-info"):
        name = canonicalize_name(folder.name.removesuffix(".dist-info").rpartition("-")[0])
        record = folder / "RECORD"
        if name in names and record.is_file():
            lines = record.read_text("utf-8", "replace").splitlines()
            paths |= {line.rsplit(",", 2)[0].strip('"') for line in lines}
    return frozenset(paths)


def manifest_beside(targets: Sequence[Path]) -> Manifest | None:
    """That of the first target that is a folder with one. Raises CheckFailed if it is none."""
    for target in targets:
        if target.is_dir() and (manifest := load_manifest(target)):
            return manifest
    return None


def promises(manifest: Manifest | None) -> Expected:
    """What a wheelhouse's manifest promises of its binaries."""
    if manifest is None:
        return Expected()
    return Expected(
        profile=manifest.profile, built=manifest.components.built,
        left_out=dict(manifest.components.left_out),
        patches={
            p.name: p.patch_id for p in manifest.patches if p.status.startswith("applied")
        },
    )  # fmt: skip


def check_listed(manifest: Manifest, context: Context) -> Iterator[Finding]:
    """Every wheel is the one that the manifest lists, and none is missing or extra."""
    present = {wheel.filename: wheel for wheel in context.subjects}
    listed = {entry.filename: entry.sha256 for entry in manifest.wheels}
    for name, sha256 in listed.items():
        wheel = present.get(name)
        if wheel is None:
            yield finding("archive", None, "", f"{name} is in the manifest but not in the folder")
        elif wheel.sha256 != sha256:
            yield finding(
                "archive", wheel, "", f"is not the file that the manifest lists: sha256 is "
                f"{wheel.sha256[:12]}…, wanted {sha256[:12]}…",
            )  # fmt: skip
    for name, wheel in present.items():
        if name not in listed:
            yield finding("archive", wheel, "", "is in the folder but not in the manifest")
