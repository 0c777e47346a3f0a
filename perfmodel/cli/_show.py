"""What a command has to say: as one JSON object, or as text for people, quiet, aligned, with units."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._table import FittedTable, table
from perfmodel.display import json_text
from perfmodel.units import duration

if TYPE_CHECKING:
    from rich.console import Console

    from perfmodel.ingest.launch import Launch
    from perfmodel.prediction import Prediction


def note(lines: Iterable[str]) -> None:
    """What a result rests on or fails at, one line each on stderr: neither JSON nor a picture is in its way."""
    for line in lines:
        print(f"perfmodel: {line}", file=sys.stderr)


def emit(arguments: argparse.Namespace, report: Mapping[str, Any], show: Callable[[], object]) -> None:
    """Print `report` where --json asks for it; else call `show`.

    What unread settings of a launch file may make wrong stands at the head of either.
    """
    launch: Launch | None = getattr(arguments, "launch", None)
    doubts = () if launch is None else launch.may_be_wrong
    if arguments.json:
        head = {"may_be_wrong": list(doubts)} if doubts else {}
        sys.stdout.write(json_text(head | dict(report)) + "\n")
        return
    for line in doubts:
        print(line)
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


def written(files: Iterable[Path | str]) -> None:
    """A line for each file, however long: paths are copied from it."""
    for file in files:
        print(f"wrote {file}")


_HEADS = {
    "n": "rows", "kept_out": "kept\nout", "median_ape": "median\nerror", "mean_ape": "mean\nerror",
    "p90_ape": "9 of 10\nwithin", "spearman": "rank cor-\nrelation", "coverage_90": "inside\n90 %",
}  # fmt: skip


def error_head(name: str) -> str:
    """A count's or an error's name for people."""
    return _HEADS.get(name, name.replace("_", " "))


def error_figure(name: str, value: float | None) -> str:
    """It as text."""
    if value is None:
        return "-"
    if name in ("n", "rows", "kept_out", "series", "kept"):
        return f"{value:,}"
    return f"{value:.2f}" if name == "spearman" else f"{100 * value:.1f} %"


def breakdown(console: "Console", result: "Prediction", title: str = "where the step goes") -> None:
    """Parts of the step that are not next to nothing."""
    rows = [
        (name.replace("_", " "), duration(seconds), f"{seconds / result.step_time_s:.1%}")
        for name, seconds in result.breakdown_s.items()
        if seconds > 5e-4 * result.step_time_s
    ]
    console.print(table(title, ("mean over pipeline ranks", "time", "share"), rows))


def new_console() -> "Console":
    """Where results are printed."""
    from rich.console import Console

    class WholeTables(Console):
        """Prints tables as they lay themselves out, names longer than a line included."""

        def print(self, *objects: Any, **how: Any) -> None:
            if any(isinstance(one, FittedTable) for one in objects):
                how |= {"soft_wrap": True}
            super().print(*objects, **how)

    # wide enough for most tables when the output goes to a file, unless somebody says otherwise
    console = WholeTables(highlight=False)
    said = console.is_terminal or "COLUMNS" in os.environ
    return console if said else WholeTables(highlight=False, width=150)
