"""`perfmodel search`: the best layouts, under which objective and constraints, and why no others."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli import _show_search
from perfmodel.cli._flags import add_job, job_flags, problem_of, whole_numbers
from perfmodel.cli._launch import add_export, export_best, export_framework
from perfmodel.cli._predict import predicted, write_pictures
from perfmodel.cli._programs import add_values, search_program
from perfmodel.cli._show import emit
from perfmodel.cli._training_run import add_reliability, lines, run_of, tariff_of
from perfmodel.display import progress
from perfmodel.errors import PerfModelError
from perfmodel.spec import Problem

if TYPE_CHECKING:
    from perfmodel.planning.layouts import ParetoFront, SearchOptions, SearchResult, SearchSpace
    from perfmodel.planning.training_run import TrainingRun


IMPOSSIBLE = 2
"""Exit status of a search that no layout can satisfy."""


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser("search", help="rank the layouts of a model on a cluster")
    machine = "of the machine, as for whatif: inter_node_bandwidth=2x; or "
    add_job(command, batches=True, settings=machine, program=True)
    add_values(command)
    command.add_argument(
        "--micro-batches", type=whole_numbers, metavar="K[,K...]", help="of pipelines of PROGRAM (default: 2 to 128)"
    )
    add_search(command)
    command.add_argument(
        "--pareto", metavar="A,B[,C]", help="the Pareto front of objectives instead, e.g. time,memory,cost"
    )
    command.add_argument(
        "-v", "--verbose", action="store_true", help="also how it was searched, why others are out, where the step goes"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    add_export(command)
    command.add_argument("--trace", type=Path, metavar="FILE", help="Chrome trace of the best layout (json or json.gz)")
    command.add_argument("--png", type=Path, metavar="FILE", help="Gantt chart of the best layout")
    command.set_defaults(run=_execute)


def add_search(command: argparse.ArgumentParser, top: int = 10) -> None:
    """Flags that say which layouts are looked for, by what, and how many."""
    command.add_argument("--top", type=int, default=top, metavar="K", help=f"layouts to report (default {top})")
    command.add_argument(
        "--method",
        default="auto",
        help="enumerate (exact), auto (then uneven stages where they gain; default), or relax",
    )
    add_space(command)
    add_goal(command)
    add_reliability(command)
    command.add_argument(
        "--robust", nargs="?", const="regret", default="", metavar="ORDER",
        help="order by expected regret (default), upper (end of the 90 %% interval) or best (probability to be)",
    )  # fmt: skip
    command.add_argument("--workers", type=int, default=1, metavar="N", help="processes that evaluate (default 1)")
    command.add_argument("--dask", default="", metavar="ADDRESS", help="evaluate on the workers of a Dask scheduler")
    command.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep what was evaluated here, and go on from it if it exists"
    )


def add_space(command: argparse._ActionsContainer) -> None:
    """Flags that say which layouts are tried."""
    command.add_argument("--fix", default="", metavar="LAYOUT", help='fix some dimensions, e.g. "tp=8,zero=1"')
    command.add_argument(
        "--schedules",
        default="",
        metavar="NAMES",
        help="pipeline schedules, as 1f1b,zb-h1,chimera; or all (that flush)",
    )
    command.add_argument(
        "--options", "--vary", dest="vary", default="", metavar="NAMES",
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
        "--constraint", dest="constraints", action="append", default=[], metavar="COMPARISON",
        help='e.g. "memory_bytes<70e9" or "step_time_s<2"; may be repeated',
    )  # fmt: skip
    command.add_argument(
        "--price", dest="price_per_device_hour", type=float, metavar="MONEY",
        help="per device and hour (default: the cluster's)",
    )  # fmt: skip
    command.add_argument(
        "--power", dest="power_w", type=float, metavar="W", help="of a busy device (default: its nominal power)"
    )
    command.add_argument(
        "--idle-power", dest="idle_power_w", type=float, metavar="W",
        help="of an idle device (default: the catalog's)",
    )  # fmt: skip
    command.add_argument(
        "--tokens", type=float, metavar="N", help="tokens to train on; cost and energy are per million without"
    )


def space_of(arguments: argparse.Namespace, problem: Problem) -> "SearchSpace":
    """The space that the flags describe."""
    from perfmodel.planning.layouts import SpaceWords

    return SpaceWords(**{f.name: getattr(arguments, f.name) for f in fields(SpaceWords)})(problem)


def _execute(arguments: argparse.Namespace) -> int:
    if arguments.program:
        return search_program(arguments)
    if arguments.pareto:
        front = run_pareto(arguments)
        if not front.layouts:
            raise PerfModelError("search: no layout fits and satisfies the constraints; without --pareto it says why")
        files = write(arguments, front.to_dict())
        emit(arguments, front.to_dict(), lambda: _show_search.pareto(front, files))
        return 0
    if arguments.export:
        export_framework(arguments)  # refused before anything is searched
    job, of_file = job_flags(arguments), arguments.job_file is not None
    result = run(arguments)
    if of_file and result.layouts:  # the file may say more of them than the best layout uses
        job += ["--devices", str(result.layouts[0].layout.devices)]
    report, runs = result.to_dict(), _runs(arguments, result)
    for told, one in zip(report["layouts"], runs, strict=False):
        told |= one.to_dict()
    files = write(arguments, report)
    if result.complete and result.layouts and arguments.export:
        files.append(_export(arguments, result))
    if result.complete and result.layouts and (arguments.trace or arguments.png):
        best = result.first_to_try
        arguments.devices, arguments.global_batch = None, best.global_batch
        drawn = predicted(arguments, best.layout, timeline=True, quiet=True)
        files += write_pictures(drawn, arguments.trace, arguments.png)
    if result.impossible and not arguments.json:
        raise PerfModelError(str(result.impossible))
    if result.layouts or result.complete or arguments.json:
        emit(
            arguments,
            report,
            lambda: _show_search.search(result, job, files, _of_first(result, runs), verbose=arguments.verbose),
        )
    if result.impossible:
        print(f"perfmodel: {result.impossible}", file=sys.stderr)
        return IMPOSSIBLE
    if not result.complete:
        raise KeyboardInterrupt(result.certificate)
    return 0


def _runs(arguments: argparse.Namespace, result: "SearchResult") -> "list[TrainingRun]":
    """What training on `--tokens` takes with every ranked layout; none where they are not given."""
    problem = problem_of(arguments, quiet=True)
    runs = [run_of(arguments, problem.replace(global_batch=p.global_batch), p) for p in result.layouts]
    return [one for one in runs if one is not None]


def _of_first(result: "SearchResult", runs: "Sequence[TrainingRun]") -> Sequence[str]:
    """What the whole run of the layout to try first takes."""
    return next((lines(run) for p, run in zip(result.layouts, runs, strict=False) if p is result.first_to_try), ())


def _export(arguments: argparse.Namespace, result: "SearchResult") -> str:
    """Write the best layout that the framework can run as its launch file; the file's name."""
    problem = problem_of(arguments, quiet=True)
    jobs = [replace(problem.job, global_batch=p.global_batch) for p in result.layouts]
    node = problem.cluster.devices_per_node
    path, _ = export_best(arguments, [p.layout for p in result.layouts], jobs, problem.model, node)
    return str(path)


