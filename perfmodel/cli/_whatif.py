"""`perfmodel whatif`: a layout on other hardware, another network, or with a slow rank."""

import argparse
from pathlib import Path
from typing import Any

from perfmodel.cli._flags import add_job, add_layout, layout_of, problem_of, require_measured
from perfmodel.cli._show import new_console, note, reporting, table, written
from perfmodel.errors import PerfModelError
from perfmodel.units import duration, figure


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "whatif", help="the same step with other hardware, network delays or a slow rank"
    )
    add_job(
        command,
        settings="e.g. inter_node_bandwidth=2x, memory_bandwidth=+10%%, power_limit=2x, all_reduce_delay_s=0.002; or ",
    )
    add_layout(command)
    command.add_argument("--sweep", metavar="NAME=FIRST:LAST:COUNT", help="e.g. all_reduce_delay_s=0:0.01:11, a curve")
    command.add_argument("--png", type=Path, metavar="FILE", help="picture of the curve")
    command.set_defaults(run=reporting(run, show))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the command shows.

    Raises:
        PerfModelError: unknown parameters, impossible values or layouts.
    """
    from perfmodel.planning.what_if import Scenario, in_scenario, parse_sweep, sweep
    from perfmodel.prediction import step_problem_of

    if arguments.png and not arguments.sweep:
        raise PerfModelError("whatif: --png draws a curve; give --sweep NAME=FIRST:LAST:COUNT too")
    scenario = Scenario.parse(arguments.set)
    settings = parse_sweep(arguments.sweep) if arguments.sweep else []
    problem = problem_of(arguments)
    step_problem = step_problem_of(problem, arguments.calibration)
    layout = layout_of(arguments, arguments.layout, problem.model)
    note(layout.remarks)
    require_measured(arguments, step_problem, layout)
    report = in_scenario(step_problem, layout, scenario).to_dict()
    if settings:
        curve = sweep(step_problem, layout, scenario, settings)
        report["curve"] = curve.to_dict()
        if arguments.png:
            from perfmodel import viz

            viz.save_figure(viz.draw_curves([curve]), arguments.png)
            report["written"] = [str(arguments.png)]
    return report


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    console = new_console()
    before, after = report["before"], report["after"]
    if report["settings"]:
        console.print(f"with {', '.join(report['settings'])}:")
    fits = {True: "fits", False: "does not fit"}
    console.print(
        f"step time {duration(before['step_time_s'])} ({fits[before['fits']]}) to {duration(after['step_time_s'])} "
        f"({fits[after['fits']]}), {report['change']:+.1%}"
    )
    sensitivity = sorted(report["sensitivity"].items(), key=lambda item: -abs(item[1]))
    for line in report["notes"]:
        console.print(line, markup=False)
    # rounded first, so that there is no -0.00 %
    rows = [(name, f"{round(1.1**value - 1, 4) + 0.0:+.2%}") for name, value in sensitivity]
    console.print(table("", ("10 % more of", "changes the step by"), rows))
    curve = report.get("curve")
    if curve:
        points = [
            (figure(value) + "x" * curve["multiple"], duration(seconds))
            for value, seconds in zip(curve["values"], curve["step_s"], strict=True)
        ]
        console.print(table("", (curve["name"], "step"), points))
        if curve["hidden_up_to"] is not None:
            console.print(f"hidden up to {duration(curve['hidden_up_to'])}")
    written(report.get("written", ()))
