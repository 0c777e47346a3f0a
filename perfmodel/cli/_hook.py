"""`perfmodel hook`: prints lines for a training script that write its parsed arguments."""

import argparse
from typing import Any

from perfmodel.display import new_console, say, say_verbatim, table


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
        help="framework that runs the script (default: list the frameworks)",
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    """Print a framework's lines, or the list of frameworks if none is named."""
    from perfmodel.ingest.launch import HOOKS, hook_lines

    # The place is where in a training script the lines belong.
    if arguments.name is None:
        rows = [(name, place) for name, (place, _) in HOOKS.items()]
        new_console().print(table("", ("framework", "paste the lines here"), rows))
        say("next: perfmodel hook FRAMEWORK prints the lines")
        return 0
    say_verbatim(hook_lines(arguments.name).removesuffix("\n"))
    return 0
