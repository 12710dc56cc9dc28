"""Command ``trinity``: one table of subcommands, each a module that is imported when it runs.

A subcommand's module has ``main(arguments) -> exit code``. ``trinity --help`` imports none of them, and no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from trinity.errors import ConfigError, TrinityError, pip_install

_INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
_REFUSED = 2  # of one that was asked what it cannot do
_SUMMARY = "Serve vision-language models as encode, prefill and decode stages."
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


class Subcommand(NamedTuple):
    """One subcommand: the module that has its ``main``, what it does in a line, and the extra that it needs."""

    module: str
    summary: str
    extra: str = ""


COMMANDS = {
    "plan": Subcommand("trinity.commands.plan", "find the best placement for recorded traffic, on no GPU"),
    "batch": Subcommand("trinity.server.batch", "serve a file of chats into a file of answers; a stopped run goes on"),
    "bench": Subcommand("trinity.bench.__main__", "measure goodput of placements and engines on your checkpoint"),
    "check": Subcommand("trinity.stages.proof.command", "prove that a checkpoint serves exactly, or hash its files"),
    "instance": Subcommand(
        "trinity.remote.server", "run one instance, or all of a host, that pipelines elsewhere attach"
    ),
    "serve": Subcommand("trinity.server.command", "an OpenAI-compatible server on one model", "server"),
    "version": Subcommand("trinity.commands.version", "print the versions of trinity and of what it runs on"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit code, 2 for an error of trinity, which is one line on standard error."""
    name, rest = _choose(sys.argv[1:] if arguments is None else arguments)
    try:
        code = int(_load(COMMANDS[name]).main(rest))
        sys.stdout.flush()
        return code
    except TrinityError as error:
        print(_paint(f"trinity {name}: {' '.join(str(error).split())}"), file=sys.stderr)
        return _REFUSED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # who read the output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _load(command: Subcommand) -> Any:
    """Import a subcommand's module. Raises ``ConfigError`` where its extra is not installed."""
    try:
        return import_module(command.module)
    except ModuleNotFoundError as error:
        if not command.extra or (error.name or "").startswith("trinity"):
            raise
        raise ConfigError(f"this command needs {error.name}: {pip_install(command.extra)}") from error


def _choose(given: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Split the arguments into the subcommand and what is for it. Exits where there is none."""
    first = given[0] if given else ""
    if first in COMMANDS or first == "--version":
        return first.removeprefix("--"), given[1:]
    parser = argparse.ArgumentParser(
        prog="trinity",
        usage="trinity COMMAND ...",
        description=f"{_SUMMARY}\n\ncommands:\n"
        + "\n".join(f"  {name:<12}{each.summary}" for name, each in COMMANDS.items()),
        epilog="`trinity COMMAND --help` says more, with an example.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if first in ("-h", "--help"):
        parser.print_help()
        parser.exit()
    parser.error(f"{f'there is no command {first!r}' if first else 'give a command'}; there are {', '.join(COMMANDS)}")


def _paint(text: str) -> str:
    """Colour an error where a terminal shows it, and the user has not asked for none (``NO_COLOR``)."""
    shown = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return f"{_RED}{text}{_PLAIN}" if shown else text
