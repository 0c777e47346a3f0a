"""What a command has to say: as one JSON object, or as text for people."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def emit(arguments: argparse.Namespace, report: Mapping[str, Any], show: Callable[[], object]) -> None:
    """Print `report` where --json asks for it; else call `show`."""
    if arguments.json:
        json.dump(report, sys.stdout)
        sys.stdout.write("\n")
    else:
        show()


def reporting(
    run: Callable[[argparse.Namespace], dict[str, Any]], show: Callable[[dict[str, Any]], object]
) -> Callable[[argparse.Namespace], int]:
    """The command that shows what `run` returns, and succeeds."""

    def command(arguments: argparse.Namespace) -> int:
        report = run(arguments)
        emit(arguments, report, lambda: show(report))
        return 0

    return command
