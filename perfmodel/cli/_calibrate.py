"""`perfmodel calibrate`: measure this machine by a plan, or suggest a run to make;
`calibrate diff`: compare two calibrations."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli import _for_decision
from perfmodel.cli._files import add_job_file, lacking
from perfmodel.cli._flags import add_json, add_problem, layouts_of, problem_of
from perfmodel.cli._interrupts import terminable
from perfmodel.cli._show import emit
from perfmodel.display import progress, say
from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.spec import BACKENDS
from perfmodel.units import plural

if TYPE_CHECKING:
    from perfmodel.measure import Plan
    from perfmodel.measure.estimate import RemainingTime
    from perfmodel.measure.ranks import Agent, Launch
    from perfmodel.measure.tables import Point

LINE_EVERY_S = 30.0


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "calibrate",
        help="measure kernels and collectives on this machine; suggest which run to make; compare two calibrations",
    )
    _add_measured(command)
    _add_processes(command)
    _add_model(command)
    _for_decision.add_flags(command)
    add_json(command)
    command.set_defaults(run=_execute)
    _add_diff(command)


def _add_measured(command: argparse.ArgumentParser) -> None:
    """Add the flags that say what is measured, with which library, and where the tables go."""
    command.add_argument("--plan", type=Path, metavar="FILE", help="sweep plan (TOML)")
    command.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the tables and the cards that describe them",
    )
    command.add_argument(
        "--backend",
        default="jax",
        choices=BACKENDS,
        help="library whose kernels and collectives are measured (default jax)",
    )
    command.add_argument(
        "--resume",
        action="store_true",
        help="measure only missing rows. An interrupted run also continues without this flag, but "
        "then measures the disturbed rows of finished tables again",
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="print the remaining device-minutes without measuring",
    )


def _add_processes(command: argparse.ArgumentParser) -> None:
    """Add the flags of one process among several; launchers set most of them in the environment."""
    nodes = command.add_argument_group(
        "several nodes",
        "one process per rank, started by torchrun, mpirun or srun; see calibrate/TWO_NODES.md",
    )
    nodes.add_argument(
        "--launched",
        action="store_true",
        help="measure together with the other processes of the launcher",
    )
    nodes.add_argument(
        "--process",
        type=int,
        metavar="I",
        help="number of this process, if the launcher does not set it",
    )
    nodes.add_argument("--processes", type=int, metavar="N", help="number of processes")
    nodes.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address on which process 0 listens (default: a free port)",
    )
    nodes.add_argument(
        "--launch-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds to wait for all processes (default 120)",
    )


def _add_model(command: argparse.ArgumentParser) -> None:
    """Add the flags of a plan that is made of the events of a model's layouts."""
    model = command.add_argument_group("a plan made for a model, instead of --plan")
    add_job_file(command, positional=False, layout=True)
    add_problem(model)
    model.add_argument(
        "--layouts",
        action="append",
        default=[],
        metavar="LAYOUTS",
        help='layouts whose kernels and collectives are measured, e.g. "tp=8,dp=4;tp=4,pp=2,dp=4"; may be repeated',
    )
    model.add_argument(
        "--device", metavar="NAME", help="device that is measured (default: the cluster's)"
    )


def _add_diff(command: argparse.ArgumentParser) -> None:
    """Add `calibrate diff A B`, a sub-command of a command without positional arguments."""
    kinds = command.add_subparsers(dest="kind", metavar="diff")
    diff = kinds.add_parser("diff", help="compare two tables or folders of tables, row by row")
    diff.add_argument("first", type=Path, metavar="A")
    diff.add_argument("second", type=Path, metavar="B")
    diff.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print one JSON object to stdout",
    )


