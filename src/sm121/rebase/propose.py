"""stack.toml for the new release: the old text with what upstream changed, comments kept.

Nothing is guessed: what can't be known (submodules and content digests of a source at a new ref)
stays as it was, with a comment that says so, and the build stops there until it is right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sm121.pins.model import Stack
from sm121.rebase.onto import Upstream
from sm121.rebase.report import FamilyRow, SourceRow
from sm121.source.drift import Fetched

UNKNOWN_COMMIT = "0" * 40
_ENV = re.compile(r"\b(\w+_SRC_DIR)\b")


def propose(
    text: str, stack: Stack, upstream: Upstream, *, family: Sequence[FamilyRow],
    sources: Sequence[SourceRow], declared: Sequence[Fetched], cmake: dict[str, str],
    new_components: Sequence[str], gone_components: Sequence[str],
) -> str:  # fmt: skip
    """The text of pins/<new>/stack.toml. cmake: text of each CMake file that declares a source."""
    text = _vllm(text, upstream)
    for row in family:
        if row.pinned and row.proposed != row.pinned:
            reason = f"vLLM {upstream.version} asks for it; of {row.pinned} it was said: {stack.family[row.name].reason}"
            text = _set(text, f"family.{row.name}", "version", row.proposed)
            text = _set(text, f"family.{row.name}", "reason", reason)
    for source in sources:
        if not source.pinned:
            text = _add_source(text, source, declared, cmake)
        elif not source.wanted:
            text = _remove_table(text, f"sources.{source.name}")
            text = _drop_from_profiles(text, "sources", source.name)
        else:
            text = _move_source(text, stack, source)
    for name in gone_components:
        for table in ("components", "left-out"):
            text = _drop_key(text, table, name)
        text = _drop_from_profiles(text, "components", name)
    for name in new_components:
        text = _append(text, "components", f'{name} = "new in vLLM {upstream.version}"\n')
    return text


def _vllm(text: str, upstream: Upstream) -> str:
    for key, value in (
        ("version", upstream.version), ("tag", f"v{upstream.version}"),
        ("commit", upstream.git_commit or UNKNOWN_COMMIT), ("sdist-sha256", upstream.sdist_sha256),
    ):  # fmt: skip
        text = _set(text, "vllm", key, value)
    start, end = _table(text, "vllm")
    date = re.sub(
        r"^date\s*=.*$", f"date = {upstream.date.isoformat().replace('+00:00', 'Z')}",
        text[start:end], flags=re.MULTILINE,
    )  # fmt: skip
    return text[:start] + date + text[end:]


def _table(text: str, name: str) -> tuple[int, int]:
    """Where a table is, with its sub-tables and without the comment that heads the next one."""
    head = re.search(rf"^\[{re.escape(name)}\][^\n]*\n", text, re.MULTILINE)
    if head is None:
        return len(text), len(text)
    following = re.compile(rf"^\[{{1,2}}(?!\[|{re.escape(name)}[.\]])", re.MULTILINE).search(
        text, head.end()
    )
    end = following.start() if following else len(text)
    lines = text[head.start() : end].splitlines(keepends=True)
    while len(lines) > 1 and (not lines[-1].strip() or lines[-1].startswith("#")):
        lines.pop()
    return head.start(), head.start() + len("".join(lines))


def _set(text: str, table: str, key: str, value: str) -> str:
    start, end = _table(text, table)
    quoted = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    changed = re.sub(
        rf'^({re.escape(key)}\s*=\s*)"(?:[^"\\]|\\.)*"', lambda m: m[1] + quoted,
        text[start:end], count=1, flags=re.MULTILINE,
    )  # fmt: skip
    return text[:start] + changed + text[end:]


def _append(text: str, table: str, lines: str) -> str:
    _, end = _table(text, table)
    return text[:end] + lines + text[end:]


def _remove_table(text: str, name: str) -> str:
    start, end = _table(text, name)
    return text[:start] + text[end:].removeprefix("\n")


def _drop_key(text: str, table: str, key: str) -> str:
    start, end = _table(text, table)
    kept = re.sub(rf"^{re.escape(key)}\s*=.*\n", "", text[start:end], flags=re.MULTILINE)
    return text[:start] + kept + text[end:]


def _drop_from_profiles(text: str, key: str, name: str) -> str:
    def shorter(match: re.Match[str]) -> str:
        items = [item for item in re.findall(r'"[^"]*"', match[2]) if item != f'"{name}"']
        return f"{match[1]}[{', '.join(items)}]"

    return re.sub(
        rf'^({key}\s*=\s*)\[([^\]]*"{re.escape(name)}"[^\]]*)\]', shorter, text, flags=re.MULTILINE
    )


def _move_source(text: str, stack: Stack, source: SourceRow) -> str:
    table = f"sources.{source.name}"
    text = _set(text, table, "ref", source.wanted)
    if source.repository:
        text = _set(text, table, "git", f"https://github.com/{source.repository}.git")
        text = _set(text, table, "upstream-repository", source.repository)
    pin = stack.sources[source.name]
    stale = [
        n
        for n, v in (
            ("commit", pin.commit),
            ("submodules", pin.submodules),
            ("digest", pin.digest),
            ("wheels", pin.wheels),
        )
        if v
    ]
    if not stale:
        return text
    start, _ = _table(text, f"sources.{source.name}")
    note = f"# To be checked: {', '.join(stale)} still of {source.pinned}.\n"
    return text[:start] + note + text[start:]


def _add_source(
    text: str, source: SourceRow, declared: Sequence[Fetched], cmake: dict[str, str]
) -> str:
    (found, *_) = (d for d in declared if (d.repository, d.file) == (source.name, source.file))
    name = re.sub(r"[^a-z0-9]+", "-", found.repository.rpartition("/")[2]).strip("-")
    names = _ENV.findall(cmake.get(found.file, ""))
    env = names[0] if names else f"{name.upper().replace('-', '_')}_SRC_DIR"
    block = (
        f"# New in this release, to be looked at: who needs it, and is it for this GPU?\n"
        f'[sources.{name}]\ngit = "https://github.com/{found.repository}.git"\n'
        f'ref = "{found.ref}"\nenv = "{env}"\nupstream-file = "{found.file}"\n'
        f'upstream-repository = "{found.repository}"\n'
    )
    last = re.findall(r"^\[(sources\.[\w-]+)\]", text, re.MULTILINE)
    end = _table(text, last[-1])[1] if last else len(text)
    return text[:end] + block + text[end:]
