"""What is sent: the files of a wheelhouse, and what the nodes' roles need to serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sm121 import proc
from sm121.doctor.mask import masker
from sm121.errors import EnvironmentFault, HashMismatch, UsageFault
from sm121.files import HashMemory
from sm121.sync.node.listing import (
    NAMESPACE,
    WHEELHOUSE,
    check_name,
    parse_listing,
    release_id,
    render_listing,
)  # fmt: skip
from sm121.sync.node.refusal import Refused
from sm121.wheelhouse.manifest import Manifest, load_manifest
from sm121.wheelhouse.sums import SUMS

# As sm121.pins.model.OVERLAY, which is slow to import (a test compares them).
_OVERLAY = "overlay"
_TEXT = (".json", ".toml", ".env", ".service", ".conf", ".txt", ".sh", ".md")
_LARGEST_TEXT = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """files: name in the release → file here. digests: name → sha256. listing: RELEASE's text.

    signature: of the listing, by ssh-keygen; '' if it is not signed.
    """

    id: str
    manifest: Manifest
    files: Mapping[str, Path]
    digests: Mapping[str, str]
    listing: str
    signature: str = ""

    @property
    def objects(self) -> dict[str, Path]:
        """digest → a file here that has it."""
        return {self.digests[name]: path for name, path in self.files.items()}

    @property
    def installed_bytes(self) -> int:
        """About what its environment takes: wheels hold their files at 40 % of the size."""
        return int(2.5 * sum(entry.size for entry in self.manifest.wheels))


def gather(
    folder: Path,
    memory: HashMemory,
    *,
    allow_partial: bool,
    serve: Mapping[str, Path] | None = None,
) -> Release:
    """The release that a wheelhouse makes. serve: name → file, of what the
    nodes' roles need (`head/serve.env`, `worker/…`); each node's `serve` names one of the folders.

    Raises UsageFault (not a wheelhouse, or not one for a node), HashMismatch (damaged), and
    CheckFailed for a name or a link that could lead out of the folder.
    """
    manifest = _fitting(folder, allow_partial)
    try:
        listed = {
            check_name(f"{WHEELHOUSE}/{name}"): digest
            for name, digest in parse_listing((folder / SUMS).read_text(encoding="utf-8")).items()
        }
        files = {name: folder / name.partition("/")[2] for name in listed}
        files[f"{WHEELHOUSE}/{SUMS}"] = folder / SUMS
        files |= {check_name(name): path for name, path in (serve or {}).items()}
    except OSError as error:
        raise HashMismatch(f"{folder / SUMS} can't be read.", cause=str(error)) from error
    except Refused as refused:
        raise UsageFault(refused.what, cause=refused.cause, remedy=refused.remedy) from refused
    links = [name for name, path in files.items() if path.is_symlink() or path.parent.is_symlink()]
    if links:
        raise UsageFault(
            f"{links[0]} is a link.", cause="a release holds files only: a link could lead anywhere",
            remedy="Make the wheelhouse anew with `nox -s build -- --with-deps`.",
        )  # fmt: skip
    missing = [name for name, path in files.items() if not path.is_file()]
    digests = {name: memory.sha256(path) for name, path in files.items() if name not in missing}
    altered = [name for name, digest in listed.items() if digests.get(name, digest) != digest]
    unlisted = sorted(
        p.name for p in folder.glob("*.whl") if f"{WHEELHOUSE}/{p.name}" not in listed
    )
    if missing or altered or unlisted:
        raise HashMismatch(
            f"The wheelhouse {folder} is damaged; nothing was sent.",
            details=[*(f"{n} is missing" for n in missing), *(f"{n} was altered" for n in altered),
                     *(f"{n} is not listed in {SUMS}" for n in unlisted)],
            remedy="`nox -s build -- --with-deps` makes these files anew.",
        )  # fmt: skip
    _refuse_secrets(files)
    listing = render_listing(digests)
    return Release(
        id=release_id(listing), manifest=manifest, files=files, digests=digests, listing=listing
    )


def _fitting(folder: Path, allow_partial: bool) -> Manifest:
    manifest = load_manifest(folder)
    if manifest is None or not manifest.complete:
        raise UsageFault(
            f"{folder} can't be installed on a node: "
            + ("it holds no manifest.json." if manifest is None else "it holds vLLM without its dependencies."),
            remedy="`nox -s build -- --with-deps` makes a whole one; --wheelhouse names another.",
        )  # fmt: skip
    if manifest.partial and not allow_partial:
        left_out = manifest.components.left_out
        raise UsageFault(
            f"This wheelhouse was made with profile {manifest.profile}, which is not a whole vLLM.",
            cause="it can't serve; left out: "
            + (", ".join(sorted(left_out)) or "see its manifest"),
            remedy="Build profile full; to send this one all the same, add --allow-partial.",
        )
    return manifest


def lacking(manifest: Manifest) -> Iterator[str]:
    """What a person must know of an incomplete or overlaid wheelhouse, a line each."""
    left_out = ", ".join(sorted(manifest.components.left_out))
    if manifest.partial:
        yield f"profile {manifest.profile} is not a whole vLLM and can't serve; left out: {left_out}"
    elif manifest.profile == _OVERLAY:
        dead = [e.component for e in manifest.components.gpu if e.result == "fail" or e.verdict != "native"]  # fmt: skip
        yield (
            "an overlay: the release's own binaries"
            + (f"; without native code for {manifest.arch}: {', '.join(sorted(set(dead)))}" if dead else "")
            + (f"; left out: {left_out}" if left_out else "")
        )  # fmt: skip


def _refuse_secrets(files: Mapping[str, Path]) -> None:
    """Every text file of a release, by the rules of `doctor --report`."""
    hide = masker({})
    for name, path in files.items():
        if not name.endswith(_TEXT) or path.stat().st_size > _LARGEST_TEXT:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if hide(line) != line:
                raise UsageFault(
                    f"{name}, line {number}, looks as if it held a credential; nothing was sent.",
                    cause=hide(line).strip()[:160],
                    remedy="Take it out where the file is made, and make the wheelhouse anew.",
                )


def sign(release: Release, key: Path, folder: Path) -> Release:
    """The release with a signature of its list, by `ssh-keygen -Y sign` (ssh-keygen(1)).

    key: a private key, or a public one whose private part an agent has. folder: an empty one. Raises EnvironmentFault.
    """
    place, signature = folder / "RELEASE", folder / "RELEASE.sig"
    place.write_text(release.listing, encoding="utf-8")
    done = proc.run(["ssh-keygen", "-Y", "sign", "-f", key, "-n", NAMESPACE, place], check=False)
    if done.returncode != 0:
        raise EnvironmentFault(
            f"The release could not be signed with {key}.", cause=done.output.strip(),
            remedy="Give --sign an ssh key of yours (a passphrase comes from ssh-agent).",
        )  # fmt: skip
    return replace(release, signature=signature.read_text())