def _execute(arguments: argparse.Namespace) -> int:
    """Measure, or with --for-decision suggest what to measure, and show the report."""
    if arguments.kind is None and _for_decision.is_for_decision(arguments):
        return _for_decision.execute(arguments)

    # If there are several processes, only process 0 reports.
    report = run(arguments)
    if "process" not in report:
        emit(arguments, report, lambda: show(report))
    return 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the command; return the plan and the measured tables.

    Raises:
        PerfModelError: bad input, a plan that cannot be measured here, or a folder that is not this
            run's.
        KeyboardInterrupt: on SIGINT or SIGTERM, with what to do next as its message.
    """
    from perfmodel import measure

    if arguments.kind == "diff":
        return measure.compare(arguments.first, arguments.second)

    # One of several processes: serve the measurements that process 0 asks for.
    launch = _launch(arguments)
    if launch is not None and launch.index:
        with terminable():
            measure.serve_agent(launch, arguments.out, arguments.launch_timeout)
        return {"process": launch.index}
    if arguments.backend != "jax":
        # JAX only estimates times here, so leave a GPU's memory to the measured kernels.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    else:
        # JAX keeps the thread pool that it starts with, so start it with one core.
        with measure.open_backend("jax"):
            pass
    plan, saving = _plan(arguments)
    if arguments.out is None and not arguments.dry_run:
        raise PerfModelError("calibrate: give --out DIR, the folder for the tables")
    # A dry run needs no launcher, but checks the plan as if the launcher had started it.
    to_be_started = arguments.dry_run and _spans_nodes(plan)
    measure.check_plan(plan, arguments.backend, started=to_be_started or launch is not None)
    report: dict[str, Any] = {"device": plan.device, "backend": arguments.backend}
    if saving is not None:
        report["saving"] = saving
    if arguments.dry_run:
        refused = _refused_here(arguments, plan)
        remaining, rows = _unmeasured_rows(arguments, plan)
        return (
            report
            | measure.summary(remaining)
            | {"rows_kept": rows - len(remaining), "refused_here": refused}
        )
    return report | {"tables": _measure(arguments, plan, launch)}


def _launch(arguments: argparse.Namespace) -> "Launch | None":
    """Return this process's place in the launch; `None` if it measures alone."""
    from perfmodel.measure.ranks import find_launch

    launch = find_launch(
        process=arguments.process,
        processes=arguments.processes,
        coordinator=arguments.coordinator,
    )

    # A process that a launcher started without telling it of the others would measure the same as
    # they do, at the same time and on the same network.
    if not arguments.launched and arguments.process is None:
        if launch is not None and launch.count > 1 and arguments.backend != "nccl-tests":
            say(
                f"process {launch.index} of {launch.count} of {launch.launcher} measures alone; add --launched to "
                "measure with all of them",
                file=sys.stderr,
            )
        return None
    if launch is None:
        raise PerfModelError(
            "calibrate: --launched needs a start by torchrun, mpirun or srun; without these give --process I "
            "--processes N"
        )
    if arguments.backend == "nccl-tests" or arguments.dry_run:
        if arguments.dry_run:
            flag = "--dry-run"
        else:
            flag = "--backend nccl-tests, which starts its own programs,"
        raise PerfModelError(f"calibrate: {flag} cannot be used with a launcher or --launched")
    if arguments.out is None:
        raise PerfModelError("calibrate: give --out DIR, the folder for the tables")
    return launch


def _plan(arguments: argparse.Namespace) -> "tuple[Plan, dict[str, Any] | None]":
    """Return the sweep plan and, if it was made for a model, what it saves."""
    from perfmodel import measure

    # A plan comes from a file, or is made of the kernels and collectives of some layouts.
    if (arguments.plan is None) == (arguments.model is None):
        raise PerfModelError(
            "calibrate: give --plan FILE, or --model, --cluster, --layouts and --global-batch"
        )
    if arguments.plan is not None:
        return measure.read_plan(arguments.plan), None

    flags = lacking(arguments, "cluster", "layouts", "global_batch")
    if flags:
        raise PerfModelError(f"calibrate: --model needs {flags} too")
    from perfmodel.calibration import model_plan  # pyright: ignore[reportMissingImports]

    problem = problem_of(arguments)
    layouts = layouts_of(problem, ";".join(arguments.layouts))
    made = model_plan(
        problem.model,
        problem.cluster,
        problem.job,
        layouts,
        device=arguments.device or problem.cluster.device.name,
        framework=problem.framework,
    )
    return made.plan, made.to_dict()


