"""`perfmodel completion SHELL`: a script that completes commands, flags, files and catalog names."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

SHELLS: Final = ("bash", "zsh", "fish")
_FILES: Final = ("FILE", "TABLE", "RUNS.csv", "JOB.toml")


def add_command(commands: Any, top: argparse.ArgumentParser) -> None:
    """Register the command; `top`: the whole command line, that it completes."""
    command: argparse.ArgumentParser = commands.add_parser(
        "completion", help='shell completion: eval "$(perfmodel completion bash)"'
    )
    command.add_argument("shell", choices=SHELLS)
    command.set_defaults(run=partial(_execute, top))


def _execute(top: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    print(script(arguments.shell, top))
    return 0


def script(shell: str, top: argparse.ArgumentParser) -> str:
    """What the shell reads. `top`, the whole command line, parses nothing afterwards: names become choices in it."""
    import shtab

    from perfmodel import catalog

    names = {"model": catalog.models(), "cluster": catalog.clusters(), "framework": catalog.frameworks()}
    for one in parsers(top):
        for action in one._actions:
            if action.dest in names and action.option_strings:
                action.choices = list(names[action.dest])
            elif action.metavar in _FILES:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
            elif action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]
    return shtab.complete(top, shell)


def parsers(one: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, its commands and their commands."""
    yield one
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)
