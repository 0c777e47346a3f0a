"""`perfmodel schedules`: all pipeline schedules side by side, drawn, checked, optimised, or trained with."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._emit import reporting
from perfmodel.cli._flags import add_json
from perfmodel.errors import PerfModelError
from perfmodel.units import GIB

if TYPE_CHECKING:
    from perfmodel.schedule import PassTimes

_SAID_ONCE = ("stages", "micro_batches")
_SHORT = {
    "bubble_fraction": "bubble", "version_difference": "staleness", "update_sequences": "sequences",
    "step_s": "step", "step_time_s": "step", "step_time_lo_s": "from", "step_time_hi_s": "to",
    "peak_memory_gib": "GiB", "micro_batches_in_flight": "in flight",
}  # fmt: skip


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "schedules", help="compare pipeline schedules: time, bubble, memory, staleness"
    )
    add_pipeline(command)
    command.add_argument("--micro-batches", type=int, default=16, metavar="M", help="of a step (default 16)")
    command.add_argument("--model", help="predict this model instead; needs --cluster, --layout and --global-batch")
    command.add_argument("--cluster", help="catalog name or TOML")
    command.add_argument("--layout", help="everything but the schedule, e.g. 'tp=8,pp=16,dp=8'")
    command.add_argument("--global-batch", type=int, metavar="B", help="sequences per step")
    command.add_argument(
        "--optimise", type=int, metavar="L", help="write an order for at most L micro-batches in flight"
    )
    command.add_argument(
        "--train", action="store_true", help="train a small model under each schedule's weight versions"
    )
    command.add_argument("--steps", type=int, default=40, metavar="N", help="updates to train for (default 40)")
    command.add_argument("--out", type=Path, metavar="FILE", help="order as text, or training curves as csv")
    command.add_argument("--png", type=Path, metavar="FILE", help="picture of the schedules, or of the curves")
    add_json(command)
    command.set_defaults(run=reporting(run, show))


def add_pipeline(command: argparse.ArgumentParser) -> None:
    """Flags that name schedules and the pipeline they run on."""
    command.add_argument(
        "names", nargs="*", metavar="NAME", help="schedules, such as chimera:4 or file:PATH (default: all)"
    )
    command.add_argument("--stages", type=int, default=8, metavar="P", help="pipeline devices (default 8)")
    command.add_argument("--chunks", type=int, default=2, metavar="V", help="for schedules that take any (default 2)")
    command.add_argument("--forward-s", type=float, default=1.0, metavar="S", help="a p-th of the model (default 1)")
    command.add_argument("--backward-s", type=float, default=2.0, metavar="S", help="likewise (default 2)")
    command.add_argument("--transfer-s", type=float, default=0.0, metavar="S", help="between stages (default 0)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rows that the command shows.

    Raises:
        PerfModelError: flags that do not go together, unknown or impossible schedules.
    """
    if arguments.optimise is not None:
        return _optimised(arguments)
    for flag, number in (("--stages", arguments.stages), ("--micro-batches", arguments.micro_batches)):
        if number is not None and number < 1:
            raise PerfModelError(f"schedules: {flag} must be at least 1, got {number}")
    if arguments.model:
        return _predicted(arguments)
    return _trained(arguments) if arguments.train else _facts(arguments)


def show(report: dict[str, Any]) -> None:
    """The report as tables."""
    from perfmodel.cli._show import new_console, table

    console = new_console()
    if report["rows"]:
        names: list[str] = [name for name in report["rows"][0] if name not in _SAID_ONCE]
        heads = [_SHORT.get(name, name.replace("_", " ")) for name in names]
        cells = [[_cell(row[name]) for name in names] for row in report["rows"]]
        console.print(table(report.get("title", ""), heads, cells))
    for line in (*report.get("skipped", ()), *(f"wrote {path}" for path in report["written"])):
        console.print(line)