def _refused_here(arguments: argparse.Namespace, plan: "Plan") -> str | None:
    """Reason why this machine cannot measure the plan, although another may; `None` if it can.

    Raises:
        PerfModelError: if the folder holds rows of another device or other software.
    """
    from perfmodel import measure

    # A dry run may be made on another machine than the one that will measure, so that what this
    # one lacks is reported and is not an error.
    if arguments.backend != "nccl-tests" and _spans_nodes(plan):
        most_nodes = max(op.num_nodes for op in plan.collectives)
        return (
            f"the plan has collectives over {most_nodes} nodes; start perfmodel on all of them with a launcher and "
            "--launched"
        )
    try:
        measure.check_machine(plan, arguments.backend)
    except PerfModelError as error:
        return str(error)
    if arguments.out is not None:
        measure.check_folder(plan, arguments.out, arguments.backend)
    return None


def _spans_nodes(plan: "Plan") -> bool:
    """Whether collectives pass between nodes that this machine does not emulate."""
    return plan.emulated_network is None and any(op.num_nodes > 1 for op in plan.collectives)


def _unmeasured_rows(arguments: argparse.Namespace, plan: "Plan") -> "tuple[list[Any], int]":
    """Estimates of the rows that are not measured yet, and the number of rows of the plan."""
    from perfmodel import measure

    # Estimates are by the shipped calibration, those of finished rows are left out.
    estimates = measure.estimate_plan(
        plan, arguments.backend, lambda points: guess_s(plan.device, points)
    )
    measured_rows = measure.kept_rows(plan, arguments.out) if arguments.out else {}
    return [estimate for estimate in estimates if estimate.key not in measured_rows], len(estimates)


def _measure(
    arguments: argparse.Namespace, plan: "Plan", launch: "Launch | None"
) -> list[dict[str, Any]]:
    """Measure the remaining rows of a plan; return the tables that were written."""
    from perfmodel import measure

    remaining, rows = _unmeasured_rows(arguments, plan)
    if len(remaining) < rows:
        say(f"{rows - len(remaining)} of {rows} rows are measured already", file=sys.stderr)
    try:
        # Every row is written as soon as it is measured: an interrupt or a full disk loses one
        # row at most.
        reporting = _remaining(measure.RemainingTime(remaining), rows)
        with terminable(), reporting as begin, _gathered(arguments, launch) as agents:
            written = measure.run_plan(
                plan,
                arguments.out,
                arguments.backend,
                progress=begin,
                only_missing=arguments.resume,
                agents=agents,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; measured rows are kept in {arguments.out}; run the same command to continue"
        ) from None
    except OSError as error:
        raise CalibrationError(
            f"{error.filename or arguments.out}: {error.strerror or error}; measured rows are kept; correct the "
            "problem, then run the same command to continue"
        ) from None
    return [{"path": str(arguments.out / card.table), **asdict(card)} for card in written]


@contextmanager
def _remaining(remaining: "RemainingTime", rows: int) -> "Iterator[Callable[[Point], None]]":
    """Yield a function that reports the remaining time; call it before each point.

    On a terminal it draws a bar, elsewhere it writes a line to stderr now and then.

    Args:
        rows: rows of the plan, including those measured earlier.
    """
    last_s = -inf
    with progress("calibrate") as report:

        def begin(point: "Point") -> None:
            nonlocal last_s
            done = rows - remaining.rows_left
            remaining.start(point)
            minutes = f"{remaining.device_s() / 60:.1f} device-minutes left"
            report(f"{point.op.family}, {minutes}", done, rows)

            # The bar is invisible in a log file, and a line per row would fill it.
            if not sys.stderr.isatty() and time.monotonic() - last_s >= LINE_EVERY_S:
                last_s = time.monotonic()
                say(
                    f"{done} of {rows} rows, {minutes}, now {point.op.family}",
                    file=sys.stderr,
                )

        yield begin


