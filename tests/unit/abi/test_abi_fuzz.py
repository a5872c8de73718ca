"""10,000 mutated ELF files, fatbins and zip archives: every one is read or refused, in time.

Seeded, so that a failure can be repeated: its message has the seed and the mutation's number.
"""

import io
import random
import resource
import time
import zipfile

import pytest
from make import Sym, elf, fatbin

from sm121.abi.archive import Archive
from sm121.abi.scan import scan_elf, scan_wheel
from sm121.abi.source import BytesSource, Malformed

SEED = 121
# The slowest honest file of this size takes a millisecond; a hang takes forever.
SLOWEST_S = 1.0
GROWTH_KIB = 200_000

SYMBOLS = [
    Sym(name="memcpy", version="GLIBC_2.17", library="libc.so.6"),
    Sym(name="_ZN3c105errorEv"),
    Sym(name="weak", weak=True),
    *(Sym(name=f"out{n}", defined=True, version="V1" if n % 2 else "") for n in range(20)),
]
FATBIN = fatbin(["sm_121a", "compute_80"], ["sm_75"], ["sm_120f"]) + bytes(32)
ELVES = [
    elf(SYMBOLS, soname="libx.so", needed=["liby.so", "libc.so.6"], runpath="$ORIGIN",
        needs={"libm.so.6": ["GLIBC_2.29"]}, fatbin=FATBIN, build_id=b"12345678", gnu_hash=h)
    for h in (True, False)
]  # fmt: skip
EDGES = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite with edge values, cut, grow, or copy a piece elsewhere."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        kind = rng.randrange(6)
        at = rng.randrange(max(1, len(out)))
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            width = rng.choice((1, 2, 4, 8))
            out[at : at + width] = (rng.choice(EDGES) & (256**width - 1)).to_bytes(width, "little")
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = bytes(rng.randrange(64))
        elif kind == 4:
            size = rng.randrange(64)
            source = rng.randrange(max(1, len(out)))
            out[at : at + size] = out[source : source + size]
        elif out:
            out[at] = rng.randrange(256)
    return bytes(out)


@pytest.fixture
def bounded():
    """Memory may not grow by more than 200 MB over a whole run."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < GROWTH_KIB, f"memory grew by {grown} KiB"


def timed(number, action):
    started = time.perf_counter()
    try:
        return action()
    except Malformed:
        return None
    except Exception as error:
        raise AssertionError(f"seed {SEED}, mutation {number}: {error!r}") from error
    finally:
        took = time.perf_counter() - started
        assert took < SLOWEST_S, f"seed {SEED}, mutation {number} took {took:.1f} s"


def test_elf(bounded):
    rng = random.Random(SEED)
    outcomes = {"read": 0, "refused": 0}
    for number in range(5000):
        data = mutate(rng.choice(ELVES), rng)
        found = timed(number, lambda data=data: scan_elf(BytesSource(data), "x.so"))
        outcomes["refused" if found.damage else "read"] += 1
    assert min(outcomes.values()) > 200, f"the mutations hit nothing: {outcomes}"


def test_fatbin(bounded):
    rng = random.Random(SEED + 1)
    whole = ELVES[0]
    at = whole.index(FATBIN[:16])
    outcomes = {"read": 0, "refused": 0}
    for number in range(2500):
        changed = mutate(FATBIN, rng)[: len(FATBIN)].ljust(len(FATBIN), b"\0")
        data = whole[:at] + changed + whole[at + len(FATBIN) :]
        found = timed(number, lambda data=data: scan_elf(BytesSource(data), "x.so"))
        outcomes["refused" if found.damage else "read"] += 1
    assert min(outcomes.values()) > 200, f"the mutations hit nothing: {outcomes}"


def test_zip(bounded, tmp_path):
    rng = random.Random(SEED + 2)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/a.so", ELVES[0])
        archive.writestr("x/b.py", "pass\n" * 400)
        archive.writestr("x-1.dist-info/RECORD", "x/a.so,sha256=abc,1\n")
        archive.writestr("x-1.dist-info/METADATA", "Name: x\nVersion: 1\n\nlong\n")
    whole = buffer.getvalue()
    path = tmp_path / "x-1-cp312-cp312-manylinux_2_28_aarch64.whl"
    outcomes = {"read": 0, "refused": 0}
    for number in range(2500):
        path.write_bytes(mutate(whole, rng))
        found = timed(number, lambda: scan_wheel(path, "0" * 64, spool=tmp_path))
        damaged = found.damage or any(b.damage for b in found.binaries)
        outcomes["refused" if damaged else "read"] += 1
        timed(number, lambda: everything(path))
    assert min(outcomes.values()) > 100, f"the mutations hit nothing: {outcomes}"
    assert len(list(tmp_path.iterdir())) == 1, "something was written beside the wheel"


def everything(path):
    archive = Archive(path)
    try:
        for member in archive.members:
            for _ in archive.chunks(member):
                pass
    finally:
        archive.close()
