"""Compares a prediction with a measurement of the same step: `perfmodel compare` two timelines;
`perfmodel explain` every event."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._flags import add_job, add_json, add_layout, problem_of, require_measured
from perfmodel.cli._show import reporting, written
from perfmodel.display import new_console, say, table
from perfmodel.errors import PerfModelError
from perfmodel.units import duration, figure, number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perfmodel.ingest import MeasuredTrace

_SHOWN_STAGES = 12


def add_compare(commands: Any) -> None:
    """Register the command `compare` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="compare a predicted timeline with a measured one: batch time, devices, stages",
    )
    _add_traces(command)
    command.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="R",
        help="measured devices per predicted pipeline rank (tensor x data parallel; default 1)",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the errors per device, stage, phase and micro-batch (csv)",
    )
    command.add_argument(
        "--png", type=Path, metavar="FILE", help="draw both timelines, one above the other"
    )
    add_json(command)
    command.set_defaults(run=reporting(_compare, _show_compared))


def _add_traces(command: argparse.ArgumentParser) -> None:
    """Add the flags that name the predicted and the measured trace."""
    command.add_argument(
        "--predicted",
        type=Path,
        required=True,
        metavar="TRACE",
        help="trace of the prediction, from 'perfmodel timeline --out'",
    )
    command.add_argument(
        "--measured",
        type=Path,
        nargs="+",
        required=True,
        metavar="TRACE",
        help="traces from a profiler (one file per rank), from 'perfmodel run --out', or from 'perfmodel import "
        "--timeline'",
    )
    command.add_argument(
        "--format",
        default="auto",
        metavar="F",
        help="format of the measured trace (default: recognised from its content)",
    )


def add_picture(command: argparse.ArgumentParser) -> None:
    """The flags of `plot compare`."""
    add_json(command)
    _add_traces(command)


