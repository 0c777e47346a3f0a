"""What a command has to say: as one JSON object, or as text for people."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perfmodel.display import json_text


def note(lines: Iterable[str]) -> None:
    """What a result rests on or fails at, one line each on stderr: neither JSON nor a picture is in its way."""
    for line in lines:
        print(f"perfmodel: {line}", file=sys.stderr)


def emit(arguments: argparse.Namespace, report: Mapping[str, Any], show: Callable[[], object]) -> None:
    """Print `report` where --json asks for it; else call `show`."""
    if arguments.json:
        sys.stdout.write(json_text(report) + "\n")
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
