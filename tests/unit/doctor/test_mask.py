"""Nothing secret gets out: by form, by value, and the home directory's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm121.doctor.mask import mask, masker, secrets_of


@pytest.mark.parametrize(
    "text",
    [
        "https://ada:hunter2secret@index.example/simple",
        "https://hunter2secret@index.example/simple",
        "//ada:hunter2secret@index.example/",
        "Authorization: Basic hunter2secret",
        "'authorization': 'Bearer hunter2secret'",
        "curl -H 'Authorization: token hunter2secret' x",
        "curl sent bearer hunter2secret",
        "HF_TOKEN=hunter2secret make",
        "MY_API_KEY='hunter2secret with words' make",
        '{"index_password": "hunter2secret \\" more"}',
        "tool --auth-token hunter2secret run",
        "https://x.example/a?b=1&X-Amz-Signature=hunter2secret&c=2",
        "AWS_SECRET_ACCESS_KEY: hunter2secret",
    ],
)
def test_by_form(text: str) -> None:
    assert "hunter2" not in mask(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://index.example/simple/vllm/", "CC=/usr/bin/gcc MAX_JOBS=2 make",
        "git@github.com:vllm-project/vllm.git", "tokenizers>=0.21.1", "Requires-Dist: tiktoken",
        "num_tokens = 64", "10 passed: all", "author: Ada", "design: x", "tokenizer=slow", "cudaDeviceSynchronize@@libcudart.so.13", "authors say so",
    ],
)  # fmt: skip
def test_what_is_not_secret_stays(text: str) -> None:
    assert mask(text) == text


def test_by_value_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine index.example login ada-login password p@ss/netrc\n")
    environment = {
        "HOME": str(tmp_path), "WANDB_API_KEY": "abc123def", "HF_TOKEN": "x",
        "UV_INDEX": "corp=https://bob-name:url%2Fpass@index.example/simple other",
        "PLAIN": "visible",
    }  # fmt: skip
    assert secrets_of(environment) == {
        "abc123def", "bob-name", "url%2Fpass", "url/pass", "ada-login", "p@ss/netrc",
    }  # fmt: skip
    text = "said abc123def, url/pass, url%2Fpass, p@ss/netrc, p%40ss%2Fnetrc, ada-login; visible x"
    assert masker(environment)(text) == "said ***, ***, ***, ***, ***, ***; visible x"


def test_home_is_a_tilde() -> None:
    hide = masker({"HOME": "/home/ada"})
    assert hide("/home/ada/sm121 /home/adam '/home/ada' /home/ada") == "~/sm121 /home/adam '~' ~"


def test_json_stays_json() -> None:
    hide = masker({"HOME": "/home/ada", "MY_TOKEN": "abc123def"})
    text = json.dumps({"url": "https://a:b@h/", "my_token": "abc123def", "at": "/home/ada/x"})
    assert json.loads(hide(text)) == {"url": "https://***@h/", "my_token": "***", "at": "~/x"}


@given(st.from_regex(r"[A-Za-z0-9_./+-]{8,40}", fullmatch=True), st.text(max_size=50))
def test_no_value_of_a_secret_variable_survives(secret: str, around: str) -> None:
    hide = masker({"MY_SECRET": secret})
    assert secret not in hide(around + secret + around).replace("***", "")
