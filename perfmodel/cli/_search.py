"""`perfmodel search`: the best layouts, under which objective and constraints, and why no others."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._emit import emit
from perfmodel.cli._flags import add_job, problem_of
from perfmodel.cli._launch import add_export, export_best, export_framework
from perfmodel.cli._predict import predicted, write_pictures
from perfmodel.display import progress
from perfmodel.errors import PerfModelError
from perfmodel.spec import Layout, Problem
from perfmodel.units import GIB

if TYPE_CHECKING:
    from perfmodel.planning.layouts import ParetoFront, SearchResult, SearchSpace, Tariff
    from perfmodel.prediction import Prediction


IMPOSSIBLE = 2
"""Exit status of a search that no layout can satisfy."""


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser("search", help="rank the layouts of a model on a cluster")
    add_job(command, batches=True)
    command.add_argument("--top", type=int, default=10, metavar="K", help="layouts to report (default 10)")
    command.add_argument(
        "--method",
        default="auto",
        help="enumerate (exact), auto (then uneven stages where they gain; default), or relax",
    )
    add_space(command)
    add_goal(command)
    command.add_argument(
        "--robust", nargs="?", const="regret", default="", metavar="ORDER",
        help="order by expected regret (default), upper (end of the 90 %% interval) or best (probability to be)",
    )  # fmt: skip
    command.add_argument(
        "--pareto", metavar="A,B[,C]", help="the Pareto front of objectives instead, e.g. time,memory,cost"
    )
    command.add_argument("--workers", type=int, default=1, metavar="N", help="processes that evaluate (default 1)")
    command.add_argument("--dask", default="", metavar="ADDRESS", help="evaluate on the workers of a Dask scheduler")
    command.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep what was evaluated here, and go on from it if it exists"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    add_export(command)
    command.add_argument("--trace", type=Path, metavar="FILE", help="Chrome trace of the best layout (json or json.gz)")
    command.add_argument("--png", type=Path, metavar="FILE", help="Gantt chart of the best layout")
    command.set_defaults(run=_execute)


def add_space(command: argparse.ArgumentParser) -> None:
    """Flags that say which layouts are tried."""
    command.add_argument("--fix", default="", metavar="LAYOUT", help='fix some dimensions, e.g. "tp=8,zero=1"')
    command.add_argument(
        "--schedules",
        default="",
        metavar="NAMES",
        help="pipeline schedules, as 1f1b,zb-h1,chimera; or all (that flush)",
    )
    command.add_argument(
        "--options", default="", metavar="NAMES",
        help="also vary overlap, tp_overlap, recompute (layers per stage), offload, order (of ranks); or all",
    )  # fmt: skip
    command.add_argument("--fewer-devices", action="store_true", help="layouts may leave some of the devices unused")


def add_goal(command: argparse.ArgumentParser) -> None:
    """Flags that say what is minimised, under which constraints, at which prices."""
    command.add_argument(
        "--objective", metavar="NAME",
        help="step_time (default), tokens_per_s (default of several batches), tokens_per_s_per_device, mfu, cost, "
        "energy, train_time, memory, devices, or a formula to minimise",
    )  # fmt: skip
    command.add_argument(
        "--constraint", action="append", default=[], metavar="COMPARISON",
        help='e.g. "memory_bytes<70e9" or "step_time_s<2"; may be repeated',
    )  # fmt: skip
    command.add_argument("--price", type=float, metavar="MONEY", help="per device and hour (default: the cluster's)")
    command.add_argument("--power", type=float, metavar="W", help="of a busy device (default: its nominal power)")
    command.add_argument("--idle-power", type=float, metavar="W", help="of an idle device (default: the catalog's)")
    command.add_argument(
        "--tokens", type=float, metavar="N", help="tokens to train on; cost and energy are per million without"
    )


def space_of(arguments: argparse.Namespace, problem: Problem) -> "SearchSpace":
    """The space that the flags describe."""
    from perfmodel.planning import layouts

    every = layouts.default_space(problem, fewer_devices=arguments.fewer_devices)
    every = layouts.with_options(every, arguments.options, problem.cluster)
    return layouts.restrict(layouts.with_schedules(every, arguments.schedules), arguments.fix)


def tariff_of(arguments: argparse.Namespace) -> "Tariff":
    """Prices, powers and tokens as given."""
    from perfmodel.planning.layouts import Tariff

    return Tariff(
        price_per_device_hour=arguments.price,
        power_w=arguments.power,
        idle_power_w=arguments.idle_power,
        tokens=arguments.tokens,
    )


def _execute(arguments: argparse.Namespace) -> int:
    from perfmodel.cli import _show

    if arguments.pareto:
        front = run_pareto(arguments)
        if not front.layouts:
            raise PerfModelError("search: no layout fits and satisfies the constraints; without --pareto it says why")
        files = write(arguments, front)
        emit(arguments, front.to_dict(), lambda: (show_pareto(front), _show.written(files)))
        return 0
    if arguments.export:
        export_framework(arguments)  # refused before anything is searched
    result = run(arguments)
    files = write(arguments, result)
    if result.complete and result.layouts and arguments.export:
        files.append(_export(arguments, result))
    if result.complete and result.layouts and (arguments.trace or arguments.png):
        best = result.layouts[0]
        arguments.devices, arguments.global_batch = None, best.global_batch
        files += write_pictures(predicted(arguments, best.layout, timeline=True), arguments.trace, arguments.png)
    if result.impossible and not arguments.json:
        raise PerfModelError(str(result.impossible))
    if result.layouts or result.complete or arguments.json:
        emit(arguments, result.to_dict(), lambda: (show(result), _show.written(files)))
    if result.impossible:
        print(f"perfmodel: {result.impossible}", file=sys.stderr)
        return IMPOSSIBLE
    if not result.complete:
        raise KeyboardInterrupt(result.certificate)
    return 0


def _export(arguments: argparse.Namespace, result: "SearchResult") -> str:
    """Write the best layout that the framework can run as its launch file; the file's name."""
    problem = problem_of(arguments, quiet=True)
    jobs = [replace(problem.job, global_batch=p.global_batch) for p in result.layouts]
    node = problem.cluster.devices_per_node
    path, _ = export_best(arguments, [p.layout for p in result.layouts], jobs, problem.model, node)
    return str(path)


