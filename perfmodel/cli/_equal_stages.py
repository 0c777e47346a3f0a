"""Schedules on equal stages: flags, figures, and training under their weight versions."""

import argparse
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perfmodel.errors import LayoutError, PerfModelError

if TYPE_CHECKING:
    from perfmodel.schedule import PassTimes, Schedule
    from perfmodel.schedule.facts import ChunkTimes, ScheduleFacts

_FORWARD_S: Final = 1.0
_BACKWARD_S: Final = 2.0
_MINI_BATCH: Final = 128
_LEARNING_RATE: Final = 1.0


class ScheduleWithFacts(NamedTuple):
    """A schedule on equal stages, the times of its passes, and the facts to compare it by."""

    schedule: "Schedule"
    times: "PassTimes"
    facts: "ScheduleFacts"


def add_pipeline(command: argparse.ArgumentParser) -> None:
    """Flags that name schedules and the pipeline they run on."""
    command.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="schedules, such as chimera:4 or file:PATH (default: all)",
    )
    command.add_argument(
        "--stages", type=int, default=8, metavar="P", help="number of pipeline devices (default 8)"
    )
    command.add_argument(
        "--chunks",
        type=int,
        default=2,
        metavar="V",
        help="chunks per device, for schedules that take them (default 2)",
    )
    command.add_argument(
        "--forward-s",
        type=float,
        default=_FORWARD_S,
        metavar="S",
        help="forward time of one of p equal stages (default 1)",
    )
    command.add_argument(
        "--backward-s",
        type=float,
        default=_BACKWARD_S,
        metavar="S",
        help="backward time of one of p equal stages (default 2)",
    )
    command.add_argument(
        "--transfer-s",
        type=float,
        default=0.0,
        metavar="S",
        help="transfer time between stages (default 0)",
    )


def require_times_alone(arguments: argparse.Namespace) -> None:
    """Refuse --times together with flags for times or a model."""
    further_flags = {
        "--forward-s": arguments.forward_s != _FORWARD_S,
        "--backward-s": arguments.backward_s != _BACKWARD_S,
        "--model": arguments.model,
        "--optimise": arguments.optimise is not None,
        "--train": arguments.train,
    }
    for flag, is_given in further_flags.items():
        if is_given:
            raise PerfModelError(
                f"schedules: --times cannot be combined with {flag}; leave one of them out"
            )


def schedules_named(arguments: argparse.Namespace, default: Sequence[str] = ()) -> list[str]:
    """The schedules named by the flags; else `default`, or all that can train.

    Raises:
        UnknownNameError: an unknown schedule.
    """
    from perfmodel.schedule import get_schedule, schedule_names

    for name in arguments.names:
        get_schedule(name)
    return (
        arguments.names or list(default) or [name for name in schedule_names() if name != "forward"]
    )


def _chunks_of(arguments: argparse.Namespace, name: str) -> int:
    """Chunks per device of a schedule: --chunks for schedules that accept any number."""
    from perfmodel.schedule import get_schedule

    scheduler = get_schedule(name)
    return arguments.chunks if scheduler.looped else scheduler.chunks_for(1)


def uniform_times(arguments: argparse.Namespace, stages: int) -> "PassTimes":
    """Times of p equal stages, each 1/p of the model."""
    from perfmodel.schedule import PassTimes

    return PassTimes.uniform(
        stages, arguments.forward_s, arguments.backward_s, transfer_s=arguments.transfer_s
    )


def schedules_with_facts(
    arguments: argparse.Namespace,
) -> tuple[list[ScheduleWithFacts], list[str]]:
    """Return the schedules that can run on equal stages, and why the others cannot.

    Raises:
        LayoutError: a schedule that the user named cannot run.
    """
    from perfmodel.schedule import get_schedule, require_valid, schedule_facts
    from perfmodel.schedule.facts import chunk_facts, equal_parts

    # With --times, facts are exact fractions of the given durations; else seconds in floating
    # point.
    exact_times = _chunk_times(arguments)
    seconds = _seconds(arguments)
    p, m = arguments.stages, arguments.micro_batches
    schedules, skipped = [], []
    for name in schedules_named(arguments):
        chunks = _chunks_of(arguments, name)
        try:
            schedule = get_schedule(name)(p, m, chunks)
            require_valid(schedule)
            if exact_times is None:
                facts = schedule_facts(name, p, m, chunks=chunks, **seconds)
                times = equal_parts(schedule, **seconds)
            else:
                facts = chunk_facts(name, p, m, exact_times, chunks=chunks)
                times = exact_times.pass_times(schedule)
        except LayoutError as error:
            # A schedule that was named has to run; of all of them, those that cannot are reported
            # and left out.
            if arguments.names:
                raise
            skipped.append(f"{name}: {error}")
            continue
        schedules.append(ScheduleWithFacts(schedule, times, facts))
    return schedules, skipped


def facts_by_micro_batches(
    arguments: argparse.Namespace, counts: Iterable[int]
) -> "list[ScheduleFacts]":
    """Facts of each schedule for each possible number of micro-batches."""
    from perfmodel.schedule import schedule_facts

    facts = []
    for name in schedules_named(arguments):
        for count in counts:
            # Some schedules cannot divide every number of micro-batches.
            with suppress(LayoutError):
                chunks = _chunks_of(arguments, name)
                facts.append(
                    schedule_facts(
                        name, arguments.stages, count, chunks=chunks, **_seconds(arguments)
                    )
                )
    return facts


