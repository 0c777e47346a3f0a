"""`perfmodel predict` and `perfmodel timeline`: a layout's figures, its devices' timeline."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfmodel.cli._flags import (
    add_job,
    add_layout,
    job_flags,
    layout_of,
    problem_of,
    search_command,
    stated_job,
    token_count,
)
from perfmodel.cli._search_flags import add_reliability, run_of
from perfmodel.cli._show import emit, note, written
from perfmodel.display import new_console, say, say_verbatim, table
from perfmodel.errors import PerfModelError
from perfmodel.spec import Layout, Problem
from perfmodel.spec.notation import written_values
from perfmodel.spec.sample_units import sample_unit
from perfmodel.units import batch_words, duration, number_of, span

if TYPE_CHECKING:
    from perfmodel.ingest.launch import Launch
    from perfmodel.prediction import Prediction
    from perfmodel.validation import JobRun, RunPrediction


def add_predict(commands: Any) -> None:
    """Register the command `predict` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "predict", help="predict step time, memory and critical path of one layout"
    )
    add_job(command, settings="change the machine, as in whatif: inter_node_bandwidth=2x; or ")
    add_layout(command, 'e.g. "tp=8,pp=16,dp=8,zero=1,recompute=selective" or DistSim\'s 8M16P8D')
    command.add_argument(
        "--tokens",
        type=token_count,
        metavar="N",
        help="number of tokens to train on, 1e12 or 1T; adds days, cost and energy of the run, including failures",
    )
    command.add_argument(
        "--price",
        dest="price_per_device_hour",
        type=float,
        metavar="USD",
        help="US dollars per device and hour (default: the list price)",
    )
    command.add_argument(
        "--open",
        action="store_true",
        help="average over all plausible values of settings that are not stated, as 'validate cases' does, instead of "
        "using the framework's defaults; with --devices, --layout may be left out",
    )
    add_reliability(command)
    command.set_defaults(run=_predict)