def draw_picture(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> "Figure":
    """Draw the picture of `plot compare`; `width` is a keyword argument if it is given.

    Raises:
        PerfModelError: traces that cannot be read, or of other numbers of devices.
    """
    from perfmodel import viz
    from perfmodel.validation import compare_traces

    predicted, measured = _traces(arguments)

    # A prediction is of one replica of the pipeline; a measured trace may hold several.
    if measured.devices % predicted.devices:
        raise PerfModelError(
            f"plot compare: {measured.devices} devices measured, {predicted.devices} predicted; record all ranks"
        )
    errors = compare_traces(predicted, measured, measured.devices // predicted.devices).errors
    title = f"batch time {errors.batch_time_error:.2%} off"
    return viz.draw_comparison(predicted, measured, title, **width_keyword)


def _compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare two traces; return the errors and the names of written files.

    Raises:
        PerfModelError: traces that cannot be read, or of other numbers of devices.
    """
    from perfmodel.ingest.tables import write_table
    from perfmodel.validation import compare_traces

    predicted, measured = _traces(arguments)
    comparison = compare_traces(predicted, measured, arguments.replicas)
    report = comparison.to_dict() | {"written": []}
    if arguments.out:
        write_table(arguments.out, comparison.errors.to_frame())
        report["written"].append(str(arguments.out))
    if arguments.png:
        from perfmodel.viz import draw_comparison, save_figure

        # Activities have an error only if the two traces could be matched one to one.
        title = f"batch time {comparison.errors.batch_time_error:.2%} off"
        if report["mean_activity_error"] is not None:
            title += f", activities {report['mean_activity_error']:.2%} (matched by {comparison.matched_by})"
        save_figure(draw_comparison(predicted, measured, title), arguments.png)
        report["written"].append(str(arguments.png))
    return report


def _traces(arguments: argparse.Namespace) -> "tuple[MeasuredTrace, MeasuredTrace]":
    """The predicted and the measured trace."""
    from perfmodel.ingest import read_trace

    predicted = read_trace("auto", [arguments.predicted])
    measured = read_trace(arguments.format, arguments.measured)
    return predicted, measured


def _show_compared(report: dict[str, Any]) -> None:
    """The report for people."""
    predicted = duration(report["predicted_batch_s"])
    measured = duration(report["measured_batch_s"])
    steps = f"mean of {number_of(report['runs'], 'step')}" if report["runs"] > 1 else "one step"
    error = f"{report['batch_time_error']:.2%}"
    say(f"batch time: {predicted} predicted, {measured} measured ({steps}), error {error}")
    say(
        f"idle: {report['predicted_bubble_fraction']:.2%} predicted, {report['measured_bubble_fraction']:.2%} measured"
    )
    if report["mean_activity_error"] is None:
        say(
            "activities could not be matched; annotate the passes (docs/traces.md) to get errors per device and stage"
        )
    else:
        shares = f"{report['predicted_share']:.0%} of the predicted and {report['measured_share']:.0%} of the measured"
        say(f"matched by {report['matched_by']}: {shares} computations")
        errors = f"mean {report['mean_activity_error']:.2%}, largest {report['largest_activity_error']:.2%}"
        say(f"activity error per device: {errors}")
        for device in report["devices"]:
            if device["activity_error"] is not None:
                error = f"{device['activity_error']:.2%} (bias {device['activity_bias']:+.2%})"
                idle = f"idle {device['predicted_idle']:.1%} predicted, {device['measured_idle']:.1%} measured"
                say(f"  device {device['device']}: {error}, {idle}")
    if report["stages"]:
        errors = f"median {report['median_stage_error']:.2%}, largest {report['largest_stage_error']:.2%}"
        say(f"stage error: {errors}; worst:")
        for row in sorted(report["stages"], key=lambda r: -(r["error"] or 0))[:_SHOWN_STAGES]:
            # Tags that a trace does not tell are -1.
            known = [
                f"{tag} {row[tag]}" for tag in ("device", "stage", "micro_batch") if row[tag] >= 0
            ]
            activity = f"{' '.join(known)} {row['phase'].replace('_', ' ')}"
            say(f"  {activity}: start {row['start_error']:.2%}, end {row['end_error']:.2%} off")
    written(report["written"])


def add_explain(commands: Any) -> None:
    """Register the command `explain` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="show where a prediction and a profile of the same step differ, and how to correct it",
    )
    add_profile(command, required=True)
    add_job(command)
    add_layout(command, 'layout that ran, e.g. "tp=8,pp=16,dp=8,zero=1"')
    command.set_defaults(run=reporting(_explain, _show_explained))


def add_profile(command: argparse.ArgumentParser, required: bool = False) -> None:
    """The flags that name a profile."""
    command.add_argument(
        "--profile",
        type=Path,
        nargs="+",
        required=required,
        metavar="FILE",
        help="traces of torch.profiler (one per rank, all or some), Nsight Systems (sqlite) or JAX (xplane)",
    )
    command.add_argument(
        "--format",
        default="auto",
        metavar="F",
        help="format of the profile (default: recognised from its content)",
    )


def _explain(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare a profile with the prediction of the layout that ran.

    Raises:
        PerfModelError: files that cannot be read, or a layout that is not the one that ran.
    """
    from perfmodel.calibration import explain_profile
    from perfmodel.prediction import layout_of, step_problem_of

    problem = problem_of(arguments)

    # `explain_profile` predicts by itself, so that --strict is checked on the same layout first.
    if arguments.strict:
        laid_out, _ = layout_of(problem, arguments.layout)
        require_measured(arguments, step_problem_of(problem, arguments.calibration), laid_out)
    explanation = explain_profile(
        problem,
        arguments.layout,
        arguments.profile,
        format=arguments.format,
        calibration=arguments.calibration,
    )
    return explanation.to_dict()


def _show_explained(report: dict[str, Any]) -> None:
    """The report for people."""
    console = new_console()
    # Never broken, or else it could not be copied.
    console.print(f"layout {report['layout']}", soft_wrap=True, markup=False)
    console.print(
        f"step time: {duration(report['predicted_step_s'])} predicted, "
        f"{duration(report['measured_step_s'])} measured ({number_of(report['steps'], 'step')} on "
        f"{number_of(report['devices'], 'device')})"
    )
    console.print(
        f"predicted events account for {report['matched_share']:.0%} of the measured time"
    )
    heads = ("event", "effect", "predicted", "measured", "calls", "remedy")
    rows = [_difference_cells(difference) for difference in report["differences"]]
    console.print(table("Largest differences, per device and step", heads, rows))
    for fact, calls in report["unread"].items():
        calls_are = "1 call is" if calls == 1 else f"{calls:,} calls are"
        console.print(f"{calls_are} not compared: the profile does not record {fact}")


def _difference_cells(difference: dict[str, Any]) -> tuple[str, ...]:
    """Return the table row of one difference between prediction and profile."""
    sign = "+" if difference["effect_s"] > 0 else ""
    return (
        difference["event"],
        sign + duration(difference["effect_s"]),
        duration(difference["predicted_s"]),
        duration(difference["measured_s"]),
        f"{figure(difference['predicted_calls'])}/{figure(difference['measured_calls'])}",
        difference["remedy"],
    )
