"""Our series and a real release: the matrix that docs/rebasing.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm121.fetch import Cache
from sm121.gitseries import SeriesRepository
from sm121.lock.pylock import LockedFile, Target
from sm121.rebase.memory import Memory
from sm121.rebase.render import _SHORT
from sm121.rebase.verdict import Judge
from sm121.rebase.walk import Walk, prepare
from sm121.source.vllm import from_sdist
from sm121.ui import Ui

# The page is about moving this one.
pytestmark = pytest.mark.stacks("0.26.0")
RELEASE = "0.28.0"
NEWER = LockedFile(
    distribution="vllm", version=RELEASE, filename=f"vllm-{RELEASE}.tar.gz", size=0,
    sha256="ac96dd0ec5be9c13f2aa4bfb50498c4727110406f6e4980b58a4097e4d18634a",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(real, download_cache: Cache, ship_target: Target, tmp_path_factory) -> Iterator[dict]:
    repository = SeriesRepository(real.repository.path)
    onto = from_sdist(
        NEWER,
        None,
        repository,
        cache=download_cache,
        target=ship_target,
        offline=False,
        ui=Ui(quiet=True),
    )
    folder = tmp_path_factory.mktemp("memory")
    walk = Walk(
        judge=Judge(repository=repository, base=real.base, onto=onto, history=False),
        memory=Memory(own=folder, shared=folder, repository=repository),
        now=repository.tree_of(onto), before=repository.tree_of(real.base),
    )  # fmt: skip
    yield {row.name: row for row in walk.rest(prepare(repository, real.base, real.series))}
    repository.close()


@pytest.mark.timeout(600)
def test_matrix_is_what_the_page_says(rows, root: Path) -> None:
    page = (root / "docs/rebasing.md").read_text()
    header, *table = [
        line for line in page.splitlines() if line.startswith("| ") and line.count("|") == 6
    ]
    column = [cell.strip() for cell in header.split("|")].index(RELEASE)
    said = {
        re.sub("`", "", c[1]).strip(): c[column].strip()
        for c in (line.split("|") for line in table)
    }
    assert said == {name: _SHORT[row.verdict] for name, row in rows.items()}


def test_clamp_that_upstream_took_over_is_seen(rows) -> None:
    """Upstream 0.28 has our maximum(…, 0), with other comments around it."""
    hunks = [h for h in rows["ragged-indexer"].hunks if h.state == "superseded"]
    assert any(
        "tl.maximum(seq_len - max_decode_len + local_idx + 1, 0)" in "".join(h.upstream)
        for h in hunks
    )

    assert any("upstream has what it adds at line 87" in h.text for h in hunks)


def test_all_that_a_hunk_meets_is_shown(rows) -> None:
    """Upstream 0.28 reworded the comment above the width and computes it another way."""
    (hunk,) = (h for h in rows["shape-dispatch"].hunks if h.state == "conflict")
    assert "get_dspark_swa_index_width(" in "".join(hunk.upstream)
    assert "_get_noncausal_index_width()" in "".join(hunk.ours)


def test_dependence_is_named(rows) -> None:
    assert rows["gb10-components"].depends_on == ("build-selection", "gb10-kernels")
    assert rows["jit-attention"].depends_on == ("shape-dispatch",)