def run(arguments: argparse.Namespace) -> "SearchResult":
    """What the command finds.

    Raises:
        PerfModelError: bad input.
    """
    from perfmodel.planning import layouts

    batches: list[int] = arguments.global_batch
    problem = problem_of(arguments)
    problem.require_devices()
    options = layouts.SearchOptions(
        method=arguments.method,
        objective=arguments.objective,
        constraints=arguments.constraint,
        tariff=tariff_of(arguments),
        robust=arguments.robust,
        batches=batches if len(batches) > 1 else (),
        top=arguments.top,
        strict=arguments.strict,
        workers=arguments.workers,
        dask=arguments.dask,
        resume=arguments.resume,
    )
    with progress("search") as report:
        return layouts.search(
            problem,
            space=lambda each: space_of(arguments, each),
            options=options,
            calibration=arguments.calibration,
            progress=report,
        )


def run_pareto(arguments: argparse.Namespace) -> "ParetoFront":
    """The front that the command asks for.

    Raises:
        PerfModelError: bad input.
    """
    from perfmodel.planning import layouts

    if len(arguments.global_batch) > 1:
        raise PerfModelError("search: --pareto takes one --global-batch")
    problem = problem_of(arguments)
    problem.require_devices()
    question = layouts.ask(problem, space=space_of(arguments, problem), calibration=arguments.calibration)
    with progress("pareto") as report:
        return layouts.pareto(
            question, [name.strip() for name in arguments.pareto.split(",") if name.strip()],
            constraints=arguments.constraint, tariff=tariff_of(arguments), progress=report,
            workers=arguments.workers, dask=arguments.dask,
        )  # fmt: skip


def show_pareto(front: "ParetoFront") -> None:
    """A row per layout, by the first objective."""
    from perfmodel.cli._show import new_console, table

    console = new_console()
    rows = [
        (*(f"{value:.4g}" for value in row), str(p.layout))
        for row, p in zip(front.values.tolist(), front.layouts, strict=True)
    ]
    console.print(table("layouts that no other beats in everything", (*front.objectives, "options"), rows))
    console.print(
        f"{front.evaluated:,} layouts scored by full schedule evaluation, {front.feasible:,} fit, "
        f"in {front.seconds:.1f} s; exact"
    )


def write(arguments: argparse.Namespace, result: "SearchResult | ParetoFront") -> list[str]:
    """Write the result as JSON if asked for; names of the files."""
    from perfmodel.ingest.tables import write_json

    if not arguments.out:
        return []
    write_json(arguments.out, result.to_dict())
    return [str(arguments.out)]


