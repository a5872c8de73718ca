"""`apply` then `export` is the identity, whatever a patch does to whatever files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sm121.files import sha256_file
from sm121.gitimport import ImportedFile
from sm121.gitrepo import Author
from sm121.gitseries import SeriesRepository
from sm121.patches.apply import apply_series
from sm121.patches.export import differences, export_commit, write
from sm121.patches.series import load_series

DATE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
AUTHORS = [
    Author(name="Ada", email="ada@example.invalid", date="Fri, 2 Jan 2026 03:04:05 +0530"),
    Author(name="O'Brien, Pat (PB)", email="o@example.invalid", date="Fri, 2 Jan 2026 03:04:05 +0000"),
    Author(name="Zoë Ünal", email="z@example.invalid", date="Fri, 2 Jan 2026 03:04:05 -0800"),
]  # fmt: skip
LINE = st.one_of(
    st.sampled_from([b"", b"def f():", b"    return 1", b"x" * 200, b"-- ", b"--- a/x", b"+++ b/x",
                     b"From nobody", b"diff --git a/x b/x", b"gr\xfc\xdfe", b"\xff\xfe", b"a\rb",
                     b"\t tab \t", b"@@ -1 +1 @@", b">From x", b"<<<<<<< upstream"]),
    st.binary(max_size=12).filter(lambda b: b"\n" not in b and b"\0" not in b),
)  # fmt: skip
END = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n"])
TEXT = st.builds(
    lambda lines, last: b"".join(line + end for line, end in lines) + last,
    st.lists(st.tuples(LINE, END), max_size=25), st.sampled_from([b"", b"", b"no end"]),
)  # fmt: skip
BINARY = st.binary(max_size=60).map(lambda b: b"\0" + b)
PATHS = ["a.txt", "b.py", "sub/c.txt", "sub/deep/d", "with space", "ümlaut.txt", 'quo"te',
         "tab\there", "new\nline", "-dash", ".gitattributes", "back\\slash"]  # fmt: skip
MODE = st.sampled_from(["100644", "100644", "100755"])
FILE = st.tuples(MODE, st.one_of(TEXT, TEXT, BINARY))
LINK = st.tuples(st.just("120000"), st.sampled_from([b"a.txt", b"../x"]))
TREE = st.dictionaries(st.sampled_from(PATHS), st.one_of(FILE, FILE, FILE, LINK), min_size=1)


@st.composite
def edited(draw: st.DrawFn, tree: dict[str, tuple[str, bytes]]) -> dict[str, tuple[str, bytes]]:
    """Another tree: files edited, renamed, removed, added, made executable."""
    after = dict(tree)
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3, unique=True)):
        mode, data = after.get(path, ("100644", b""))
        match draw(st.sampled_from(["edit", "rename", "mode", "remove", "replace", "last"])):
            case "edit" if mode != "120000":
                lines = data.split(b"\n")
                at = draw(st.integers(0, len(lines)))
                lines[at : at + draw(st.integers(0, 3))] = draw(st.lists(LINE, max_size=3))
                after[path] = (mode, b"\n".join(lines))
            case "rename" if path in after:
                after[draw(st.sampled_from(PATHS)) + ".new"] = after.pop(path)
            case "mode" if path in after and mode != "120000":
                after[path] = ("100644" if mode == "100755" else "100755", data)
            case "remove" if len(after) > 1:
                after.pop(path, None)
            case "last" if path in after and mode != "120000":
                after[path] = (mode, data[:-1] if data.endswith(b"\n") else data + b"\n")
            case _:
                after[path] = draw(st.one_of(FILE, LINK))
    return after


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeriesRepository]:
    repository = SeriesRepository(tmp_path_factory.mktemp("fuzz") / "own.git")
    yield repository
    repository.close()


def stored(repository: SeriesRepository, tree: dict[str, tuple[str, bytes]]) -> str:
    files = [ImportedFile(path=p, mode=m, data=d) for p, (m, d) in tree.items()]
    return repository.import_files(files, message="x\n", date=DATE)


SUBJECT = st.sampled_from([
    "[Bugfix] Short", "A subject that is so long that a mail's header has to be folded, and then some more",
    "Größe – 大小 and more of it so that the encoded header must be folded as well", "ends with dot.",
])  # fmt: skip
BODY = st.sampled_from(["", "One line.", "Two\n\nparagraphs\n  indented", "Zoë\n\nSigned-off-by: A <a@b>",
                        ">From the start\nFrom here: x", "a: b"])  # fmt: skip


# No shrinking in CI: with real git it takes minutes.
EXAMPLES = int(os.environ.get("SM121_TEST_EXAMPLES", "30"))


@pytest.mark.timeout(60 + 10 * EXAMPLES)
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
@given(data=st.data())
def test_apply_then_export_is_the_identity(repository: SeriesRepository, data) -> None:
    tree = data.draw(TREE)
    base = parent = stored(repository, tree)
    patches = []
    for number in range(data.draw(st.integers(1, 3))):
        after = data.draw(edited(tree))
        commit = stored(repository, after)
        if repository.tree_of(commit) == repository.tree_of(parent):
            continue
        author = data.draw(st.sampled_from(AUTHORS))
        message = f"{data.draw(SUBJECT)}\n\n{data.draw(BODY)}".rstrip() + "\n"
        parent = repository.commit_tree(
            repository.tree_of(commit), parents=(parent,), message=message, author=author,
            date=author.date,
        )  # fmt: skip
        patches.append(export_commit(repository, parent, name=f"patch-{'abc'[number]}"))
        tree = after
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(repository, patches, folder)
        applied = apply_series(repository, base, load_series(folder))
        # The files give the commits' trees, and the commits give the files.
        assert repository.tree_of(applied.commit) == repository.tree_of(parent)
        assert [p.offset for p in applied.patches] == [0] * len(patches)
        before = {f.name: sha256_file(f) for f in folder.iterdir()}
        again = [export_commit(repository, p.commit, name=p.name) for p in applied.patches]
        assert [p.data for p in again] == [p.data for p in patches]
        assert differences(repository, again, folder) == []
        assert {f.name: sha256_file(f) for f in folder.iterdir()} == before
