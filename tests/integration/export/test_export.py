"""The series as a branch: edit, commit, export; and bytes that no configuration changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm121.errors import PatchFailed
from sm121.gitseries import SeriesRepository
from sm121.patches.apply import apply_series
from sm121.patches.export import differences, export_commit, write
from sm121.patches.series import listing, load_series
from support.gits import BODY, Work
from support.rebasing import lines


@pytest.fixture
def edited(desk):
    """A project whose series is open for editing."""
    desk.project.patch("first", {"a.txt": lines(l10="ours")})
    desk.project.patch("second", {"b.txt": lines(l10="ours")}, subject="[Bugfix] Größe – 大小")
    said = desk.run("patch", "--edit")
    assert "one commit per patch" in said
    return desk


def branch(desk) -> Work:
    return Work(desk.project.root / "build/series/1.2.3")


def test_export_after_apply_changes_nothing(edited) -> None:
    before = edited.project.data()
    assert branch(edited).git("log", "--format=%s") .splitlines()[:2] == [
        "[Bugfix] Größe – 大小", "[Test] Do first",
    ]  # fmt: skip
    assert "no file(s) changed" in edited.run("export")
    assert "no file(s) changed" in edited.run("export", "--check")
    assert edited.project.data() == before


def test_amended_commit_is_the_patch(edited) -> None:
    work = branch(edited)
    work.write({"b.txt": lines(l10="ours, better")})
    work.git("commit", "-q", "-a", "--amend", "--no-edit")
    said = edited.run("export", "--check", code=1)
    assert "second.patch: changed" in said
    assert "first.patch" not in said
    edited.run("export")
    text = (edited.project.folder / "second.patch").read_text()
    assert "+ours, better" in text
    assert "Patch-Name" not in text
    edited.run("export", "--check")
    edited.lint()


def test_fixup_is_folded_in_by_autosquash(edited) -> None:
    work = branch(edited)
    work.write({"a.txt": lines(l10="ours, fixed")})
    work.git("commit", "-q", "-a", "--fixup", "HEAD~1")
    assert "not folded in yet" in edited.run("export", code=1)
    work.git("-c", "sequence.editor=true", "rebase", "-q", "-i", "--autosquash", "HEAD~3")
    assert "first.patch: changed" in edited.run("export")
    assert "+ours, fixed" in (edited.project.folder / "first.patch").read_text()


def test_new_removed_and_reordered_commits(edited) -> None:
    work = branch(edited)
    work.commit({"c.txt": lines(l10="x")}, f"[Bugfix][SM12x] Do a third thing, at last\n\n{BODY}")
    said = edited.run("export")
    assert "do-a-third-thing-at.patch: new" in said
    order = "# The order.\nfirst.patch\nsecond.patch\ndo-a-third-thing-at.patch\n"
    assert (edited.project.folder / "series").read_text() == order
    work.git("-c", "sequence.editor=sed -i -e 1{h\\;d} -e 2G", "rebase", "-q", "-i", "HEAD~3")
    edited.run("export")
    assert (edited.project.folder / "series").read_text().split()[3:5] == [
        "second.patch", "first.patch",
    ]  # fmt: skip
    work.git("reset", "-q", "--hard", "HEAD~1")
    assert "do-a-third-thing-at.patch: gone" in edited.run("export")
    assert not (edited.project.folder / "do-a-third-thing-at.patch").exists()
    edited.lint()


def test_what_is_not_committed_is_neither_exported_nor_lost(edited) -> None:
    work, before = branch(edited), edited.project.data()
    work.write({"a.txt": lines(l10="loose"), "new.txt": "x\n"})
    said = edited.run("export", code=1)
    assert "2 file(s)" in said
    assert "new.txt" in said
    assert edited.project.data() == before
    assert "is left as it is" in edited.run("patch", "--edit")
    assert (work.path / "a.txt").read_text() == lines(l10="loose")


def test_what_is_no_patch_is_refused_with_the_commit(edited) -> None:
    work = branch(edited)
    for make, word in (
        (lambda: work.git("commit", "-q", "--allow-empty", "-m", "Nothing"), "changes nothing"),
        (lambda: work.commit({"c.txt": "x\n"}, "小"), "no usable name"),
        (lambda: work.commit({"c.txt": "x\n"}, "[Test] Do\n\nPatch-Name: first"), "would be first.patch"),
        (lambda: work.commit({"c.txt": "x\n"}, "Do\n\nabove\n---\nbelow"), "can't be written"),
    ):  # fmt: skip
        make()
        assert word in edited.run("export", code=1)
        work.git("reset", "-q", "--hard", "HEAD~1")
    work.git("switch", "-q", "--detach", "HEAD~1")
    assert "is not on its branch" in edited.run("export", code=1)


def test_export_without_a_branch_says_how_to_get_one(desk) -> None:
    desk.project.patch("first", {"a.txt": lines(l10="ours")})
    desk.run("patch")
    assert "nox -s patch -- --edit" in desk.run("export", code=2)


HOSTILE = {
    "diff.noprefix": "true", "diff.mnemonicPrefix": "true", "diff.algorithm": "patience",
    "diff.context": "9", "diff.interHunkContext": "9", "diff.renames": "copies",
    "diff.suppressBlankEmpty": "true", "diff.indentHeuristic": "false", "diff.srcPrefix": "x/",
    "diff.statGraphWidth": "3", "diff.statNameWidth": "9", "diff.submodule": "log",
    "diff.orderFile": "order", "diff.relative": "true", "color.ui": "always", "color.diff": "always",
    "format.signature": "me", "format.subjectPrefix": "RFC", "format.numbered": "true",
    "format.attach": "true", "format.headers": "X-Me: x", "format.to": "you@example.invalid",
    "format.from": "true", "format.signOff": "true", "format.notes": "true", "format.thread": "true",
    "format.useAutoBase": "true", "format.coverLetter": "true", "format.encodeEmailHeaders": "false",
    "format.suffix": ".txt", "format.pretty": "oneline", "format.noprefix": "true",
    "core.abbrev": "5", "core.autocrlf": "true", "i18n.logOutputEncoding": "ISO-8859-1",
    "i18n.commitEncoding": "ISO-8859-1", "log.date": "iso", "log.showSignature": "true",
    "diff.external": "false", "diff.dirstat": "lines", "diff.wsErrorHighlight": "all",
    "diff.colorMoved": "zebra", "core.whitespace": "cr-at-eol", "core.pager": "false",
}  # fmt: skip


def test_no_configuration_changes_a_byte(edited, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """In the repository, where a user's `git config` in the worktree lands, and in the user's own."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for key, value in HOSTILE.items():
        branch(edited).git("config", key, value)
        branch(edited).git("config", "--file", home / ".gitconfig", key, value)
    (home / ".gitattributes").write_text("* diff=python\n")
    branch(edited).git("config", "core.attributesFile", home / ".gitattributes")
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=9")
    monkeypatch.setenv("COLUMNS", "40")
    before = edited.project.data()
    edited.run("export")
    for name, data in edited.project.data().items():
        assert data.decode() == before[name].decode(), name