def show(result: "SearchResult") -> None:
    """The ranked table, why others were rejected, the winner's breakdown."""
    from perfmodel.cli._show import breakdown, duration, new_console, table

    console = new_console()
    used = [name for name in ("cp", "ep") if any(getattr(p.layout, name) > 1 for p in result.layouts)]
    names = ["tp", "pp", "dp", *used]
    more = _columns(result)
    rows = []
    for place, p in enumerate(result.layouts, 1):
        lay = p.layout
        again = f", full in {sum(lay.recompute_full_layers)}" if lay.recompute_full_layers else ""
        options = [lay.schedule + (f" v{lay.vpp}" if lay.vpp > 1 else ""), f"zero {lay.zero}", lay.recompute + again]
        options += [word for word, on in _options(lay) if on]
        degrees = [getattr(lay, name) for name in names]
        rows.append(
            (
                str(place), *map(str, degrees), str(lay.micro_batch), " ".join(options), duration(p.step_time_s),
                f"{duration(p.step_time_lo_s)} .. {duration(p.step_time_hi_s)}", f"{p.mfu:.1%}",
                f"{p.bubble_fraction:.1%}", f"{p.memory.peak / GIB:.1f}",
                *(show_value(place - 1, p) for show_value in more.values()),
            )
        )  # fmt: skip
    heads = ("#", *names, "micro-batch", "options", "step", "90 % interval", "MFU", "bubble", "GiB", *more)
    if result.layouts:
        best = result.layouts[0]
        batches = ", ".join(str(b.layouts[0].global_batch) for b in result.batches if b.layouts)
        console.print(
            f"{best.model} on {best.devices} devices of {best.cluster}, global batch {batches or best.global_batch}, "
            f"sequence {best.seq_len}"
        )
    goal = [f"objective {result.objective}"] * (result.objective != "step_time")
    if result.constraints:
        goal.append(f"where {' and '.join(result.constraints)}")
    if result.robust:
        goal.append(f"in the robust order of {result.robust}")
    if goal:
        console.print(", ".join(goal))
    console.print(table("", heads, rows))
    faster = [one for one in result.improvements if one.result.gain > 1e-3]
    for one in faster:
        was = "which does not fit with even stages" if one.result.given_s is None else f"{one.result.gain:.1%} faster"
        console.print(f"stages cut by {one.how}: {one.result.layout}: {duration(one.result.step_time_s)}, {was}")
    if rest := len(result.improvements) - len(faster):
        console.print(f"stages of {rest} layouts cut anew: no faster than even ones")
    console.print(f"method {result.method}: {result.why}")
    console.print(f"space: {result.space}")
    if result.framework != "generic":
        console.print(f"only layouts that {result.framework} can run")
    if beyond := result.beyond:
        gain = f", {beyond.gain:.1%} better" if isfinite(beyond.gain) else ""
        why = f" ({'; '.join(beyond.cannot_run)})"
        console.print(f"beyond it: {beyond.layout}: {duration(beyond.step_time_s)}{gain}{why}")
    alike = f", {result.alike:,} of them but variants of better ones in what they recompute or offload"
    console.print(
        f"{result.evaluated:,} layouts scored by full schedule evaluation{alike * (result.alike > 0)}, "
        f"{result.feasible:,} fit, in {result.seconds:.1f} s; {result.certificate}"
    )
    if result.rejected:
        console.print(table("rejected", ("why", "layouts"), [(k, f"{v:,}") for k, v in result.rejected.items()]))
    if result.layouts:
        breakdown(console, result.layouts[0], "where the best layout's step goes")


def _columns(result: "SearchResult") -> "dict[str, Callable[[int, Prediction], str]]":
    """Columns beyond the usual ones: what layouts differ in, and what objective and constraints name."""
    from perfmodel.planning.layouts import OBJECTIVES

    more: dict[str, Callable[[int, Prediction], str]] = {}
    if len({p.devices for p in result.layouts}) > 1:
        more["devices"] = lambda _, p: str(p.devices)
    if result.batches:
        more["batch"] = lambda _, p: str(p.global_batch)
    shown = ("step_time_s", "memory_bytes", "memory_gib", "mfu", "devices", "global_batch", "tp", "pp", "dp")
    for name in result.quantities[0] if result.quantities else ():
        if name not in shown:
            more[name] = lambda i, _, name=name: f"{result.quantities[i][name]:.4g}"
    if sure := result.robustness:
        more["P(best)"] = lambda i, _: f"{sure.best[i]:.0%}"
        more["P(1st better)"] = lambda i, _: f"{sure.better[0, i]:.0%}" if i else "-"
        if result.robust:
            more["regret"] = lambda i, _: f"{sure.regret[i]:.1%}"
    if result.objective not in OBJECTIVES and result.objective not in more:
        more["objective"] = lambda i, _: f"{result.values[i]:.4g}"
    return more


def _options(layout: Layout) -> list[tuple[str, bool]]:
    """Words for what differs from what frameworks do by default."""
    return [
        (f"etp {layout.etp}", layout.expert_tp != layout.tp),
        ("sp", layout.effective_sequence_parallel),
        ("grads at end", not layout.overlap_grad_reduce and layout.replicated),
        ("no prefetch", not layout.overlap_param_gather and layout.zero > 0),
        ("tp overlap", layout.tp_overlap),
        ("offload", layout.offload),
        (layout.order, layout.order != Layout().order),
    ]
