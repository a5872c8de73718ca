"""Who we are to an index: as uv's variables and netrc say, and only to the right host."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm121.index import index_credentials


@pytest.mark.parametrize(
    ("variables", "host", "found"),
    [
        ({"UV_DEFAULT_INDEX": "https://me:p%40ss@a.example/simple"}, "a.example", ("me", "p@ss")),
        ({"UV_DEFAULT_INDEX": "https://me:p@a.example/simple"}, "b.example", None),
        ({"UV_INDEX": "https://x.example/s corp=https://t:s@c.example/s"}, "c.example", ("t", "s")),
        (
            {
                "UV_INDEX": "my-corp=https://c.example/simple",
                "UV_INDEX_MY_CORP_USERNAME": "u",
                "UV_INDEX_MY_CORP_PASSWORD": "p",
            },
            "c.example",
            ("u", "p"),
        ),
        ({"UV_INDEX_URL": "https://token@a.example/simple"}, "a.example", ("token", "")),
        ({"UV_DEFAULT_INDEX": "https://a.example/simple?x=y"}, "a.example", None),
        ({}, "a.example", None),
    ],
)
def test_variables(
    variables: dict[str, str], host: str, found: tuple[str, str] | None, tmp_path: Path
) -> None:
    nowhere = {"NETRC": str(tmp_path / "none")}
    assert index_credentials({**nowhere, **variables})(host) == found


def test_netrc(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine a.example login me password secret\n")
    file.chmod(0o600)
    find = index_credentials({"NETRC": str(file)})
    assert find("a.example") == ("me", "secret")
    assert find("b.example") is None


def test_variables_come_before_netrc(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine a.example login other password other\n")
    file.chmod(0o600)
    variables = {"NETRC": str(file), "UV_DEFAULT_INDEX": "https://me:p@a.example/"}
    assert index_credentials(variables)("a.example") == ("me", "p")