def named_facts(facts: "ScheduleFacts") -> dict[str, Any]:
    """Figures of one schedule, in the unit of the given times."""
    return {
        "name": facts.schedule,
        "makespan": facts.makespan_s,
        "steady_interval": facts.steady_interval_s,
        "bubble": facts.bubble_fraction,
        "makespan_bubble": facts.makespan_bubble_fraction,
        "activations": facts.activations,
        "weights": facts.weights,
        "version_difference": facts.version_difference,
        "update_sequences": facts.update_sequences,
    }


def _seconds(arguments: argparse.Namespace) -> dict[str, float]:
    """Durations of the passes and transfers of a stage, by name."""
    return {name: getattr(arguments, name) for name in ("forward_s", "backward_s", "transfer_s")}


def _chunk_times(arguments: argparse.Namespace) -> "ChunkTimes | None":
    """Durations of --times; None if it is not given, or the command does not have it."""
    from fractions import Fraction

    from perfmodel.schedule.facts import ChunkTimes

    text = getattr(arguments, "times", None)
    if text is None:
        return None
    # Fractions keep facts of schedules exact: a bubble of 3/11 is shown as that.
    try:
        forward, input_gradient, weight_gradient = (Fraction(word) for word in text.split(","))
        transfer = Fraction(str(arguments.transfer_s))
    except (ValueError, ZeroDivisionError):
        raise PerfModelError(
            f"schedules: --times must be three numbers F,B,W such as 1,1,1; got {text!r}"
        ) from None
    return ChunkTimes(forward, input_gradient, weight_gradient, transfer)


def trained(arguments: argparse.Namespace) -> dict[str, Any]:
    """Training losses of a small model under each schedule's weight versions (--train)."""
    import pandas as pd

    from perfmodel.ingest.tables import write_table
    from perfmodel.ir.interpreter import (
        as_mini_batches,
        mlp_model,
        teacher_data,
        training_curve,
    )

    p, m = arguments.stages, arguments.micro_batches
    model = mlp_model(16, p)
    inputs, targets = teacher_data(model, m * arguments.steps, examples=8, width=16, seed=0)
    # Two synchronous schedules, whose weights are never stale, and three with stale weights.
    curves = []
    for name in schedules_named(arguments, ["1f1b", "zb-h1", "pipedream", "pipedream-2bw", "nf1b"]):
        # Every schedule sees the same data in the mini-batches of its own updates.
        per_step, x, y, passes = as_mini_batches(
            name, m, inputs, targets, uniform_times(arguments, p)
        )
        curves.append(
            training_curve(
                name,
                model,
                model.initial(1),
                x,
                y,
                passes,
                per_step=per_step,
                learning_rate=0.3,
            )
        )
    written = []
    if arguments.out:
        write_table(arguments.out, pd.concat([curve.to_frame() for curve in curves]))
        written.append(str(arguments.out))
    if arguments.png:
        from perfmodel import viz

        viz.save_figure(viz.draw_training_curves(curves), arguments.png)
        written.append(str(arguments.png))

    # The last loss is a mean over a tenth of the updates, because single losses scatter.
    rows = [
        {
            "schedule": curve.schedule,
            "updates": len(curve.loss),
            "time_s": float(curve.time_s[-1]),
            "first_loss": float(curve.loss[0]),
            "last_loss": float(curve.loss[-len(curve.loss) // 10 :].mean()),
            "version_difference": int(curve.version_difference[-1]),
            "versions_held": int(curve.versions_held.max()),
        }
        for curve in curves
    ]
    return {"rows": rows, "written": written}


def accuracies(arguments: argparse.Namespace) -> dict[str, Any]:
    """Epochs and time of schedules to a test accuracy.

    Raises:
        PerfModelError: an accuracy that is not a share.
    """
    from dataclasses import asdict

    from perfmodel.ir.interpreter import TimeToAccuracy, accuracy_curve

    if not 0 < arguments.accuracy < 1:
        raise PerfModelError(
            f"schedules: --accuracy must be between 0 and 1, got {arguments.accuracy:g}"
        )

    # Split, order and initial weights are random, so each schedule trains with several seeds.
    passes = uniform_times(arguments, arguments.stages)
    rows = []
    for name in schedules_named(arguments, ["pipedream", "pipedream-2bw", "nf1b", "gpipe", "1f1b"]):
        curves = []
        for seed in range(arguments.seeds):
            curve = accuracy_curve(
                name,
                passes,
                micro_batches=arguments.micro_batches,
                mini_batch=_MINI_BATCH,
                epochs=arguments.epochs,
                learning_rate=_LEARNING_RATE,
                seed=seed,
            )
            curves.append(curve)
        rows.append(asdict(TimeToAccuracy.of(curves, arguments.accuracy)))
    title = f"mini-batches of {_MINI_BATCH}, {arguments.seeds} seeds, test accuracy {arguments.accuracy:g}"
    return {"title": title, "rows": rows, "written": []}
