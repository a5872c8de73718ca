"""A whole wheelhouse from a real index on this machine: gathered, repaired, damaged, mended."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sm121 import fetch
from sm121.__main__ import main
from sm121.context import Context
from sm121.errors import CheckFailed, FamilyFault, NetworkFault, PinsFault, WheelFault
from sm121.lock.pylock import (
    LockedFile,
    lock_path,
    locked_files,
    make_lock,
    read_lock,
    write_lock,
)
from sm121.lock.resolve import REQUIREMENT_FILES, inputs_digest
from sm121.pins.load import load_stack
from sm121.repair.stage import RepairStage
from sm121.repair.wheel import read_wheel
from sm121.wheelhouse.manifest import SCHEMA_FILE, Manifest, load_manifest
from sm121.wheelhouse.stage import WheelhouseStage
from support.nodes import two_nodes, write_nodes
from support.servers import serve_index
from support.stacks import minimal, write_stack
from support.wheels import make_wheel

DIGESTS = dict.fromkeys(REQUIREMENT_FILES, "d" * 64)
VLLM = "vllm-1.2.3+sm121.smoke.1a2b3c4d-cp311-abi3-linux_aarch64.whl"
RESULTS: dict[str, dict[str, Any]] = {
    "source": {"commit": "1" * 40, "provider": "sdist", "reason": "--offline"},
    "patch": {"commit": "2" * 40, "patches": [], "requirement_files": DIGESTS},
    "environment": {"python": "3.12.1", "tools": {}},
    "toolkit": {"native": False, "compiler": "g++"},
    "compile": {"wheel": VLLM, "sha256": "x", "libraries": {}},
}


@dataclass
class Site:
    """A checkout with a lock, an index that has its files, and what was downloaded."""

    context: Context
    index: Path
    fetched: list[str]

    def lock(self) -> None:
        """Write the lock of everything that the index has."""
        files = []
        for wheel in sorted(self.index.iterdir()):
            read = read_wheel(wheel)
            files.append(
                LockedFile(
                    distribution=read.distribution, version=read.version, filename=wheel.name,
                    sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), size=wheel.stat().st_size,
                )
            )  # fmt: skip
        stack = self.context.stack
        lock = make_lock(files, python="3.12", inputs=inputs_digest(stack, "family", DIGESTS))
        write_lock(
            lock, lock_path(self.context.layout.pins, "1.2.3", "family", self.context.runtime)
        )

    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = dict(RESULTS)
        results["repair"] = {**RepairStage().run(self.context, results), "fingerprint": "f"}
        return results

    def gather(self) -> Path:
        WheelhouseStage().run(self.context, self.results())
        return self.context.layout.wheelhouse

    @property
    def manifest(self) -> Manifest:
        found = load_manifest(self.context.layout.wheelhouse)
        assert found is not None
        return found


@pytest.fixture
def site(
    small: Context, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    data = minimal()
    data["family"]["nvidia-nccl-cu13"] = {"version": "2.30.4", "reason": "deadlock"}
    data["overrides"] = {"nvidia-nccl-cu13": "torch pins another"}
    data["yields"] = {
        "nvidia-cutlass-dsl-libs-base": {"to": "nvidia-cutlass-dsl-libs-cu13", "reason": "overlap"}
    }
    pins = small.layout.pins
    write_stack(pins, data)
    shutil.copy(root / "pins/rules.toml", pins)
    index = tmp_path / "index"
    component = "nvidia_cutlass_dsl_libs_"
    for name, version, files, requires, tag in (
        ("torch", "2.11.0", {"torch/lib.so": b"\x7fELF" * 50}, ["nvidia-nccl-cu13==2.28.9"],
         "cp312-cp312-manylinux_2_28_aarch64"),
        ("nvidia_nccl_cu13", "2.30.4", {"nvidia/libnccl.so.2": b"2.30.4"}, [], "py3-none-any"),
        ("nvidia_cutlass_dsl", "4.5.1", {}, [], "py3-none-any"),
        (f"{component}base", "4.5.1", {"d/x.so": b"12", "d/LICENSE": b""}, [], "py3-none-any"),
        (f"{component}cu13", "4.5.1", {"d/x.so": b"13", "d/y.so": b""}, [], "py3-none-any"),
        ("uv", "0.0.1", {}, [], "py3-none-any"),
    ):  # fmt: skip
        make_wheel(index, files, name=name, version=version, requires=requires, tag=tag)
    context = replace(
        small, stack=load_stack(pins, "1.2.3"), options=replace(small.options, with_deps=True)
    )
    dist = context.layout.build / "dist/1.2.3-linux-aarch64-smoke"
    made = make_wheel(
        dist, {"vllm/__init__.py": ""}, name="vllm", version="1.2.3+sm121.smoke.1a2b3c4d",
        tag="cp311-abi3-linux_aarch64", requires=["torch==2.11.0"],
    )  # fmt: skip
    assert made.name == VLLM
    fetched: list[str] = []
    download = fetch.download

    def counting(file: Any, **options: Any) -> Path:
        fetched.append(file.filename)
        return download(file, **options)

    monkeypatch.setattr(fetch, "download", counting)
    with serve_index(index) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
        ready = Site(context, index, fetched)
        ready.lock()
        yield ready


def test_wheelhouse_is_whole_and_says_what_is_in_it(site: Site) -> None:
    folder = site.gather()
    assert len(list(folder.glob("*.whl"))) == 7
    assert len(site.fetched) == 6
    manifest = site.manifest
    data = json.loads((folder / "manifest.json").read_text())
    jsonschema.validate(data, json.loads(SCHEMA_FILE.read_text()))
    assert manifest.complete
    origins = {e.distribution: e.origin for e in manifest.wheels}
    assert origins.pop("vllm") == "built"
    assert {n for n, o in origins.items() if o == "repaired"} == {
        "torch", "nvidia-cutlass-dsl-libs-base",
    }  # fmt: skip
    torch = next(e for e in manifest.wheels if e.distribution == "torch")
    assert torch.original is not None
    vendor = site.index / torch.original.filename
    assert torch.original.sha256 == hashlib.sha256(vendor.read_bytes()).hexdigest()
    assert "not for publishing" in manifest.notices[0]
    assert {c.name: c.verdict for c in manifest.checks}["requirements"] == "passed"


def test_it_carries_how_to_serve_where_the_stack_says_how(
    site: Site, root: Path, tmp_path: Path
) -> None:
    """Flat files, in SHA256SUMS and in the manifest; the verb renders from them alone."""
    assert set(site.gather().glob("serve*")) == set()
    before = WheelhouseStage().inputs(site.context, site.results())
    shutil.copy(root / "pins/0.26.0/serve.toml", site.context.layout.pins / "1.2.3/serve.toml")
    assert WheelhouseStage().inputs(site.context, site.results()) != before
    folder = site.gather()
    names = {"install.py", "serve.toml", "serve_check.py", "serve_node.py", "serve_start.py"}
    assert set(site.manifest.files) == names
    sums = dict(
        reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines()
    )
    for name, digest in site.manifest.files.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest == sums[name]
    assert sum((folder / name).stat().st_size for name in names) < 60_000
    nodes = write_nodes(tmp_path / "nodes.toml", two_nodes())
    out = tmp_path / "out"
    assert (
        main(["serve", "--nodes", str(nodes), "--wheelhouse", str(folder), "--out", str(out)]) == 0
    )
    assert "stack 1.2.3" in (out / "worker/sm121-worker.service").read_text()
    assert main(["serve", "--nodes", str(nodes), "--wheelhouse", str(folder), "--stack", "0.26.0", "--out", str(out)]) == 2  # fmt: skip


def test_a_faulty_serve_toml_is_refused_before_anything_is_made(site: Site) -> None:
    (site.context.layout.pins / "1.2.3/serve.toml").write_text("schema = 2\n")
    with pytest.raises(PinsFault, match=r"serve\.toml has"):
        WheelhouseStage().inputs(site.context, site.results())


def test_its_lock_has_bare_names_and_the_hashes_of_what_lies_there(site: Site) -> None:
    """cases.md 10: lock, wheelhouse and install.py agree."""
    folder = site.gather()
    files = list(locked_files(read_lock(folder / "pylock.toml"), site.context.runtime))
    assert {f.filename for f in files} == {w.name for w in folder.glob("*.whl")}
    for file in files:
        digest = hashlib.sha256((folder / file.filename).read_bytes()).hexdigest()
        assert digest == file.sha256
    assert "/" not in "".join(
        w.path or "" for p in read_lock(folder / "pylock.toml").packages for w in p.wheels or ()
    )


def test_bill_of_materials(site: Site) -> None:
    text = (site.gather() / "sbom.cdx.json").read_text()
    bom = json.loads(text)
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    components = {c["name"]: c for c in bom["components"]}
    assert len(components) == 7
    for entry in site.manifest.wheels:
        assert components[entry.distribution]["hashes"] == [
            {"alg": "SHA-256", "content": entry.sha256}
        ]
    (ancestor,) = components["torch"]["pedigree"]["ancestors"]
    assert ancestor["hashes"][0]["content"] != components["torch"]["hashes"][0]["content"]
    assert "no binary was changed" in components["torch"]["pedigree"]["notes"]
    assert "pedigree" not in components["uv"]
    (site.context.layout.wheelhouse / "manifest.json").unlink()
    shutil.rmtree(site.context.layout.wheelhouse)
    assert (site.gather() / "sbom.cdx.json").read_text() == text


def test_sbom_fits_the_schema_of_cyclonedx(site: Site) -> None:
    import cyclonedx.schema
    from referencing import Registry, Resource

    folder = Path(cyclonedx.schema.__file__).parent / "_res"
    schemas = {
        path.name: json.loads(path.read_text())
        for path in (
            folder / "bom-1.6.SNAPSHOT.schema.json", folder / "spdx.SNAPSHOT.schema.json",
            folder / "jsf-0.82.SNAPSHOT.schema.json",
        )
    }  # fmt: skip
    registry = Registry().with_resources(
        (s["$id"], Resource.from_contents(s)) for s in schemas.values()
    )
    bom = json.loads((site.gather() / "sbom.cdx.json").read_text())
    schema = schemas["bom-1.6.SNAPSHOT.schema.json"]
    jsonschema.Draft7Validator(schema, registry=registry).validate(bom)


@pytest.mark.parametrize("how", ["truncated", "altered", "removed"])
def test_only_the_damaged_wheel_is_fetched_again(site: Site, how: str) -> None:
    folder = site.gather()
    name = "nvidia_nccl_cu13-2.30.4-py3-none-any.whl"
    good = (folder / name).read_bytes()
    if how == "truncated":
        (folder / name).write_bytes(good[:-9])
    elif how == "altered":
        (folder / name).write_bytes(good[:40] + b"X" + good[41:])
    else:
        (folder / name).unlink()
    site.fetched.clear()
    stage = WheelhouseStage()
    assert not stage.standing(site.context, {"manifest": ""})
    site.gather()
    # Removed: the cache has it still. Damaged: the cache's is the same file, so it is not used.
    assert site.fetched == ([] if how == "removed" else [name])
    assert (folder / name).read_bytes() == good


def test_wheels_of_an_earlier_wheelhouse_are_taken_over(site: Site) -> None:
    """The cache was cleaned, the wheelhouse is there: nothing but repaired originals is fetched."""
    site.gather()
    shutil.rmtree(site.context.layout.cache)
    site.fetched.clear()
    site.gather()
    assert sorted(name.split("-")[0] for name in site.fetched) == [
        "nvidia_cutlass_dsl_libs_base", "torch",
    ]  # fmt: skip


def test_offline_says_what_is_missing_and_keeps_the_wheelhouse(site: Site) -> None:
    before = (site.gather() / "manifest.json").read_text()
    name = "uv-0.0.1-py3-none-any.whl"
    (site.context.layout.wheelhouse / name).write_bytes(b"damaged")
    offline = replace(site.context, options=replace(site.context.options, offline=True))
    with pytest.raises(NetworkFault) as caught:
        replace(site, context=offline).gather()
    assert name in caught.value.cause
    assert (site.context.layout.wheelhouse / "manifest.json").read_text() == before


def test_two_owners_of_one_file_are_refused(site: Site) -> None:
    """cases.md 7: what no `yields` covers."""
    make_wheel(site.index, {"d/y.so": b"other"}, name="clash")
    site.lock()
    with pytest.raises(FamilyFault) as caught:
        site.gather()
    assert "d/y.so" in caught.value.details[0]
    assert not (site.context.layout.wheelhouse / "manifest.json").exists()


def test_unmet_requirement_is_refused(site: Site) -> None:
    make_wheel(site.index, {}, name="needy", requires=["torch==2.9", "absent; extra == 'x'"])
    site.lock()
    with pytest.raises(WheelFault) as caught:
        site.gather()
    assert caught.value.details == ("needy 1.0 wants torch==2.9, the set has 2.11.0",)


def test_our_wheel_for_another_platform_is_named(site: Site) -> None:
    """cases.md 22."""
    dist = site.context.layout.build / "dist/1.2.3-linux-aarch64-smoke"
    other = VLLM.replace("linux_aarch64", "linux_x86_64")
    (dist / VLLM).rename(dist / other)
    results = {**RESULTS, "compile": {**RESULTS["compile"], "wheel": other}}
    results["repair"] = {**RepairStage().run(site.context, results), "fingerprint": "f"}
    with pytest.raises(WheelFault) as caught:
        WheelhouseStage().run(site.context, results)
    assert caught.value.details == (f"{other}: tagged linux_x86_64, wanted linux-aarch64-cp312",)


def test_folder_of_somebody_else_is_not_replaced(site: Site) -> None:
    site.context.layout.wheelhouse.mkdir()
    (site.context.layout.wheelhouse / "thesis.txt").write_text("keep")
    with pytest.raises(CheckFailed, match=r"thesis\.txt"):
        site.gather()
