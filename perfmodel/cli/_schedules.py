"""`perfmodel schedules`: compares, draws, optimises and trains with pipeline schedules."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._equal_stages import (
    accuracies,
    add_pipeline,
    named_facts,
    require_times_alone,
    schedules_named,
    schedules_with_facts,
    trained,
    uniform_times,
)
from perfmodel.cli._files import add_from, add_job_file, lacking
from perfmodel.cli._flags import (
    add_dtype,
    add_framework,
    add_json,
    add_seq_len,
    layout_of,
    predict_command,
    problem_on,
)
from perfmodel.cli._show import reporting, written
from perfmodel.display import new_console, say_verbatim, table
from perfmodel.errors import PerfModelError
from perfmodel.spec import Layout, Problem
from perfmodel.spec.sample_units import sample_unit
from perfmodel.units import GIB, batch_words, duration, figure, number_of, span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perfmodel.cli._equal_stages import ScheduleWithFacts
    from perfmodel.prediction import Prediction
    from perfmodel.schedule import PassTimes

_SAID_ONCE = ("stages", "micro_batches", "makespan_bubble_fraction", "update_sequences")
"""Columns that the table leaves out to fit into 80 characters."""
_SHORT = {
    "bubble_fraction": "bubble",
    "version_difference": "stale-\nness",
    "activations": "activa-\ntions",
    "weights": "weight\ncopies",
    "makespan_s": "makespan",
    "steady_interval_s": "steady\ninterval",
    "step_s": "step",
    "step_time_s": "step",
    "step_time_lo_s": "90 %\nfrom",
    "step_time_hi_s": "90 %\nto",
    "peak_memory_gib": "GiB",
    "micro_batches_in_flight": "in flight",
    "mfu": "MFU",
}


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "schedules", help="compare pipeline schedules: time, bubble, memory, staleness"
    )
    add_pipeline(command)
    _add_equal_stages(command)
    _add_model_stages(command)
    _add_studies(command)
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the order (text) or the training curves (csv)",
    )
    command.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="draw the schedules, or the training curves",
    )
    add_json(command)
    command.set_defaults(run=reporting(run, show))


def _add_equal_stages(command: argparse.ArgumentParser) -> None:
    """Add the flags of stages that all take the same time, in units of the user's choice."""
    command.add_argument(
        "--micro-batches",
        type=int,
        default=16,
        metavar="M",
        help="micro-batches per step (default 16)",
    )
    command.add_argument(
        "--times",
        metavar="F,B,W",
        help="times of a chunk's forward pass, input gradient and weight gradient, such as 1,1,1",
    )
    add_job_file(command, positional=False, layout=True)


def _add_model_stages(command: argparse.ArgumentParser) -> None:
    """Add the flags of the stages of a model on a cluster, in seconds."""
    command.add_argument(
        "--model",
        help="predict this model (or JOB.toml) instead of equal stages; needs --cluster, --layout and --global-batch",
    )
    add_from(command)
    command.add_argument("--cluster", help="catalog name or TOML")
    add_framework(command)
    command.add_argument("--layout", help="layout without the schedule, e.g. 'tp=8,pp=16,dp=8'")
    command.add_argument("--global-batch", type=int, metavar="B", help="sequences per step")
    add_seq_len(command)
    add_dtype(command)