def _cell(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        low, high = map(_cell, value)
        return low if low == high else f"{low} to {high}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def named(arguments: argparse.Namespace, default: Sequence[str] = ()) -> list[str]:
    """The schedules asked for; else `default`, or all that train.

    Raises:
        UnknownNameError: a schedule that there is not.
    """
    from perfmodel.schedule import get_schedule, schedule_names

    for name in arguments.names:
        get_schedule(name)
    return arguments.names or list(default) or [name for name in schedule_names() if name != "forward"]


def chunks_of(arguments: argparse.Namespace, name: str) -> int:
    """Chunks per device of a schedule: --chunks for those that take any."""
    from perfmodel.schedule import get_schedule

    scheduler = get_schedule(name)
    return arguments.chunks if scheduler.looped else scheduler.chunks_for(1)


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    from perfmodel.errors import LayoutError
    from perfmodel.schedule import get_schedule, require_valid, schedule_facts

    rows, skipped, drawn = [], [], []
    for name in named(arguments):
        chunks = chunks_of(arguments, name)
        try:
            schedule = get_schedule(name)(arguments.stages, arguments.micro_batches, chunks)
            require_valid(schedule)
            facts = schedule_facts(
                name,
                arguments.stages,
                arguments.micro_batches,
                forward_s=arguments.forward_s,
                backward_s=arguments.backward_s,
                transfer_s=arguments.transfer_s,
                chunks=chunks,
            )
        except LayoutError as error:
            if arguments.names:
                raise
            skipped.append(f"{name}: {error}")
            continue
        rows.append(facts.to_dict())
        part = arguments.stages / schedule.n_stages / schedule.slices
        drawn.append((schedule, uniform_times(arguments, schedule.n_stages, part)))
    written = []
    if arguments.png:
        from perfmodel import viz

        viz.save_figure(viz.draw_schedules(drawn), arguments.png)
        written.append(str(arguments.png))
    title = f"{arguments.stages} stages, {arguments.micro_batches} micro-batches"
    return {"title": title, "rows": rows, "skipped": skipped, "written": written}


def uniform_times(arguments: argparse.Namespace, stages: int, part: float = 1.0) -> "PassTimes":
    """Equal stages, each `part` of a p-th of the model."""
    from perfmodel.schedule import PassTimes

    return PassTimes.uniform(
        stages, arguments.forward_s * part, arguments.backward_s * part, transfer_s=arguments.transfer_s
    )


def _predicted(arguments: argparse.Namespace) -> dict[str, Any]:
    from perfmodel.prediction import compare_schedules

    _require_job(arguments)
    compared = compare_schedules(
        arguments.model,
        arguments.cluster,
        arguments.layout,
        schedules=named(arguments),
        global_batch=arguments.global_batch,
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
    return {"rows": rows, "skipped": skipped, "written": []}


def _optimised(arguments: argparse.Namespace) -> dict[str, Any]:
    from perfmodel.io import write_bytes
    from perfmodel.schedule import alive_at_peak, get_schedule, optimised, schedule_text, starts_and_ends

    if arguments.out is None:
        raise PerfModelError("schedules: --optimise needs --out FILE for the order (use it as schedule=file:FILE)")
    times, micro_batches = _pass_times(arguments)
    best = optimised(times, micro_batches, arguments.optimise)
    write_bytes(arguments.out, schedule_text(best).encode())
    others = [get_schedule(name)(len(times.forward_s), micro_batches) for name in ("1f1b", "zb-h1", "zb-h2")]
    rows = [
        {
            "schedule": s.name,
            "step_s": float(starts_and_ends(s, times)[1].max()),
            "micro_batches_in_flight": int(alive_at_peak(s).sum(axis=1).max()),
        }
        for s in (best, *others)
    ]
    return {"rows": rows, "written": [str(arguments.out)]}


def _pass_times(arguments: argparse.Namespace) -> "tuple[PassTimes, int]":
    """Pass times and micro-batches: of the model's stages if one is named, else of equal ones."""
    from perfmodel import catalog
    from perfmodel.prediction import step_model
    from perfmodel.spec import Job, Layout

    if not arguments.model:
        return uniform_times(arguments, arguments.stages), arguments.micro_batches
    _require_job(arguments)
    model, layout = catalog.model(arguments.model), Layout.parse(arguments.layout)
    job = Job(global_batch=arguments.global_batch, seq_len=model.seq_len)
    fixed = step_model(model, catalog.cluster(arguments.cluster), job)
    return fixed.pass_times(layout), job.num_microbatches(layout)


def _require_job(arguments: argparse.Namespace) -> None:
    missing = [flag for flag in ("cluster", "layout", "global_batch") if getattr(arguments, flag) is None]
    if missing:
        raise PerfModelError(f"schedules: --model needs --{missing[0].replace('_', '-')} too")


def _trained(arguments: argparse.Namespace) -> dict[str, Any]:
    import pandas as pd

    from perfmodel.interpreter import mlp_model, teacher_data, training_curve
    from perfmodel.io import write_table

    p, m = arguments.stages, arguments.micro_batches
    model = mlp_model(16, p)
    inputs, targets = teacher_data(model, m * arguments.steps, examples=8, width=16, seed=0)
    passes = uniform_times(arguments, p)
    curves = [
        training_curve(name, model, model.initial(1), inputs, targets, passes, per_step=m, learning_rate=0.3)
        for name in named(arguments, ["1f1b", "zb-h1", "pipedream", "pipedream-2bw", "nf1b"])
    ]
    written = []
    if arguments.out:
        write_table(arguments.out, pd.concat([curve.to_frame() for curve in curves]))
        written.append(str(arguments.out))
    if arguments.png:
        from perfmodel import viz

        viz.save_figure(viz.draw_training_curves(curves), arguments.png)
        written.append(str(arguments.png))
    rows = [
        {
            "schedule": curve.schedule,
            "updates": len(curve.loss),
            "time_s": float(curve.time_s[-1]),
            "first_loss": float(curve.loss[0]),
            "last_loss": float(curve.loss[-len(curve.loss) // 10 :].mean()),
            "version_difference": int(curve.version_difference[-1]),
            "versions_held": int(curve.held.max()),
        }
        for curve in curves
    ]
    return {"rows": rows, "written": written}
