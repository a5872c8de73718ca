"""What manifest.json says of FlashInfer's modules, and where the wheel goes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import jsonschema
import pytest

from sm121.context import Context, Options
from sm121.jitcache.stage import JitCacheStage
from sm121.pins.load import load_stack
from sm121.wheelhouse.describe import jit_cache_entry
from sm121.wheelhouse.manifest import SCHEMA_FILE
from sm121.wheelhouse.stage import jit_cache
from support.jitcache import listing
from support.stacks import write_stack

NAME = "flashinfer_jit_cache-0.6.17+sm121.abcdef12-py3-none-linux_aarch64.whl"
FILE = "flashinfer_jit_cache/jit_cache/attention/attention.so"
FACTS = {"file": FILE, "bytes": 7, "codes": {"sm_121a": 5}, "needed": ["libc.so.6"]}
MADE = {"jit-cache": {"wheel": NAME, "sha256": "x", "modules": {"attention": FACTS}}}


@pytest.fixture
def kernels(small: Context) -> Context:
    write_stack(small.layout.pins, listing())
    return replace(
        small, stack=load_stack(small.layout.pins, "1.2.3"), options=Options(profile="kernels")
    )


def test_modules_with_reason_and_what_is_left(kernels: Context) -> None:
    entry = jit_cache_entry(kernels, MADE)
    assert entry is not None
    assert (entry.wheel, entry.flashinfer) == (NAME, "0.6.17")
    module = entry.modules["attention"]
    assert (module.bytes, module.codes, module.reason) == (
        7, {"sm_121a": 5}, "what attention is for",
    )  # fmt: skip
    assert entry.at_first_use == {"moe": "what moe is for"}
    schema = json.loads(SCHEMA_FILE.read_text())
    part = {"$ref": "#/$defs/JitCacheEntry", "$defs": schema["$defs"]}
    jsonschema.validate(json.loads(entry.model_dump_json()), part)


def test_its_absence_is_named(kernels: Context) -> None:
    without = replace(kernels, options=Options(profile="smoke"))
    entry = jit_cache_entry(without, {})
    assert entry is not None
    assert entry.wheel is None
    assert set(entry.at_first_use) == {"attention", "moe"}


def test_a_stack_without_modules_says_nothing(small: Context) -> None:
    assert jit_cache_entry(small, {}) is None


def test_the_wheel_goes_into_the_folder(kernels: Context, tmp_path) -> None:
    dist = JitCacheStage().dist(kernels)
    dist.mkdir(parents=True)
    (dist / NAME).write_bytes(b"the modules")
    (entry,) = jit_cache(kernels, MADE, tmp_path)
    assert (tmp_path / NAME).read_bytes() == b"the modules"
    assert (entry.distribution, entry.origin) == ("flashinfer-jit-cache", "built")
    assert entry.version == "0.6.17+sm121.abcdef12"
    assert entry.sha256 == hashlib.sha256(b"the modules").hexdigest()
    assert entry.libraries[FILE].needed == ("libc.so.6",)
    assert jit_cache(kernels, {}, tmp_path) == []
