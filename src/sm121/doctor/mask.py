"""Take what is secret out of a text, before anybody is shown it.

Three ways, since none is enough: by form (credentials in URLs, headers and options, `NAME=value`,
private keys, tokens of known vendors), by value (of this process's environment variables with such
names, and of uv's and netrc's credentials), and who and where we are: the home directory's path,
and in an archive for others the login name and this machine's own. Names of other hosts stay:
without that of an index nobody could say what is wrong with it.
"""

from __future__ import annotations

import getpass
import json
import netrc
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "***"
# Not 'passed', 'tokenizer', 'author', 'design', 'PWD' (a folder) or a key of a cache.
_SECRET_NAME = (
    r"(?:pass(?:word|wd|phrase)|(?<![a-z])pass(?![a-z])|_pwd(?![a-z])|token(?!iz)|secret|"
    r"credentials?|cookie|username|(?:api|access|private|encryption|signing)[_-]?key|"
    r"auth(?!or(?!iz))|signature|(?<![a-z])sig(?![a-z]))"
)
_NAMED = re.compile(_SECRET_NAME, re.IGNORECASE)
# A key of an environment variable; in lower case it is any key.
_KEY = re.compile(r"\b((?:[A-Z0-9]+_)*KEY=)(?!(?:\d{1,6}|true|false)\b)['\"]?[^\s'\"]+['\"]?")
# //user:password@host, //token@host; a password may hold an @, with a colon before also a slash.
_USERINFO = re.compile(r"(//)(?:[^/\s'\"]+|[^\s'\":/@]+:[^\s'\"]+)@")
# The same with spaces in the password, which no URL may have; not a port that a sentence follows.
_SPACED = re.compile(r"(//)[^\s'\":/@]+:(?!\d+(?:[/\s]|$))[^\r\n'\"@]*\s[^\r\n'\"@]*@(?=[\w.-]+)")
# All of a header: Digest has many parts, a cookie several values.
_HEADER = re.compile(
    r"(?i)\b((?:(?:proxy-)?authorization|(?:set-)?cookie)['\"]?\s*[:=]\s*['\"]?)"
    r"(?:[^\r\n'\"]|(?<==)\"[^\r\n\"]*\")+"
)
_SCHEME = re.compile(r"(?i)\b(basic|bearer)\s+[A-Za-z0-9+/=._~-]{8,}")
_QUOTED = r"[bru]{0,2}(?:'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")"
# NAME=value, "name": "value", ?name=value. Counts and switches are no secrets.
_ASSIGNED = re.compile(
    rf"(?i)([\w-]*{_SECRET_NAME}[\w-]*['\"]?\s*[:=]\s*)"
    rf"(?!(?:\d{{1,6}}|true|false|null|none)\b)({_QUOTED}|[^\s&;'\"]+)"
)
# --name value …, also as a list prints it; --api-key takes several values.
_OPTION = re.compile(
    rf"(?i)(--[\w-]*{_SECRET_NAME}[\w-]*['\"]?[ \t,=]+)"
    rf"((?:(?!-|\d{{1,6}}\b|true\b|false\b)(?:{_QUOTED}|[^\s'\",\]&;]+)[ \t,]*)+)"
)
_SAID = re.compile(r"(?i)\b(pass(?:word|wd|phrase)|token|secret)(\s+)(?=\S*\d)(?=\S*[a-z])\S{8,}")
_NETRC = re.compile(r"(?i)\b(login\s+)\S+(\s+(?:account\s+\S+\s+)?password\s+)\S+")
_USER_OPTION = re.compile(
    r"((?<![\w-])(?:-u|--user|--proxy-user)[\s=]+)(?!\d+:\d+(?:\s|$))[^\s:]+:\S+"
)
_SSHPASS = re.compile(r"\b(sshpass\s+-p\s*)\S+")
# Also one that a log's end cut, at either side.
_PRIVATE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|(?:\s*[A-Za-z0-9+/=:, -]{16,}$)*)"
    r"|(?:^[A-Za-z0-9+/=]{16,}[ \t\r]*\n)+-----END [A-Z ]*PRIVATE KEY-----",
    re.DOTALL | re.MULTILINE,
)
# Not secret, but the comment names a person and a machine.
_PUBLIC = re.compile(r"\b((?:ssh|ecdsa|sk-ssh)-[\w@.-]+ )AAAA[A-Za-z0-9+/=]+[^\r\n'\"]*")
# As their vendors document them, so that a scanner can find them.
_VENDORS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
    r"nvapi-[\w-]{16,}|sk-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|pypi-[\w-]{20,}|npm_[A-Za-z0-9]{20,}|"
    r"dckr_pat_[\w-]{16,}|AIza[\w-]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16}|"
    r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
)
# Shorter values would be found everywhere.
_SHORTEST = 5
# Names that say nothing of a person or place.
_COMMON = {"root", "user", "ubuntu", "debian", "nobody", "admin", "build", "builder", "nvidia",
           "runner", "test", "sm121", "vllm", "localhost", "spark", "host", "home"}  # fmt: skip


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Values that must not be shown: of variables named like secrets, of credentials in any
    variable's URL, and netrc's."""
    found: set[str] = set()
    for name, value in environment.items():
        if _NAMED.search(name) or name.upper().endswith("_KEY"):
            found |= {value, *value.split(","), *value.split()}
        for word in value.split():
            found |= _of_url(word.partition("=")[2] if "=" in word.partition("://")[0] else word)
    try:
        hosts = netrc.netrc(environment.get("NETRC") or _home(environment, ".netrc")).hosts
        for login, account, password in hosts.values():
            found |= {login, account or "", password or ""}
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        pass
    return {secret for secret in found if len(secret) >= _SHORTEST}


def _of_url(text: str) -> set[str]:
    try:
        parts = urlsplit(text)
    except ValueError:
        return set()
    raw = {part for part in (parts.username, parts.password) if part}
    return raw | {unquote(part) for part in raw}


def _home(environment: Mapping[str, str], name: str) -> str:
    return str(Path(environment.get("HOME", "~")).expanduser() / name)


def mask(
    text: str,
    secrets: Iterable[str] = (),
    *,
    home: str = "",
    names: Mapping[str, str] | None = None,
) -> str:
    """The text without them. home: a path that becomes '~'. names: words, and what to say for
    them."""
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}:
            text = text.replace(form, HIDDEN)
    text = _PRIVATE.sub("(a private key: left out)", text)
    text = _PUBLIC.sub(rf"\1{HIDDEN}", text)
    text = _VENDORS.sub(HIDDEN, text)
    for pattern in (_USERINFO, _SPACED):
        text = pattern.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _SCHEME.sub(rf"\1 {HIDDEN}", text)
    text = _NETRC.sub(rf"\1{HIDDEN}\2{HIDDEN}", text)
    text = _SSHPASS.sub(rf"\1{HIDDEN}", text)
    text = _USER_OPTION.sub(rf"\1{HIDDEN}", text)
    text = _OPTION.sub(_hide_option, text)
    text = _ASSIGNED.sub(lambda m: f"{m[1]}{(mark := _mark(m[2]))}{HIDDEN}{mark}", text)
    text = _KEY.sub(rf"\1{HIDDEN}", text)
    text = _SAID.sub(rf"\1\2{HIDDEN}", text)
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=[/\s'\":]|$)", "~", text)
    for name, instead in (names or {}).items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return text


def _mark(value: str) -> str:
    """The quotation mark that a value ends with, if it is quoted."""
    return value[-1] if value[-1] in "'\"" and len(value) > 1 else ""


def _hide_option(match: re.Match[str]) -> str:
    rest = match[2].rstrip(" \t\r\n,")
    mark = _mark(rest)
    return f"{match[1]}{mark}{HIDDEN}{mark}{match[2][len(rest) :]}"


def mask_json(text: str, hide: Callable[[str], str]) -> str:
    """JSON text with every string masked, and still JSON; other text as hide() has it."""
    try:
        data = json.loads(text)
    except ValueError:
        return hide(text)
    return json.dumps(_masked(data, hide), indent=1) + "\n"


def _masked(data: object, hide: Callable[[str], str]) -> object:
    if isinstance(data, str):
        return hide(data)
    if isinstance(data, list):
        return [_masked(item, hide) for item in data]
    if isinstance(data, dict):
        return {
            hide(key): HIDDEN
            if isinstance(value, str) and value and _NAMED.search(key)
            else _masked(value, hide)
            for key, value in data.items()
        }
    return data


def masker(
    environment: Mapping[str, str] = os.environ, *, names: Mapping[str, str] | None = None
) -> Callable[[str], str]:
    """mask() with this process's secrets and home. names: as own_names() has them, for others."""
    secrets = secrets_of(environment)
    home = environment.get("HOME", "").rstrip("/")
    return lambda text: mask(text, secrets, home=home, names=names)


def own_names(environment: Mapping[str, str]) -> dict[str, str]:
    """Login name and host name, each with what is said for it, unless it is a common word."""
    try:
        login = getpass.getuser()
    except (OSError, KeyError):
        login = ""
    host = socket.gethostname()
    found = {host: "HOST", host.partition(".")[0]: "HOST"}
    for user in (login, environment.get("USER", ""), environment.get("LOGNAME", "")):
        found[user] = "USER"
    return {n: s for n, s in found.items() if len(n) >= 3 and n.lower() not in _COMMON}
