"""sbom.cdx.json: a CycloneDX 1.6 bill of materials of a wheelhouse.

One component per wheel with its hash, what it requires, and for a repaired one its pedigree
(https://cyclonedx.org/docs/1.6/json/#components_items_pedigree). Deterministic: serial number
from the content, time of the release.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from email.parser import HeaderParser

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType, Pedigree
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.utils import canonicalize_name

from sm121.repair.wheel import Wheel
from sm121.wheelhouse.manifest import Manifest, WheelEntry

FILE = "sbom.cdx.json"


def render_sbom(manifest: Manifest, wheels: Mapping[str, Wheel], *, date: datetime) -> str:
    """JSON text. wheels: by file name, every one that the manifest lists."""
    components = {
        entry.distribution: _component(entry, wheels[entry.filename]) for entry in manifest.wheels
    }
    root = Component(
        name=f"sm121-{manifest.stack}",
        version=manifest.patched_commit,
        type=ComponentType.APPLICATION,
        bom_ref="wheelhouse",
        properties=[
            Property(name=f"sm121:{name}", value=str(value))
            for name, value in (
                ("target", manifest.target),
                ("python", manifest.python),
                ("profile", manifest.profile),
                ("arch", manifest.arch),
            )
        ],
    )
    bom = Bom(
        components=components.values(),
        serial_number=uuid.uuid5(
            uuid.NAMESPACE_URL, "".join(entry.sha256 for entry in manifest.wheels)
        ),
    )
    bom.metadata.timestamp = date
    bom.metadata.component = root
    bom.register_dependency(root, components.values())
    for entry in manifest.wheels:
        asked = {canonicalize_name(r.name) for r in wheels[entry.filename].requirements()}
        bom.register_dependency(
            components[entry.distribution],
            [components[name] for name in sorted(asked) if name in components],
        )
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
    return text + "\n"


def _component(entry: WheelEntry, wheel: Wheel) -> Component:
    expression = HeaderParser().parsestr(wheel.metadata).get("License-Expression")
    pedigree = None
    if entry.original is not None:
        pedigree = Pedigree(
            ancestors=[
                Component(
                    name=entry.distribution,
                    version=entry.version,
                    type=ComponentType.LIBRARY,
                    bom_ref=entry.original.filename,
                    hashes=[_hash(entry.original.sha256)],
                    purl=_purl(entry, entry.original.filename),
                )
            ],
            notes="; ".join((*entry.changes, "no binary was changed")),
        )
    return Component(
        name=entry.distribution,
        version=entry.version,
        type=ComponentType.LIBRARY,
        bom_ref=entry.filename,
        hashes=[_hash(entry.sha256)],
        purl=_purl(entry, entry.filename),
        licenses=[LicenseExpression(expression)] if expression else [],
        pedigree=pedigree,
        properties=[Property(name="sm121:origin", value=entry.origin)],
    )


def _hash(sha256: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=sha256)


def _purl(entry: WheelEntry, filename: str) -> PackageURL:
    return PackageURL(
        type="pypi", name=entry.distribution, version=entry.version,
        qualifiers={"file_name": filename},
    )  # fmt: skip
