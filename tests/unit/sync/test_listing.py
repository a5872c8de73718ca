"""RELEASE: names that could lead out of a release's folder, and the id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm121.sync.node.listing import check_name, parse_listing, release_id, render_listing
from sm121.sync.node.refusal import Refused

SHA = "a" * 64


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "..", "../x", "serve/../../x", "serve/..", "a/b/c", ".hidden", "serve/.x", "", "a//b",
     "a/", "a\0b", "a\nb", "a\\b", "-oProxyCommand", "env", "env/bin", "serve", "serve/x", "RELEASE", "RELEASE.sig", "~root", "a b", "$x"],
)  # fmt: skip
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(Refused, match="not a name that a release may hold"):
        check_name(name)


@pytest.mark.parametrize(
    "name",
    ["torch-2.11.0-1sm121-cp312-cp312-manylinux_2_28_x86_64.whl", "vllm-0.26.0+sm121.smoke-cp312-cp312-linux_aarch64.whl",
     "head/serve.env", "worker/sm121-worker.service", "SHA256SUMS", "a-1!2.0-py3-none-any.whl"],
)  # fmt: skip
def test_names_that_wheelhouses_have(name: str) -> None:
    assert check_name(name) == name


@given(st.text(max_size=40))
def test_no_accepted_name_leaves_the_folder(name: str) -> None:
    from pathlib import PurePosixPath

    try:
        check_name(name)
    except Refused:
        return
    path = PurePosixPath("/release") / name
    assert path.is_relative_to("/release")
    assert ".." not in path.parts
    assert len(path.parts) <= 4


@pytest.mark.parametrize(
    "text",
    [f"{SHA} a", f"{SHA}  a\n{SHA}  a", "x  a", f"{SHA.upper()}  a", f"{SHA}  a\n\n{SHA}  b", f"{SHA}  serve\n{SHA}  serve/x"],
)  # fmt: skip
def test_lists_that_are_refused(text: str) -> None:
    with pytest.raises(Refused):
        parse_listing(text)


def test_round_trip_and_id() -> None:
    files = {"b": SHA, "a": "b" * 64}
    text = render_listing(files)
    assert parse_listing(text) == files
    assert text == render_listing(dict(reversed(files.items())))
    assert release_id(text) != release_id(render_listing({**files, "a": SHA}))