def test_attributes_of_the_tree_change_no_byte(desk) -> None:
    desk.project.upstream.git("tag", "-d", "v1.2.3")
    desk.project.pins["vllm"]["commit"] = desk.project.upstream.commit(
        {".gitattributes": "*.txt -diff eol=crlf\n*.py diff=python\n", "m.py": lines()}
    )
    desk.project.upstream.git("tag", "v1.2.3")
    desk.project.repin()
    desk.project.ours.git("pull", "-q")
    path = desk.project.patch("first", {"vllm/other.py": "x = 2\n"})
    desk.run("patch", "--edit")
    work = branch(desk)
    (work.path / "a.txt").write_text(lines(l10="ours"))
    work.git("commit", "-q", "-a", "--amend", "--no-edit")
    desk.run("export")
    assert b"+ours\n" in path.read_bytes()
    assert b"GIT binary" not in path.read_bytes()


def test_binary_patch_of_another_zlib_is_left_alone(edited) -> None:
    """Compressed bytes differ between zlib builds; what they mean does not."""
    work = branch(edited)
    work.write({"bin": bytes(range(256)) * 4})
    work.git("add", "bin")
    work.git("commit", "-q", "--amend", "--no-edit")
    edited.run("export")
    path = edited.project.folder / "second.patch"
    data = path.read_bytes()
    work.git("config", "core.compression", "0")
    other = Work(work.path)
    text = other.git("format-patch", "-1", "--stdout", "--binary", "--full-index", "--zero-commit")
    start = text.index("GIT binary patch")
    foreign = data[: data.index(b"GIT binary patch")] + text[start:].encode()
    foreign = foreign[: foreign.rindex(b"\n-- \n")] + b"\n" if b"\n-- \n" in foreign else foreign
    path.write_bytes(foreign)
    assert path.read_bytes() != data
    assert "no file(s) changed" in edited.run("export")
    path.write_bytes(foreign.replace(b"[Bugfix]", b"[Other]").replace(b"=5BBugfix", b"=5BOther"))
    assert "second.patch: changed" in edited.run("export")