@contextmanager
def _gathered(
    arguments: argparse.Namespace, launch: "Launch | None"
) -> "Iterator[tuple[Agent, ...]]":
    """The processes of the launch, once all have connected; none if this one measures alone."""
    from perfmodel import measure

    if launch is None:
        yield ()
        return
    # Process 0 leaves its address in the folder, where the others find it.
    arguments.out.mkdir(parents=True, exist_ok=True)
    say(
        f"process 0 of {launch.count}, by {launch.launcher}, on {launch.node}: waits for the others",
        file=sys.stderr,
    )
    with measure.gathered(launch, arguments.out, arguments.launch_timeout) as agents:
        nodes = len({agent.hello.node for agent in agents})
        say(f"{len(agents)} processes on {nodes} {plural('node', nodes)}", file=sys.stderr)
        yield agents


def guess_s(device: str, points: "Sequence[Point]") -> list[float]:
    """Estimate the seconds of one call: kernels from the shipped calibration, collectives from
    bytes over link bandwidth.

    A device that no catalog knows is taken for this CPU, by its roofline.
    """
    from perfmodel import catalog
    from perfmodel.cost import KernelModel
    from perfmodel.ops import Collective

    try:
        known = catalog.device(device)
    except PerfModelError:
        known = catalog.device("cpu")
    kernels = [point.op for point in points if not isinstance(point.op, Collective)]

    # All kernels are priced in one call; their times are handed out in order below.
    times = iter(KernelModel.load().times(known, kernels).time_s.tolist())
    inside = known.link_bandwidth_bytes_per_s

    # A network card is no faster than its slot.
    between = min(inside, known.host_bandwidth_bytes_per_s or inside)
    seconds = []
    for point in points:
        if not isinstance(point.op, Collective):
            seconds.append(next(times))
            continue
        bytes_per_s = inside if point.op.num_nodes == 1 else between
        seconds.append(point.op.bytes / bytes_per_s)
    return seconds


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    # Reports of three commands in one: two tables side by side, tables that were measured, or what
    # there is to measure.
    if "cards" in report:
        _show_diff(report)
        return
    if "saving" in report:
        from perfmodel.calibration import saving_text

        say(saving_text(report["saving"]), "")
    if "tables" in report:
        for card in report["tables"]:
            say(f"{card['path']}: {card['rows']} rows, {card['suspect_rows']} of them disturbed")
        return
    done = f", {report['rows_kept']} already measured" if report["rows_kept"] else ""
    say(f"{report['rows']} rows to measure on {report['device']} by {report['backend']}{done}")
    for name, family in report["families"].items():
        say(f"  {name:15}{family['rows']:6} rows{family['device_minutes']:9.1f} device-minutes")
    say(
        f"about {report['device_minutes']:.1f} device-minutes, {report['minutes']:.1f} minutes in all"
    )
    if report["refused_here"]:
        say(f"this machine cannot measure the plan: {report['refused_here']}")


def _show_diff(report: dict[str, Any]) -> None:
    """Print the rows in which two calibrations differ."""
    say(f"{'':15}{'rows':>7}{'B / A':>9}{'apart':>8}{'only A':>8}{'only B':>8}")
    for name, family in report["families"].items():
        ratio = "-" if family["median_ratio"] is None else f"{family['median_ratio']:.3f}"
        apart_text = (
            "-" if family["beyond_intervals"] is None else f"{family['beyond_intervals']:.0%}"
        )
        counts = f"{family['only_in_first']:8}{family['only_in_second']:8}"
        say(f"{name:15}{family['rows']:7}{ratio:>9}{apart_text:>8}{counts}")
    say("apart: number of rows whose confidence intervals do not overlap")
    if any(report["suspect_rows"]):
        say(
            f"left out as disturbed: {report['suspect_rows'][0]} rows of A, {report['suspect_rows'][1]} of B"
        )

    # Entries of the two cards that differ may explain why the times do.
    for name, (a, b) in report["cards"].items():
        say(f"{name}: {a} | {b}")
    if not report["cards"]:
        say("machine, software and measuring tool are the same")