def options_of(arguments: argparse.Namespace) -> "SearchOptions":
    """How the flags say to search; before `problem_of`, which keeps the first of several batches."""
    from perfmodel.planning.layouts import SearchOptions

    batches: list[int] = arguments.global_batch
    return SearchOptions(
        method=arguments.method,
        objective=arguments.objective,
        constraints=arguments.constraints,
        tariff=tariff_of(arguments),
        robust=arguments.robust,
        batches=batches if len(batches) > 1 else (),
        top=arguments.top,
        strict=arguments.strict,
        workers=arguments.workers,
        dask=arguments.dask,
        resume=arguments.resume,
        **arguments.of_search,
    )


def run(arguments: argparse.Namespace) -> "SearchResult":
    """What the command finds.

    Raises:
        PerfModelError: bad input.
    """
    from perfmodel.planning import layouts

    options = options_of(arguments)
    problem = problem_of(arguments)
    problem.require_devices()
    with progress("search") as report:
        return layouts.search(
            problem,
            space=lambda each: space_of(arguments, each),
            options=options,
            calibration=arguments.calibration,
            settings=arguments.set,
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
    question = layouts.ask(
        problem, space=space_of(arguments, problem), calibration=arguments.calibration, settings=arguments.set
    )
    with progress("pareto") as report:
        return layouts.pareto(
            question, [name.strip() for name in arguments.pareto.split(",") if name.strip()],
            constraints=arguments.constraints, tariff=tariff_of(arguments), progress=report,
            workers=arguments.workers, dask=arguments.dask,
        )  # fmt: skip


def write(arguments: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Write the report as JSON if asked for; names of the files."""
    from perfmodel.ingest.tables import write_json

    if not arguments.out:
        return []
    write_json(arguments.out, report)
    return [str(arguments.out)]
