"""Take what is secret out of a text, before anybody is shown it.

Three ways, since none is enough: by form (credentials in URLs, headers, `NAME=value`), by
value (of this process's environment variables with such names, and of uv's and netrc's
credentials), and the home directory's path, which often is a person's name.
"""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "***"
# Not 'passed', 'tokenizer', 'author' or 'design'.
_SECRET_NAME = (
    r"(?:pass(?:word|wd|phrase)|(?<![a-z])pass(?![a-z])|token(?!iz)|secret|credentials?|cookie|"
    r"(?:api|access|private)[_-]?key|auth(?!or(?!iz))|signature|(?<![a-z])sig(?![a-z]))"
)
_NAMED = re.compile(_SECRET_NAME, re.IGNORECASE)
# //user:password@host, also //token@host.
_USERINFO = re.compile(r"(//)[^/\s@'\"]+@")
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)(?:(?:basic|bearer|token)\s+)?[^\s'\",]+")  # fmt: skip
_SCHEME = re.compile(r"(?i)\b(basic|bearer)\s+[A-Za-z0-9+/=._~-]{8,}")
# NAME=value, "name": "value", --name value, ?name=value.
_ASSIGNED = re.compile(
    rf"(?i)([\w-]*{_SECRET_NAME}[\w-]*['\"]?\s*[:=]\s*|--[\w-]*{_SECRET_NAME}[\w-]*\s+)"
    # Counts and switches are no secrets.
    r"(?!(?:\d{1,6}|true|false|null|none)\b)"
    r"(?:(')[^']*'|(\")(?:[^\"\\]|\\.)*\"|[^\s&,;'\"]+)"
)
# Shorter values would be found everywhere.
_SHORTEST = 5


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Values that must not be shown: of variables named like secrets, of credentials in any
    variable's URL, and netrc's."""
    found: set[str] = set()
    for name, value in environment.items():
        if _NAMED.search(name):
            found.add(value)
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


def mask(text: str, secrets: Iterable[str] = (), *, home: str = "") -> str:
    """The text without them. home: a path that becomes '~'."""
    for secret in sorted(secrets, key=len, reverse=True):
        for form in {secret, quote(secret, safe="")}:
            text = text.replace(form, HIDDEN)
    text = _USERINFO.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _SCHEME.sub(rf"\1 {HIDDEN}", text)
    text = _ASSIGNED.sub(lambda m: f"{m[1]}{(mark := m[2] or m[3] or '')}{HIDDEN}{mark}", text)
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=[/\s'\":]|$)", "~", text)
    return text


def masker(environment: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """mask() with this process's secrets and home."""
    secrets = secrets_of(environment)
    home = environment.get("HOME", "").rstrip("/")
    return lambda text: mask(text, secrets, home=home)
