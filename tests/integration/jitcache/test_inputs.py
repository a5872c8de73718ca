"""Another FlashInfer in the pins makes the stage run again; a lock that lacks one stops it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from sm121.context import Context, Options
from sm121.errors import LockStale, UsageFault
from sm121.jitcache.prepare import open_workshop
from sm121.jitcache.stage import JitCacheStage
from sm121.jitcache.wheel import wheel_name
from sm121.lock.pylock import LockedFile, lock_path, make_lock, write_lock
from sm121.lock.resolve import REQUIREMENT_FILES, inputs_digest
from sm121.pins.load import load_stack
from sm121.state import Record, fingerprint, why_changed
from sm121.toolkit.stage import host_interpreter
from support.jitcache import listing
from support.stacks import write_stack

DIGESTS = dict.fromkeys(REQUIREMENT_FILES, "d")
RESULTS = {
    "patch": {"requirement_files": DIGESTS},
    "environment": {"fingerprint": "e"},
    "toolkit": {"fingerprint": "t"},
}


def locked(name: str, version: str) -> LockedFile:
    filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    sha256 = hashlib.sha256(filename.encode()).hexdigest()
    return LockedFile(distribution=name, version=version, filename=filename, sha256=sha256, size=1)


def prepared(small: Context, flashinfer: str, *more: str) -> Context:
    """Pins with this FlashInfer, and locks of them for the target and the build host."""
    data = listing()
    data["family"]["flashinfer-python"]["version"] = flashinfer
    write_stack(small.layout.pins, data)
    context = replace(
        small, stack=load_stack(small.layout.pins, "1.2.3"), options=Options(profile="kernels")
    )
    names = {"flashinfer-python": flashinfer, "apache-tvm-ffi": "0.1.9", "numpy": "2.0"}
    files = [locked(name, version) for name, version in names.items() if name not in more]
    for target in (context.runtime, host_interpreter(context)[1]):
        lock = make_lock(
            files, python=target.python, inputs=inputs_digest(context.stack, "family", DIGESTS)
        )
        write_lock(lock, lock_path(context.layout.pins, "1.2.3", "family", target))
    return context


def test_another_flashinfer_runs_the_stage_and_names_the_wheel(small: Context) -> None:
    stage = JitCacheStage()
    before = prepared(small, "0.6.17")
    inputs = stage.inputs(before, RESULTS)
    record = Record(fingerprint=fingerprint(inputs), inputs=inputs, result={}, log="", seconds=0)
    assert stage.inputs(before, RESULTS) == inputs
    after = prepared(small, "0.6.18.post1")
    reason = why_changed(record, stage.inputs(after, RESULTS))
    assert "wheel flashinfer-python changed" in reason
    assert "version changed" in reason
    named = wheel_name(stage.inputs(after, RESULTS)["version"], "aarch64")
    assert named.startswith("flashinfer_jit_cache-0.6.18.post1+sm121.")


def test_pins_that_are_not_the_locks_stop_it(small: Context) -> None:
    context = prepared(small, "0.6.17")
    data = listing()
    data["family"]["flashinfer-python"]["version"] = "0.6.18"
    write_stack(small.layout.pins, data)
    changed = replace(context, stack=load_stack(small.layout.pins, "1.2.3"))
    with pytest.raises(LockStale):
        JitCacheStage().inputs(changed, RESULTS)


def test_an_import_that_is_not_locked_is_named(small: Context) -> None:
    with pytest.raises(LockStale, match="has no numpy"):
        JitCacheStage().inputs(prepared(small, "0.6.17", "numpy"), RESULTS)


def test_without_a_toolkit_the_next_command_is_said(small: Context) -> None:
    with pytest.raises(UsageFault, match="no toolkit") as raised:
        open_workshop(prepared(small, "0.6.17"))
    assert "--profile kernels --target linux-aarch64" in raised.value.remedy
