"""Output of a command: one JSON object, or text."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.display import json_text, say, say_verbatim

if TYPE_CHECKING:
    from perfmodel.ingest.launch import Launch


def note(lines: Iterable[str]) -> None:
    """Print assumptions and reasons on stderr, one per line."""
    for line in lines:
        say(f"perfmodel: {line}", file=sys.stderr)


def emit(
    arguments: argparse.Namespace, report: Mapping[str, Any], show: Callable[[], object]
) -> None:
    """Print `report` as JSON with --json, else call `show`.

    What unread settings of a launch file may make wrong stands at the head of either.
    """
    # Settings of a launch file that were not understood may change the answer, so that they come
    # first in either form.
    launch: Launch | None = getattr(arguments, "launch", None)
    doubts = () if launch is None else launch.may_be_wrong
    if arguments.json:
        head = {"may_be_wrong": list(doubts)} if doubts else {}
        sys.stdout.write(json_text(head | dict(report)) + "\n")
        return
    for line in doubts:
        say(line)
    show()


def reporting(
    run: Callable[[argparse.Namespace], dict[str, Any]],
    show: Callable[[dict[str, Any]], object],
) -> Callable[[argparse.Namespace], int]:
    """Make a command that shows the result of `run` and returns status 0."""

    def command(arguments: argparse.Namespace) -> int:
        report = run(arguments)
        emit(arguments, report, lambda: show(report))
        return 0

    return command


def written(files: Iterable[Path | str]) -> None:
    """Print one line per written file, never wrapped."""
    for file in files:
        say_verbatim(f"wrote {file}")


_HEADS = {
    "n": "rows",
    "kept_out": "held\nout",
    "series": "new\nseries",
    "kept": "shipped\nseries",
    "median_ape": "median\nerror",
    "mean_ape": "mean\nerror",
    "p90_ape": "9 of 10\nwithin",
    "spearman": "rank cor-\nrelation",
    "coverage_90": "inside\n90 %",
}


def error_head(name: str) -> str:
    """A count's or an error's name for people."""
    return _HEADS.get(name, name.replace("_", " "))


def error_figure(name: str, value: float | None) -> str:
    """A figure of errors as text."""
    if value is None:
        return "-"
    if name in ("n", "rows", "kept_out", "series", "kept"):
        return f"{value:,}"
    return f"{value:.2f}" if name == "spearman" else f"{100 * value:z.1f} %"
