"""`perfmodel explain`: where a prediction and a profile of the same step part, event by event."""

import argparse
from pathlib import Path
from typing import Any

from perfmodel.cli._flags import add_job, add_layout, problem_of, require_measured
from perfmodel.cli._show import new_console, reporting, table
from perfmodel.units import duration, figure


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "explain", help="where a prediction and a profile of the same step part, and what would remove it"
    )
    add_profile(command, required=True)
    add_job(command)
    add_layout(command, "that ran; as for predict")
    command.set_defaults(run=reporting(run, show))


def add_profile(command: argparse.ArgumentParser, required: bool = False) -> None:
    """The flags that name a profile."""
    command.add_argument(
        "--profile", type=Path, nargs="+", required=required, metavar="FILE",
        help="traces of torch.profiler (one per rank, all or some), Nsight Systems (sqlite) or JAX (xplane)",
    )  # fmt: skip
    command.add_argument("--format", default="auto", metavar="F", help="of the profile (default: by its content)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report.

    Raises:
        PerfModelError: files that cannot be read, or a layout that is not the one that ran.
    """
    from perfmodel.calibration import explain_profile
    from perfmodel.prediction import layout_of, step_problem_of

    problem = problem_of(arguments)
    if arguments.strict:
        laid_out, _ = layout_of(problem, arguments.layout)
        require_measured(arguments, step_problem_of(problem, arguments.calibration), laid_out)
    return explain_profile(
        problem, arguments.layout, arguments.profile, format=arguments.format,
        calibration=arguments.calibration,
    ).to_dict()  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    console = new_console()
    console.print(
        f"step of {report['layout']}: {duration(report['predicted_step_s'])} predicted, "
        f"{duration(report['measured_step_s'])} measured ({report['steps']} steps, {report['devices']} devices); "
        f"{report['matched_share']:.0%} of the measured time is of predicted events"
    )
    heads = ("event", "effect", "predicted", "measured", "calls", "remedy")
    rows = [
        (
            d["event"], "+" * bool(d["effect_s"] > 0) + duration(d["effect_s"]), duration(d["predicted_s"]),
            duration(d["measured_s"]), f"{figure(d['predicted_calls'])} / {figure(d['measured_calls'])}", d["remedy"],
        )
        for d in report["differences"]
    ]  # fmt: skip
    console.print(table("Largest differences, per device and step", heads, rows))
    for what, calls in report["unread"].items():
        console.print(f"{calls:,} calls: the profile does not say their {what}")