def add_timeline(commands: Any) -> None:
    """Register the command `timeline` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "timeline", help="write the timeline of all devices as a Chrome trace or Gantt chart"
    )
    add_job(command)
    add_layout(command)
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="Chrome trace, opens in Perfetto (json or json.gz)",
    )
    command.add_argument(
        "--every-rank",
        action="store_true",
        help="write all devices to --out, instead of one per pipeline stage",
    )
    command.add_argument(
        "--every-pass",
        action="store_true",
        help="write kernels and collectives of every pass to --out, instead of the first pass only",
    )
    command.add_argument("--png", type=Path, metavar="FILE", help="Gantt chart")
    command.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="interactive timeline, opens in any browser",
    )
    command.set_defaults(run=_timeline)


def predicted(
    arguments: argparse.Namespace,
    layout: Layout | None = None,
    *,
    timeline: bool = False,
    quiet: bool = False,
) -> "Prediction":
    """Predict what the flags describe, with `layout` instead of theirs if it is given; print
    assumptions.

    Raises:
        PerfModelError: bad input.
    """
    from perfmodel import prediction

    problem = problem_of(arguments, quiet=quiet)
    laid_out = arguments.layout if layout is None else layout

    # Settings of --set change the machine, as they do in a search.
    if arguments.set:
        return _predicted_with_settings(arguments, problem, laid_out, timeline=timeline)
    return prediction.predict(
        problem,
        layout=laid_out,
        calibration=arguments.calibration,
        timeline=timeline,
        strict=arguments.strict,
    )


def _predicted_with_settings(
    arguments: argparse.Namespace,
    problem: Problem,
    layout: Layout | str,
    *,
    timeline: bool,
) -> "Prediction":
    """The prediction on the machine changed by `--set`, equal to that of a search."""
    from perfmodel.planning.layouts import ask
    from perfmodel.prediction import explain, layout_of

    # A search needs the number of devices, which here is the layout's.
    laid_out, assumed = layout_of(problem, layout)
    on_devices = problem.replace(devices=laid_out.devices)
    question = ask(on_devices, calibration=arguments.calibration, settings=arguments.set)
    prediction = explain(
        question.step_problem, laid_out, timeline=timeline, strict=arguments.strict
    )
    return replace(prediction, warnings=(*assumed, *prediction.warnings))


def with_timeline(arguments: argparse.Namespace) -> "Prediction":
    """The prediction that the flags describe, with its timeline; prints assumptions."""
    problem = problem_of(arguments, quiet=True)
    return predicted(arguments, layout_of(problem, arguments.layout), timeline=True)


def note_layout(prediction: "Prediction") -> None:
    """Print on stderr what a picture cannot show: a layout does not fit, or is changed."""
    layout = prediction.layout
    note(
        f"layout {prediction.layout_notation}: {line}"
        for line in (*prediction.reasons, *layout.remarks)
    )


def write_pictures(
    prediction: "Prediction",
    trace: Path | None,
    png: Path | None,
    html: Path | None = None,
    **detail: bool,
) -> list[str]:
    """Write the requested pictures, and the trace with this `detail`; returns the file names."""
    from functools import partial

    from perfmodel import viz

    # Only a trace has a choice of detail; pictures show what can be seen on them.
    files = (
        (partial(viz.write_trace, **detail), trace),
        (viz.write_gantt, png),
        (viz.write_interactive, html),
    )
    for write, path in files:
        if path:
            write(prediction, path)
    return [str(path) for _, path in files if path]


def described(arguments: argparse.Namespace) -> "JobRun":
    """The run described by the flags.

    Raises:
        PerfModelError: bad input.
    """
    from perfmodel.validation import described_job

    return described_job(
        arguments.model,
        arguments.cluster,
        arguments.layout or "",
        framework=arguments.framework or "",
        devices=arguments.devices,
        global_batch=arguments.global_batch,
        seq_len=arguments.seq_len,
        dtype=arguments.dtype,
        **stated_job(arguments),
    )


_FIELD_OF_CHOICE: Final = {"dp_overlap": "overlap_grad_reduce"}
"""Open choices that stand for several fields, and one of these; frameworks have one switch for all
of them."""


def _open_choices(arguments: argparse.Namespace, result: "Prediction") -> list[str]:
    """Names of the settings that the flags leave open, for which `predict` uses defaults."""
    from perfmodel.validation import name_open_choices

    # Published runs have one kind of nodes and use all of their devices. Others are not described
    # like them.
    if result.kinds or result.layout.devices != (arguments.devices or result.layout.devices):
        return []
    try:
        names = name_open_choices(described(arguments))
    except PerfModelError:
        # The stated flags are predicted as they are, although they do not describe a published run.
        return []
    # The layout's text leaves out what a launch file states like its framework's default.
    launch: Launch | None = arguments.launch
    if launch is None:
        return names
    return [name for name in names if not launch.states(_FIELD_OF_CHOICE.get(name, name))]


def _predict_open(arguments: argparse.Namespace) -> int:
    """Predict a run whose open settings are filled in (--open)."""
    from perfmodel.validation import predict_run

    for flag, is_given in (
        ("--strict", arguments.strict),
        ("--tokens", arguments.tokens is not None),
    ):
        if is_given:
            raise PerfModelError(
                f"predict: {flag} needs one layout with every setting stated; leave out --open or {flag}"
            )
    run = predict_run(described(arguments), arguments.calibration)
    emit(arguments, run.to_dict(), lambda: _show_open(run, _likeliest_command(arguments, run)))
    return 0


def _likeliest_command(arguments: argparse.Namespace, run: "RunPrediction") -> str:
    """The command that predicts the likeliest combination of the open settings."""
    case = run.case
    flags = job_flags(arguments)
    if "framework" not in arguments.given:
        flags += ["--framework", case.framework.label]
    flags += ["--global-batch", str(case.job.global_batch)]
    layout = case.framework.notation(case.layout, case.model)
    return f"perfmodel predict {shlex.join([*flags, '--layout', layout])}"


def _show_open(run: "RunPrediction", next_command: str) -> None:
    """Print step time and memory of the mixture, and the settings with the largest effect."""
    console = new_console()
    case = run.case
    batch = batch_words(case.job.global_batch, case.job.seq_len, sample_unit(case.model))
    console.print(
        f"{case.model.name} on {number_of(case.layout.devices, 'device')} of {case.cluster.name}, {batch}: "
        f"{number_of(len(run.completions), 'combination')} of the open settings"
    )
    interval = span(duration(run.step_time_lo_s), duration(run.step_time_hi_s))
    console.print(
        f"step time {duration(run.step_time_s)} (90 %: {interval}); probability that it fits "
        f"into memory: {run.fits_probability:.2f}"
    )
    console.print(
        f"likeliest: {case.framework.label}, layout {case.layout}", soft_wrap=True, markup=False
    )
    rows = [
        (effect.name, f"{effect.lowest:+.0%}", f"{effect.highest:+.0%}") for effect in run.effects
    ]
    if rows:
        console.print(
            table(
                "open settings, and the range of step times over their values",
                ("choice", "from", "to"),
                rows,
            )
        )
    say_verbatim(f"next: {next_command}")


def _predict(arguments: argparse.Namespace) -> int:
    """Predict a layout's step and show it."""
    from perfmodel.planning.training_run import run_lines
    from perfmodel.prediction.text import print_prediction

    if arguments.open:
        return _predict_open(arguments)
    result = predicted(arguments)
    problem = problem_of(arguments, quiet=True)
    run = run_of(arguments, problem, result)

    # Say which settings were taken at their defaults, since --open would integrate over them.
    names = _open_choices(arguments, result)
    lines = list(run_lines(run, result)) if run else []
    if names:
        lines.append(
            f"not stated, so defaults are used: {', '.join(_at_defaults(names, problem, result))} (--open averages "
            "over all plausible values instead)"
        )

    def show() -> None:
        console = new_console()
        print_prediction(console, result, lines)
        console.print(f"next: {search_command(arguments, result)}", soft_wrap=True, markup=False)

    emit(arguments, result.to_dict() | (run.to_dict() if run else {}) | {"not_stated": names}, show)
    return 0


