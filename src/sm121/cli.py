"""The command line: verbs, their options, and nothing else."""

from __future__ import annotations

import argparse
import difflib
import importlib
from dataclasses import dataclass
from typing import NoReturn

from sm121.errors import UsageFault
from sm121.ui import Ui


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: module of sm121.commands, one line of help, its configure function."""

    module: str
    help: str
    configure: str = "configure"


VERBS = {
    "build": Verb("build", "everything from pins to a wheelhouse; skips what is up to date"),
    "source": Verb("build", "only make pristine upstream ready", "configure_source"),
    "patch": Verb(
        "build",
        "only apply the series; --check: is it fit to be sent and built?",
        "configure_patch",
    ),
    "compile": Verb("build", "only up to the built wheel"),
    "wheelhouse": Verb("build", "up to the wheelhouse, without verifying it"),
    "lock": Verb("lock", "resolve the pins to hashed files; --check compares"),
    "repair": Verb("repair", "bring an environment back to its wheelhouse, offline"),
    "verify-abi": Verb("verify_abi", "prove that binaries fit, without a GPU or the target"),
    "verify-jit": Verb("verify_jit", "compile the JIT kernel families for the target, no GPU"),
    "verify-target": Verb(
        "verify_target", "install and import a wheelhouse by the target's own Python"
    ),
    "rebase": Verb("rebase", "move the patch series to another upstream; --check tries all"),
    "export": Verb("export", "write the edited series back to patches/"),
    "serve": Verb("serve", "serve.env and systemd units for two nodes"),
    "acceptance": Verb("acceptance", "run once on two nodes: every step that needs the hardware"),
    "shell": Verb("shell", "a shell with the toolchain and the patched tree"),
    "sync": Verb("sync", "the wheelhouse to the nodes: install, compare, switch, roll back"),
    "doctor": Verb("doctor", "is this machine able to build, or to run, this?"),
    "clean": Verb("clean", "what takes how much disk, and freeing it"),
}


class Parser(argparse.ArgumentParser):
    """Reports wrong usage as our own error, with the nearest known option."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        known = [s for action in self._actions for s in action.option_strings]
        # Only of an unknown option: "argument --jobs: invalid value" knows its option.
        unknown = message.partition("unrecognized arguments:")[2]
        for word in unknown.split():
            name = word.split("=")[0]
            if name.startswith("-") and (near := difflib.get_close_matches(name, known, n=1)):
                hint = f"Did you mean {near[0]}? "
                break
        raise UsageFault(
            f"{self.prog}: {message}", remedy=f"{hint}`{self.prog} --help` lists the options."
        )


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. Only the chosen verb's module is imported, to start fast."""
    if not argv or argv[0] in ("-h", "--help"):
        listing = "\n".join(f"  {name:<11} {verb.help}" for name, verb in VERBS.items())
        return argparse.Namespace(verb="help", text=f"usage: sm121 VERB [options]\n\n{listing}\n")
    verb_name = argv[0]
    if verb_name not in VERBS:
        near = difflib.get_close_matches(verb_name, VERBS, n=1)
        raise UsageFault(
            f"There is no verb {verb_name!r}.",
            cause=f"verbs: {', '.join(VERBS)}",
            remedy=f"Did you mean {near[0]}?" if near else "",
        )
    verb = VERBS[verb_name]
    module = importlib.import_module(f"sm121.commands.{verb.module}")
    own = Parser(prog=f"nox -s {verb_name} --", description=verb.help, allow_abbrev=False)
    getattr(module, verb.configure)(own)
    return own.parse_args(argv[1:], argparse.Namespace(verb=verb_name, run=module.run))


def run(argv: list[str], ui: Ui) -> int:
    """Parse and run; returns the exit code. Raises Sm121Error."""
    arguments = parse(argv)
    if arguments.verb == "help":
        ui.result(arguments.text)
        return 0
    return int(arguments.run(arguments, ui))