def _add_studies(command: argparse.ArgumentParser) -> None:
    """Add the flags of an order under a limit on memory, and of training under stale weights."""
    command.add_argument(
        "--optimise",
        type=int,
        metavar="L",
        help="find an order that keeps at most L micro-batches in flight, and write it to --out",
    )
    command.add_argument(
        "--train",
        action="store_true",
        help="train a small model under each schedule's weight versions",
    )
    command.add_argument(
        "--steps",
        type=int,
        default=40,
        metavar="N",
        help="updates to train for (default 40)",
    )
    command.add_argument(
        "--accuracy",
        type=float,
        metavar="A",
        help="with --train: show the epochs and time to reach this test accuracy, such as 0.9 (the task: classify "
        "points of a map as land or sea)",
    )
    command.add_argument(
        "--epochs",
        type=int,
        default=4,
        metavar="E",
        help="with --accuracy: stop after this many epochs (default 4)",
    )
    command.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="S",
        help="with --accuracy: number of training runs (default 3)",
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the command; return its rows.

    Raises:
        PerfModelError: flags that do not go together, unknown or impossible schedules.
    """
    # Refuse flags that contradict each other before anything is computed.
    if arguments.times is not None:
        require_times_alone(arguments)
    if arguments.optimise is not None:
        return _optimised(arguments)
    for flag in ("--stages", "--micro-batches", "--epochs", "--seeds"):
        number = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if number is not None and number < 1:
            raise PerfModelError(f"schedules: {flag} must be at least 1, got {number}")
    if arguments.accuracy is not None:
        for flag, clashes in (
            ("needs --train", not arguments.train),
            ("writes no --out", arguments.out),
            ("draws no --png", arguments.png),
        ):
            if clashes:
                raise PerfModelError(f"schedules: --accuracy {flag}")
    if arguments.model:
        return _predicted(arguments)
    if not arguments.train:
        return _facts(arguments)
    return trained(arguments) if arguments.accuracy is None else accuracies(arguments)


def show(report: dict[str, Any]) -> None:
    """The report as tables."""
    console = new_console()
    if report["rows"]:
        # Columns follow from the rows, which differ between facts, predictions and orders.
        names: list[str] = [name for name in report["rows"][0] if name not in _SAID_ONCE]
        if "steady_interval_s" in names:
            # The steady interval says the same.
            names.remove("step_s")
        heads = [_SHORT.get(name, name.replace("_", " ")) for name in names]
        cells = []
        for row in report["rows"]:
            is_prediction = "step_time_s" in row
            cells.append([_cell(name, row[name], is_prediction) for name in names])
        console.print(table(report.get("title", ""), heads, cells))
    closed_forms = report.get("closed_forms")
    if closed_forms:
        heads = ["stages", "n_f", "n_b", "compute", "transfers", "all-reduce left", "step"]
        cells = []
        for schedule, forms in closed_forms.items():
            for which, form in forms.items():
                figures = [_cell(name, value, in_seconds=True) for name, value in form.items()]
                cells.append([f"{schedule}, {which}", *figures])
        console.print(table("Chimera's own model (section 3.4 of its paper)", heads, cells))
    for line in (*report.get("skipped", ()), *report.get("notes", ())):
        console.print(line)
    written(report["written"])
    if report.get("next"):
        say_verbatim(f"next: {report['next']}")


def _cell(name: str, value: Any, in_seconds: bool) -> str:
    """A value of the named column as text; a pair of values is a range."""
    if value is None:
        return "-"
    if isinstance(value, (tuple, list)):
        low, high = (_cell(name, end, in_seconds) for end in value)
        return span(low, high)
    if name in ("bubble_fraction", "mfu"):
        return f"{value:.1%}"
    if name == "peak_memory_gib":
        return f"{value:.1f}"
    # Before numbers: a truth value is one of Python's integers.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_s") and isinstance(value, float):
        return duration(value) if in_seconds else figure(value)
    return figure(value) if isinstance(value, float) else str(value)


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare schedules on equal stages by their facts; draw them if --png asks for it."""
    schedules, skipped = schedules_with_facts(arguments)
    written = []
    if arguments.png:
        from perfmodel import viz

        viz.save_figure(viz.draw_schedules(schedules), arguments.png)
        written.append(str(arguments.png))
    return {
        "title": _title(arguments),
        "schedules": [named_facts(entry.facts) for entry in schedules],
        "rows": [entry.facts.to_dict() for entry in schedules],
        "skipped": skipped,
        "notes": [
            *_chunk_notes(arguments, schedules),
            *_notes(
                [entry.facts.schedule for entry in schedules],
                "twice the --micro-batches and half the times",
            ),
        ],
        "written": written,
        "next": "add --model, --cluster, --layout and --global-batch to compare the schedules of your own step",
    }


def _title(arguments: argparse.Namespace) -> str:
    """The pipeline that schedules are compared on, and the unit of their times."""
    times = f"forward {arguments.forward_s:g}, backward {arguments.backward_s:g} per stage"
    if arguments.times is not None:
        forward, input_gradient, weight_gradient = arguments.times.split(",")
        times = f"forward {forward}, input gradient {input_gradient}, weight gradient {weight_gradient} per chunk"
    return f"{arguments.stages} stages, {arguments.micro_batches} micro-batches; times: {times}"


def _chunk_notes(
    arguments: argparse.Namespace, schedules: "Sequence[ScheduleWithFacts]"
) -> list[str]:
    """Return a note on schedules that run more chunks of the times of --times than others."""
    if arguments.times is None:
        return []
    by_stages: dict[int, list[str]] = {}
    for entry in schedules:
        model_stages = entry.schedule.n_stages
        by_stages.setdefault(model_stages, []).append(entry.facts.schedule)
    fewest = min(by_stages)
    return [
        f"{', '.join(names)}: {figure(model_stages / fewest)} times the work of the others, because the model "
        f"has {model_stages} chunks of these times instead of {fewest}"
        for model_stages, names in sorted(by_stages.items())
        if model_stages > fewest
    ]


def _notes(schedules: list[str], remedy: str) -> list[str]:
    """Notes on the figures of some schedules.

    Backward halving shares the order of forward doubling, so that equal micro-batches give equal
    rows.
    """
    if "chimera-halving" not in schedules:
        return []
    return [
        f"chimera-halving: its micro-batches are halves; to compare it with the others, give it {remedy}"
    ]