def test_other_width_of_the_diffstat_is_no_change(edited) -> None:
    """git 2.38 counts bytes of a name, 2.39 columns."""
    path = edited.project.folder / "first.patch"
    text = path.read_text()
    assert text.count(" a.txt | 2 +-\n") == 1
    path.write_text(text.replace(" a.txt | 2 +-\n", " a.txt  | 2 +-\n"))
    assert "no file(s) changed" in edited.run("export", "--check")
    path.write_text(text.replace("Do first", "Do another first"))
    assert "first.patch: changed" in edited.run("export", "--check", code=1)


# --- our own series -----------------------------------------------------------------


def test_our_series_is_what_export_writes(real, root: Path, stack_name: str) -> None:
    repository = SeriesRepository(real.repository.path)
    patches = [export_commit(repository, p.commit, name=p.name) for p in real.applied.patches]
    assert patches
    assert [p.data for p in patches] == [p.path.read_bytes() for p in real.series]
    assert differences(repository, patches, root / "patches/vllm" / stack_name) == []
    repository.close()


def test_hand_edited_hunk_header_is_written_anew(real, tmp_path: Path) -> None:
    """What applies only with an offset is not left as it is."""
    repository = SeriesRepository(real.repository.path)
    (commit,) = (p.commit for p in real.applied.patches if p.name == "gb10-docs")
    good = export_commit(repository, commit, name="gb10-docs")
    write(repository, [good], tmp_path)
    (tmp_path / "gb10-docs.patch").write_bytes(good.data.replace(b"\n@@ -", b"\n@@ -1", 1))
    assert [d.how for d in differences(repository, [good], tmp_path)] == ["changed"]
    write(repository, [good], tmp_path)
    applied = apply_series(repository, f"{commit}~1", load_series(tmp_path))
    assert applied.patches[0].offset == 0
    repository.close()


# --- series files -------------------------------------------------------------------

TEXT = "# Head.\n# Builds:\na.patch\nb.patch # why\n\n# Runs:\nc.patch\n"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a", "b", "c"], TEXT),
        (["a", "c"], "# Head.\n# Builds:\na.patch\n\n# Runs:\nc.patch\n"),
        (["a", "x", "b", "c"], TEXT.replace("a.patch\n", "a.patch\nx.patch\n")),
        (["x", "a", "b", "c"], TEXT.replace("a.patch\n", "x.patch\na.patch\n")),
        (["c", "a", "b"], "# Head.\n\n# Runs:\nc.patch\n# Builds:\na.patch\nb.patch # why\n"),
        ([], "# Head.\n# Builds:\n\n# Runs:\n"),
    ],
)
def test_comments_of_a_series_stay(names: list[str], wanted: str) -> None:
    assert listing(TEXT, [f"{name}.patch" for name in names]) == wanted


def test_series_that_does_not_exist_is_begun() -> None:
    assert listing("", ["b.patch", "a.patch"]) == "b.patch\na.patch\n"


def test_merge_is_no_patch(edited) -> None:
    work = branch(edited)
    work.git("switch", "-q", "-c", "side", "HEAD~1")
    work.commit({"c.txt": "side\n"}, "[Test] Side")
    work.git("switch", "-q", "series/1.2.3")
    work.git("merge", "-q", "--no-edit", "side")
    repository = SeriesRepository(edited.project.root / "build/source/vllm.git")
    with pytest.raises(PatchFailed, match="is a merge"):
        export_commit(repository, work.git("rev-parse", "HEAD"), name="x")
    repository.close()
    assert edited.run("export", code=1)
