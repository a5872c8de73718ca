"""What git is told, and what of the user's it is not told: the same on every machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

ISOLATION = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TEMPLATE_DIR": "",
    "GIT_DEFAULT_HASH": "sha1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",
    "LC_ALL": "C.UTF-8",
}
# `git rev-parse --local-env-vars`: what git sets for a hook, and would believe of us.
LOCAL_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CONFIG", "GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT",
    "GIT_OBJECT_DIRECTORY", "GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_GRAFT_FILE",
    "GIT_INDEX_FILE", "GIT_NO_REPLACE_OBJECTS", "GIT_REPLACE_REF_BASE", "GIT_PREFIX",
    "GIT_SHALLOW_FILE", "GIT_COMMON_DIR",
    # And what a person may set that changes what git reads or how it writes a diff.
    "GIT_DIFF_OPTS", "GIT_EXTERNAL_DIFF", "GIT_ATTR_SOURCE", "GIT_NAMESPACE", "GIT_NOTES_REF",
    "GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS", "GIT_ICASE_PATHSPECS",
)  # fmt: skip
SETTINGS = {
    # A tree from an sdist must be stored byte for byte, on any machine.
    "core.autocrlf": "false",
    "core.fileMode": "true",
    "core.quotePath": "false",
    "pack.compression": "1",  # imported releases: half the time for a third more disk
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "core.hooksPath": os.devnull,
    "advice.detachedHead": "false",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "core.compression": "-1",
}


def configuration(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as git takes them from the environment (git-config(1), GIT_CONFIG_COUNT).

    They outrank what a person sets in the repository itself, by `git config` in a worktree of
    it, and there is no file that a kill can halve.
    """
    variables = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings.items()):
        variables[f"GIT_CONFIG_KEY_{number}"] = key
        variables[f"GIT_CONFIG_VALUE_{number}"] = value
    return variables
