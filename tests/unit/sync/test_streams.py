"""Division of files over streams."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sm121.sync.streams import divide

SIZES = st.dictionaries(st.text("abc", min_size=1, max_size=6), st.integers(0, 1000), max_size=30)


@given(SIZES, st.integers(1, 9))
def test_every_file_once_and_no_empty_stream(sizes: dict[str, int], streams: int) -> None:
    shares = divide(sizes, streams)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert all(shares)
    assert len(shares) <= streams
    loads = [sum(sizes[n] for n in share) for share in shares]
    # Longest processing time first: no stream is over the mean by more than its last file.
    if sizes:
        assert max(loads) <= sum(sizes.values()) / streams + max(sizes.values())


def test_sizes_of_the_real_wheelhouse() -> None:
    """The nine largest of 196 wheels (MB); the rest is small."""
    large = [531, 423, 366, 214, 213, 201, 188, 170, 146]
    sizes = {f"large{n}": size for n, size in enumerate(large)}
    sizes |= {f"small{n}": 6 for n in range(187)}
    for streams, least in ((2, 0.99), (4, 0.99), (6, 0.99), (8, 0.8)):
        loads = [sum(sizes[n] for n in share) for share in divide(sizes, streams)]
        assert sum(sizes.values()) / streams / max(loads) >= least
