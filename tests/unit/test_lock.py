"""Lock files: tags, choice, round trip, and the committed ones."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging import tags
from packaging.pylock import Pylock

from sm121.errors import LockStale, PinsFault, ToolFailed
from sm121.index import IndexFile
from sm121.lock.pylock import (
    LockedFile,
    Target,
    lock_path,
    locked_files,
    make_lock,
    read_lock,
    render_lock,
    write_lock,
)
from sm121.lock.resolve import (
    REQUIREMENT_FILES,
    _choose,
    inputs_digest,
    load_checked,
    lock_targets,
)
from sm121.pins.load import stack_names
from sm121.pins.model import Stack
from support.stacks import minimal

SPARK = Target.make("linux-aarch64", python="3.12", glibc="2.39")
PC = Target.make("linux-x86_64", python="3.12", glibc="2.36")
DIGESTS = dict.fromkeys(REQUIREMENT_FILES, "0" * 64)


def test_target_names() -> None:
    assert SPARK.machine == "aarch64"
    assert SPARK.tag == "linux-aarch64-cp312"
    assert SPARK.uv_platform == "aarch64-manylinux_2_39"


def test_tags_are_those_of_an_interpreter_with_that_glibc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """packaging, asked on a machine whose glibc is 2.36, is the judge."""
    monkeypatch.setattr(tags._manylinux, "_get_glibc_version", lambda: (2, 36))
    monkeypatch.setattr(tags._manylinux, "_is_compatible", lambda *_: True)
    monkeypatch.setattr(tags._manylinux, "_have_compatible_abi", lambda *_: True)
    platforms = [*tags._manylinux.platform_tags(["x86_64"]), "linux_x86_64"]
    expected = [
        *tags.cpython_tags((3, 12), platforms=platforms),
        *tags.compatible_tags((3, 12), "cp312", platforms),
    ]
    assert PC.tags() == expected


def test_aarch64_tags_begin_like_packagings_and_know_no_older_legacy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tags._manylinux, "_get_glibc_version", lambda: (2, 39))
    monkeypatch.setattr(tags._manylinux, "_is_compatible", lambda *_: True)
    monkeypatch.setattr(tags._manylinux, "_have_compatible_abi", lambda *_: True)
    theirs = list(tags._manylinux.platform_tags(["aarch64"]))
    ours = list(dict.fromkeys(t.platform for t in SPARK.tags()))
    assert ours[: len(theirs)] == theirs
    assert not {"manylinux2010_aarch64", "manylinux1_aarch64"} & set(ours)


def test_environment_is_the_targets_and_not_this_machines() -> None:
    environment = SPARK.environment()
    assert environment["platform_machine"] == "aarch64"
    assert environment["python_version"] == "3.12"
    assert environment["sys_platform"] == "linux"


# --- the choice of one wheel --------------------------------------------------------


def offer(filename: str, distribution: str = "x") -> IndexFile:
    return IndexFile(
        distribution=distribution,
        version="1.0",
        filename=filename,
        url="u",
        sha256=filename,
        size=1,
    )


@pytest.mark.parametrize(
    ("offered", "best"),
    [
        (
            ["x-1.0-cp312-cp312-manylinux_2_17_aarch64.whl", "x-1.0-cp312-cp312-manylinux_2_28_aarch64.whl"],
            "x-1.0-cp312-cp312-manylinux_2_28_aarch64.whl",
        ),
        (
            ["x-1.0-cp312-cp312-manylinux_2_40_aarch64.whl", "x-1.0-cp312-cp312-manylinux_2_39_aarch64.whl"],
            "x-1.0-cp312-cp312-manylinux_2_39_aarch64.whl",
        ),
        (
            ["x-1.0-py3-none-any.whl", "x-1.0-cp311-abi3-manylinux2014_aarch64.whl"],
            "x-1.0-cp311-abi3-manylinux2014_aarch64.whl",
        ),
        (
            ["x-1.0-cp313-cp313-manylinux_2_17_aarch64.whl", "x-1.0-py3-none-any.whl"],
            "x-1.0-py3-none-any.whl",
        ),
        (
            ["x-1.0-cp312-cp312-manylinux_2_17_x86_64.whl", "x-1.0-cp312-cp312-musllinux_1_2_aarch64.whl", "x-1.0-py3-none-any.whl"],
            "x-1.0-py3-none-any.whl",
        ),
    ],
)  # fmt: skip
def test_best_wheel_for_the_target_is_chosen(offered: list[str], best: str) -> None:
    for order in (offered, offered[::-1]):
        (chosen,) = _choose([offer(name) for name in order], SPARK)
        assert chosen.filename == best


def test_no_fitting_wheel_names_the_distribution() -> None:
    files = [
        offer("x-1.0-cp312-cp312-win_amd64.whl"),
        offer("y-1.0-py3-none-any.whl", distribution="y"),
    ]
    with pytest.raises(ToolFailed, match="No wheel of x fits linux-aarch64-cp312"):
        _choose(files, SPARK)


# --- the file -----------------------------------------------------------------------

FILES = [
    LockedFile(distribution="zz", version="2", filename="zz-2-py3-none-any.whl", sha256="2" * 64, size=2),
    LockedFile(distribution="aa", version="1", filename="aa-1-cp312-cp312-manylinux_2_28_aarch64.whl", sha256="1" * 64, size=1),
]  # fmt: skip


def test_lock_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "pylock.x.toml"
    write_lock(make_lock(FILES, python="3.12", inputs="digest"), path)
    lock = read_lock(path)
    assert sorted(locked_files(lock, SPARK), key=lambda f: f.distribution) == FILES[::-1]
    assert lock.tool == {"sm121": {"inputs": "digest"}}


def test_lock_does_not_depend_on_the_order_of_its_files() -> None:
    texts = {render_lock(make_lock(f, python="3.12", inputs="d")) for f in (FILES, FILES[::-1])}
    assert len(texts) == 1


def test_lock_of_another_platform_does_not_fit() -> None:
    lock = make_lock(FILES, python="3.12", inputs="d")
    with pytest.raises(LockStale, match="does not fit linux-x86_64-cp312"):
        list(locked_files(lock, PC))


def test_lock_of_another_python_does_not_fit() -> None:
    lock = make_lock(FILES, python="3.12", inputs="d")
    with pytest.raises(LockStale, match="cp311"):
        list(locked_files(lock, Target.make("linux-aarch64", python="3.11", glibc="2.39")))


def test_missing_lock_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(LockStale, match="does not exist") as raised:
        read_lock(tmp_path / "pylock.x.toml")
    assert "nox -s lock" in raised.value.remedy


@pytest.mark.parametrize("content", ["lock-version = ", 'lock-version = "9.0"', ""])
def test_malformed_lock_is_a_fault_of_the_pins(tmp_path: Path, content: str) -> None:
    path = tmp_path / "pylock.x.toml"
    path.write_text(content)
    with pytest.raises(PinsFault, match="not a PEP 751 lock"):
        read_lock(path)


# --- do lock and pins belong together? ----------------------------------------------


def altered(path: tuple[str, ...], value: object) -> Stack:
    data = minimal()
    here = data
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    return Stack.model_validate(data)


@pytest.mark.parametrize("kind", ["family", "host"])
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("family", "torch", "version"), "2.12.0"),
        (("family", "nvidia-cutlass-dsl", "extras"), []),
        (("cuda", "toolkit"), {"nvidia-cuda-nvcc": "13.5"}),
        (("overrides",), {}),
        (("targets", "linux-aarch64", "glibc"), "2.40"),
    ],
)
def test_lock_is_stale_after_a_change_of_the_pins(
    kind: str, path: tuple[str, ...], value: object
) -> None:
    before = inputs_digest(Stack.model_validate(minimal()), kind, DIGESTS)
    assert inputs_digest(altered(path, value), kind, DIGESTS) != before


@pytest.mark.parametrize("kind", ["family", "host"])
def test_lock_is_stale_after_a_change_of_its_date(kind: str) -> None:
    before = inputs_digest(Stack.model_validate(minimal()), kind, DIGESTS)
    later = altered(("lock-date",), "2027-01-01T00:00:00Z")
    assert inputs_digest(later, kind, DIGESTS) != before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("family", "torch", "reason"), "another"),
        (("vllm", "commit"), "d" * 40),
        (("components", "new"), "x"),
    ],
)
def test_reasons_and_other_pins_leave_the_lock_alone(path: tuple[str, ...], value: object) -> None:
    before = inputs_digest(Stack.model_validate(minimal()), "family", DIGESTS)
    assert inputs_digest(altered(path, value), "family", DIGESTS) == before


def test_patched_requirements_count_for_what_runs_and_not_for_what_builds() -> None:
    stack = Stack.model_validate(minimal())
    other = {**DIGESTS, REQUIREMENT_FILES[0]: "1" * 64}
    assert inputs_digest(stack, "family", other) != inputs_digest(stack, "family", DIGESTS)
    assert inputs_digest(stack, "host", other) == inputs_digest(stack, "host", DIGESTS)


def test_stale_lock_is_refused_by_name(tmp_path: Path) -> None:
    stack = Stack.model_validate(minimal())
    path = lock_path(tmp_path, "1.2.3", "host", SPARK)
    path.parent.mkdir()
    write_lock(make_lock(FILES, python="3.12", inputs=inputs_digest(stack, "host", DIGESTS)), path)
    assert isinstance(load_checked(tmp_path, "1.2.3", stack, "host", SPARK, DIGESTS), Pylock)
    changed = altered(("host", "requirements"), ["ninja", "cmake"])
    with pytest.raises(LockStale, match=r"pylock\.host-linux-aarch64-cp312\.toml") as raised:
        load_checked(tmp_path, "1.2.3", changed, "host", SPARK, DIGESTS)
    assert "nox -s lock" in raised.value.remedy


# --- the committed ones -------------------------------------------------------------


def committed(root: Path) -> list[tuple[Path, Target, str]]:
    from sm121.pins.load import load_stack

    return [
        (lock_path(root / "pins", name, kind, target), target, kind)
        for name in stack_names(root / "pins")
        for target in lock_targets(load_stack(root / "pins", name))
        for kind in ("family", "host")
    ]


def test_every_target_is_locked_and_every_file_has_hash_and_size(root: Path) -> None:
    assert committed(root)
    for path, target, kind in committed(root):
        files = list(locked_files(read_lock(path), target))
        assert len(files) > (20 if kind == "host" else 150), path
        for file in files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256), (path, file)
            assert file.size > 0, (path, file)
            assert file.filename.endswith(".whl"), (path, file)


def test_no_lock_lies_around_that_no_target_asks_for(root: Path) -> None:
    assert {p for p, _, _ in committed(root)} == set((root / "pins").glob("*/pylock.*.toml"))


def test_locks_name_no_host(root: Path) -> None:
    files = [*(root / "pins").glob("*/pylock.*.toml"), *(root / "requirements").iterdir()]
    assert len(files) > 8
    for file in files:
        text = file.read_text()
        assert not re.search(r"https?:|file:|--index|--find-links|pypi|\burl\b", text), file


def test_pins_name_no_package_index(root: Path) -> None:
    for file in (root / "pins").rglob("*.toml"):
        for url in re.findall(r"https?://[^\s\"']+", file.read_text()):
            assert url.startswith("https://github.com/"), (file, url)


def test_locks_hold_the_pinned_family(root: Path, stack: Stack, stack_name: str) -> None:
    for target in lock_targets(stack):
        lock = read_lock(lock_path(root / "pins", stack_name, "family", target))
        locked = {p.name: str(p.version) for p in lock.packages}
        for name, pin in stack.family.items():
            assert locked.get(name) == pin.version, (target.tag, name)
        for name, version in stack.cuda.toolkit.items():
            assert locked.get(name) == version, (target.tag, name)


def test_cuda13_libraries_of_cutlass_dsl_are_locked(
    root: Path, stack: Stack, stack_name: str
) -> None:
    """cases.md 8: an override without the extra loses them in silence."""
    for target in lock_targets(stack):
        lock = read_lock(lock_path(root / "pins", stack_name, "family", target))
        locked = {p.name: str(p.version) for p in lock.packages}
        wanted = stack.family["nvidia-cutlass-dsl"].version
        assert locked.get("nvidia-cutlass-dsl-libs-cu13") == wanted, target.tag


def test_requirements_of_the_pipeline_are_hashed(root: Path) -> None:
    for name in ("runtime", "dev"):
        text = (root / f"requirements/{name}.lock").read_text()
        entries = re.findall(r"^[\w.-]+(?:\[[\w,]+\])?==\S+", text, re.MULTILINE)
        assert len(entries) > 10
        for block in re.split(r"^(?=[\w.-]+(?:\[[\w,]+\])?==)", text, flags=re.MULTILINE)[1:]:
            assert "--hash=sha256:" in block, block


def test_every_dependency_of_the_project_is_locked(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    wanted = [re.match(r"[\w.-]+", d)[0].lower() for d in project["project"]["dependencies"]]
    runtime = (root / "requirements/runtime.lock").read_text().lower()
    dev = (root / "requirements/dev.lock").read_text().lower()
    groups = project["dependency-groups"]
    for name in wanted:
        assert re.search(rf"^{name}==", runtime, re.MULTILINE), name
    for dependency in [*groups["test"], *groups["lint"]]:
        name = re.match(r"[\w.-]+", dependency)[0].lower()
        assert re.search(rf"^{name}(\[\w+\])?==", dev, re.MULTILINE), name
