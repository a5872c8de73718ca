"""Nothing secret gets out: by form, by value, and the home directory's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm121.doctor.archive import unit_text
from sm121.doctor.mask import mask, mask_json, masker, own_names, secrets_of


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
        "https://ada:hun@ter:hunter2secret@h/x",
        "https://ada:with/slash/hunter2secret@h/x",
        "https://ada:hunter2 with words@h/x",
        "git clone https://ada:of hunter2secret@h/x failed",
        "Environment=HF_TOKEN=hunter2secret",
        'Environment="A=b" "HF_TOKEN=hunter2secret"',
        "VLLM_API_KEY=hunter2secret,hunter2other",
        "vllm serve /m --api-key hunter2secret hunter2other --port 1",
        'argv: ["vllm", "--api-key", "hunter2secret"]',
        "['--api-key', 'hunter2secret']",
        "Cookie: session=hunter2secret; id=hunter2other",
        "Set-Cookie: id=hunter2secret; Path=/",
        'Authorization: Digest username="ada", nonce="x", response="hunter2secret"',
        "X-API-Key: hunter2secret",
        "machine h login ada password hunter2secret",
        "login hunter2secret account x password hunter2secret",
        "the password hunter2secret was refused",
        "token='a\\'hunter2secret'",
        "{'token': b'hunter2secret'}",
        "MYSQL_PWD=hunter2secret",
        "KEY=hunter2secret",
        "MY_ENCRYPTION_KEY='hunter2secret'",
        "curl -u ada:hunter2secret https://h/",
        "curl --user ada:hunter2secret https://h/",
        "sshpass -p hunter2secret ssh h",
        "UV_INDEX_CORP_USERNAME=hunter2secret",
        "//registry.example/:_authToken=hunter2secret",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0 hunter2@home",
    ],
)
def test_by_form(text: str) -> None:
    assert "hunter2" not in mask(text)


BODY = "Qk7Lm2Pv5Rt8Wn3BdZx9Yc4Uj6Hs1Ge0Fa"


@pytest.mark.parametrize(
    "token",
    # In parts, so that no scanner takes them for real ones.
    ["hf" + "_" + BODY, "gh" + "p_" + BODY, "github" + "_pat_" + BODY, "gl" + "pat-" + BODY,
     "nv" + "api-" + BODY, "s" + "k-proj-" + BODY, "xo" + "xb-1234567890-" + BODY, "py" + "pi-" + BODY,
     "AK" + "IA" + "ABCDEFGHIJKLMNOP", "ey" + "J" + BODY + ".ey" + "J" + BODY + "." + BODY],
)  # fmt: skip
def test_tokens_of_vendors_wherever_they_stand(token: str) -> None:
    for text in (token, f"got '{token}'", f"({token})", f'"x": "{token}"', f"/cache/{token}/x"):
        assert token[-12:] not in mask(text)


PEM = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\n"
    + f"{BODY * 2}\n" * 3
    + "-----END OPENSSH PRIVATE KEY-----"
)


@pytest.mark.parametrize(
    "text",
    [PEM, f"before\n{PEM}\nafter", PEM.partition("-----END")[0], "\n".join(PEM.splitlines()[2:]),
     PEM.replace("OPENSSH ", ""), PEM.replace("OPENSSH", "RSA"), PEM.replace("\n", "\r\n")],
)  # fmt: skip
def test_private_keys_also_cut_ones(text: str) -> None:
    found = mask(text)
    assert BODY not in found
    assert ("before" in found) == ("before" in text)
    assert ("after" in found) == ("after" in text)


def test_only_its_own_line_is_hidden() -> None:
    assert (
        mask("$ x --auth-token abcdef\nnext line\nlast") == "$ x --auth-token ***\nnext line\nlast"
    )
    assert mask("Cookie: a=b; c\nnext line") == "Cookie: ***\nnext line"


def test_json_of_any_shape_stays_json_and_is_masked_by_its_keys() -> None:
    data = {
        "HF_TOKEN": "hunter2secret", "n": 3, "token_count": 12, "ok": True, "none": None,
        "argv": ["vllm", "--api-key=hunter2secret", 'a "quoted" word'],
        "log": PEM, "nested": [{"api_key": "hunter2secret", "at": "/home/ada/x"}],
    }  # fmt: skip
    text = mask_json(json.dumps(data), masker({"HOME": "/home/ada"}))
    read = json.loads(text)
    assert "hunter2" not in text
    assert BODY not in text
    assert (read["n"], read["token_count"], read["ok"], read["none"]) == (3, 12, True, None)
    assert read["argv"][2] == 'a "quoted" word'
    assert read["nested"][0]["at"] == "~/x"


def test_login_and_host_are_hidden_from_others_as_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "adas-desk.lan.example")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    names = own_names({"USER": "ada"})
    hide = masker({}, names=names)
    assert hide("adas-desk.lan.example adas-desk ada@x /srv/ada/b adapter ada-x") == (
        "HOST HOST USER@x /srv/USER/b adapter ada-x"
    )
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    assert own_names({"USER": "vllm"}) == {}


UNIT = """[Service]
Environment=HF_TOKEN=hunter2secret SM121_ROLE=head
Environment="MY THING=hunter2 secret" 'VLLM_HOST_IP=1.2.3.4' \\
  OTHER=hunter2secret
Environment = LATE=hunter2secret
Environment="broken=hunter2secret
SetCredential=token:hunter2secret
ExecStart=/x --api-key hunter2secret --port 8000
Restart=always
"""


def test_units_without_what_people_put_into_environment_lines() -> None:
    found = mask(unit_text(UNIT))
    assert "hunter2" not in found
    assert "SM121_ROLE=head (left out)" in found
    assert "Environment=VLLM_HOST_IP=1.2.3.4 (left out)" in found
    assert "LATE" not in found
    assert "--port 8000\nRestart=always\n" in found


@pytest.mark.parametrize(
    "text",
    [
        "https://index.example/simple/vllm/", "CC=/usr/bin/gcc MAX_JOBS=2 make",
        "git@github.com:vllm-project/vllm.git", "tokenizers>=0.21.1", "Requires-Dist: tiktoken",
        "num_tokens = 64", "10 passed: all", "author: Ada", "design: x", "tokenizer=slow", "cudaDeviceSynchronize@@libcudart.so.13", "authors say so",
        "PWD=/home/x OLDPWD=/y", "the token was refused", "docker run -u 1000:1000 x", "key: ninja",
        "http://127.0.0.1:8000/v1/completions", "cache key = 0123456789abcdef", "password: false",
        "sha256:" + "0123456789abcdef" * 4, "sk-learn", "--api-server-count 2", "hf_hub", "task-id",
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