def _predicted(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the predicted step of a model under every schedule that can run it."""
    from dataclasses import asdict

    from perfmodel.prediction import compare_schedules, step_problem_of
    from perfmodel.prediction.comparison import chimera_closed_form

    problem, layout = _step_of_flags(arguments)
    compared = compare_schedules(
        problem.model,
        problem.cluster,
        layout,
        schedules=schedules_named(arguments),
        global_batch=arguments.global_batch,
        job=problem.job,
        framework=problem.framework,
    )
    rows = [
        {
            "schedule": c.schedule,
            "step_time_s": c.prediction.step_time_s,
            "step_time_lo_s": c.prediction.step_time_lo_s,
            "step_time_hi_s": c.prediction.step_time_hi_s,
            "bubble_fraction": c.prediction.bubble_fraction,
            "mfu": c.prediction.mfu,
            "peak_memory_gib": c.prediction.memory.peak / GIB,
            "fits": c.prediction.fits,
        }
        for c in compared
        if c.prediction
    ]
    skipped = [f"{c.schedule}: {c.reason}" for c in compared if not c.prediction]
    step_problem = step_problem_of(problem)

    # Chimera's paper has a closed form for its step, which is shown next to the prediction.
    forms = {}
    for c in compared:
        if c.prediction and c.schedule.partition(":")[0] == "chimera":
            closed_forms = chimera_closed_form(step_problem, c.prediction.layout)
            forms[c.schedule] = {
                which: asdict(form) | {"step_s": form.step_s}
                for which, form in closed_forms.items()
            }
    machine = f"{number_of(layout.devices, 'device')} of {problem.cluster.name}"
    job = batch_words(problem.job.global_batch, problem.job.seq_len, sample_unit(problem.model))
    return {
        "title": f"{problem.model.name} on {machine}, {job}, layout {arguments.layout}",
        "rows": rows,
        "closed_forms": forms,
        "skipped": skipped,
        "notes": _notes([row["schedule"] for row in rows], "half the micro_batch in --layout"),
        "written": [],
        "next": _best_again(arguments, [c.prediction for c in compared if c.prediction]),
    }


def _best_again(arguments: argparse.Namespace, predictions: "Sequence[Prediction]") -> str:
    """The command that predicts the fastest schedule that fits, or else the fastest of all; empty
    if none can run."""
    if not predictions:
        return ""
    best = min(predictions, key=lambda prediction: (not prediction.fits, prediction.step_time_s))
    return predict_command(arguments, best)


def _optimised(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the best order of passes, and return it together with schedules that need no search."""
    from perfmodel.ingest.tables import write_bytes
    from perfmodel.schedule import get_schedule, optimised, schedule_text
    from perfmodel.schedule.facts import starts_and_ends
    from perfmodel.schedule.memory import alive_at_peak

    if arguments.out is None:
        raise PerfModelError(
            "schedules: --optimise needs --out FILE for the order (use it as schedule=file:FILE)"
        )
    times, micro_batches = _pass_times(arguments)
    best = optimised(times, micro_batches, arguments.optimise)
    write_bytes(arguments.out, schedule_text(best).encode())

    # The order is compared with schedules that need no search, with the same pass times.
    known_schedules = [
        get_schedule(name)(len(times.forward_s), micro_batches)
        for name in ("1f1b", "zb-h1", "zb-h2")
    ]
    rows = [
        {
            "schedule": s.name,
            "step_s": float(starts_and_ends(s, times)[1].max()),
            "micro_batches_in_flight": int(alive_at_peak(s).sum(axis=1).max()),
        }
        for s in (best, *known_schedules)
    ]
    return {
        "rows": rows,
        "written": [str(arguments.out)],
        "next": f"add {shlex.quote(f'schedule=file:{arguments.out}')} to the --layout of predict or timeline",
    }


def _pass_times(arguments: argparse.Namespace) -> "tuple[PassTimes, int]":
    """Pass times and micro-batches, of the named model's stages or of equal stages."""
    from perfmodel.prediction import check_layout, pass_times, step_problem_of

    if not arguments.model:
        return uniform_times(arguments, arguments.stages), arguments.micro_batches
    problem, layout = _step_of_flags(arguments)
    check_layout(problem.model, problem.cluster, problem.job, layout)
    return pass_times(step_problem_of(problem), layout), problem.job.num_microbatches(layout)


def _step_of_flags(arguments: argparse.Namespace) -> tuple[Problem, Layout]:
    """The model's step described by the flags; prints assumptions.

    Raises:
        PerfModelError: a flag is missing, or names what there is not.
    """
    from perfmodel import catalog

    flags = lacking(arguments, "cluster", "layout", "global_batch")
    if flags:
        raise PerfModelError(f"schedules: --model needs {flags} too")
    problem = problem_on(arguments, catalog.cluster(arguments.cluster), None)
    return problem, layout_of(problem, arguments.layout)
