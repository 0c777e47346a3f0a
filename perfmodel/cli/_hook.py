"""`perfmodel hook`: prints lines for a training script that write its parsed arguments."""

import argparse
from typing import Any


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "hook",
        help="print lines to paste into a training script; they write its arguments to a JSON file for --from",
    )
    command.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="framework that runs the script; without it, print the names",
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from perfmodel.ingest.launch import HOOKS, hook_lines

    # The place is where in a training script the lines belong.
    if arguments.name is None:
        for name, (place, _) in HOOKS.items():
            print(f"{name:16} {place}")
        return 0
    print(hook_lines(arguments.name), end="")
    return 0