def _at_defaults(names: Sequence[str], problem: Problem, result: "Prediction") -> list[str]:
    """Open settings with the values that a prediction uses, if it is a single value."""
    from perfmodel.prediction import step_problem_of

    values = {
        "framework": result.framework,
        **step_problem_of(problem).job.values(),
        **result.layout.values(),
    }
    values |= {choice: values[field] for choice, field in _FIELD_OF_CHOICE.items()}
    return [written_values({name: values[name]}) if name in values else name for name in names]


def _timeline(arguments: argparse.Namespace) -> int:
    """Write the timeline of a step in the forms that the flags ask for."""
    if not (arguments.out or arguments.png or arguments.html):
        raise PerfModelError(
            "timeline: nothing to write; give --out FILE (trace), --png FILE (Gantt chart) or --html FILE (interactive)"
        )
    detail = {"every_rank": arguments.every_rank, "every_pass": arguments.every_pass}
    if any(detail.values()) and not arguments.out:
        raise PerfModelError(
            "timeline: --every-rank and --every-pass apply only to traces; give --out FILE"
        )
    from perfmodel.prediction.text import step_words

    result = with_timeline(arguments)
    note_layout(result)
    files = write_pictures(result, arguments.out, arguments.png, arguments.html, **detail)

    def show() -> None:
        say(f"{step_words(result)}, bubble {result.bubble_fraction:.1%}")
        written(files)
        if arguments.out:
            say_verbatim(f"next: open {shlex.quote(str(arguments.out))} at https://ui.perfetto.dev")

    emit(arguments, result.to_dict() | {"written": files}, show)
    return 0
