"""`perfmodel emulate`: runs a training script as some ranks of an emulated cluster."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfmodel.cli._emulate_settings import (
    SHAPED,
    add_flags,
    conditions_of,
    delays_and_network,
    placed,
    predicted_step,
    prices_of,
    ranks_of,
    sweep_of,
    wire_of,
)
from perfmodel.cli._flags import add_json
from perfmodel.cli._interrupts import terminable
from perfmodel.cli._show import reporting, written
from perfmodel.display import say
from perfmodel.emulate.environment import delayed_as
from perfmodel.errors import PerfModelError
from perfmodel.files import data_limit_bytes, read_text
from perfmodel.units import duration, number_of, span

if TYPE_CHECKING:
    from perfmodel.emulate import EmulatedCurve, EmulatedProgram, EmulatedRun, Emulation, Prices
    from perfmodel.spec import Cluster


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "emulate",
        help="run an unmodified training script as some ranks of a cluster; the script comes "
        "last: -- python train.py",
    )
    add_flags(command)
    command.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="command of the script, as in a shell",
    )
    add_json(command)
    command.set_defaults(run=reporting(run, show))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the command; return its report. The ranks that it starts always end with it.

    Raises:
        PerfModelError: impossible settings, and whatever ends an emulation, with rank, call and
            number.
    """
    with terminable():
        return _report(arguments)


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the flags, run the emulation, and return its report."""
    from perfmodel import catalog
    from perfmodel.emulate import Emulation, emulate
    from perfmodel.measure import usable_cores

    if arguments.measure:
        return _measure(arguments)

    # Everything is checked before the script is started.
    delays_s, scenario = delays_and_network(arguments)
    _check_flags(arguments)
    cluster = scenario.cluster(catalog.cluster(arguments.cluster))
    cluster.require(arguments.world_size, "the emulated world")
    network = wire_of(arguments, cluster)
    prices, measured = prices_of(arguments, cluster) if network is None else (None, {})

    # A program in text form is emulated instruction by instruction, without a script.
    script = tuple(arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script)
    if len(script) == 1 and script[0].endswith(".ir"):
        if prices is None:
            raise PerfModelError(
                "emulate: --wire is for scripts, because a program sends no messages; leave --wire out"
            )
        return _program(arguments, Path(script[0]), cluster, prices, delays_s)
    swept, sweep_s = sweep_of(arguments.sweep)
    predicted = predicted_step(arguments, scenario, delays_s) if arguments.model else None
    emulation = Emulation(
        command=script,
        world_size=arguments.world_size,
        ranks_per_node=cluster.devices_per_node,
        real_ranks=ranks_of(arguments.real_ranks),
        prices=prices,
        wire=network,
        cores=usable_cores() if arguments.pin else (),
        timeout_s=arguments.timeout,
        conditions=measured
        | conditions_of(arguments)
        | {
            "delays_s": delays_s,
            "swept": swept,
            "sweep_s": sweep_s,
            "sweep_every": arguments.every,
            "apart": arguments.apart,
        },
    )

    # Hosts of the emulated network exist only inside this block.
    with placed(arguments, cluster) as places:
        emulation = replace(emulation, **places)
        if arguments.classes is not None:
            return _by_class(arguments, emulation, cluster)
        result = emulate(emulation, arguments.out)

    return {"cluster": cluster.name} | _report_of_run(
        arguments, result, swept, sweep_s, delays_s, predicted
    )


def _report_of_run(
    arguments: argparse.Namespace,
    result: "EmulatedRun",
    swept: str,
    sweep_s: Sequence[float],
    delays_s: Mapping[str, float],
    predicted: tuple[float, float] | None,
) -> dict[str, Any]:
    """Report a run: figures, files, the sweep's curve or collectives' slack, the prediction.

    Args:
        swept, sweep_s: the kind of collective whose delay is swept (empty if none), and its delays.
        delays_s: delays of kinds of collectives that are the same in all iterations.
        predicted: predicted step and memory, if they are asked for.
    """
    from perfmodel.emulate import emulated_curve

    # A delay has no effect on a kind of collective that the script never calls: warn of it.
    report: dict[str, Any] = result.to_dict()
    delayed_kinds = {*delays_s, swept} if swept else {*delays_s}
    report["never_called"] = _never_called(delayed_kinds, result.collectives().kind)
    written = _write(result, arguments.out) if arguments.out else []

    # A sweep shows by itself which delays slow the step; without one, a replay of the recorded
    # calls says how much slack they have. (Real messages on the wire are not replayed.)
    if swept:
        curve = emulated_curve(result, swept, sweep_s, arguments.every)
        report["curve"] = curve.to_dict()
        written += _draw_curve(curve, arguments.png)
    elif report["iterations"] and not arguments.wire:
        report["slack_s"] = _slack(result)
    if predicted is not None and report["iterations"]:
        report["predicted"] = _beside_prediction(report, *predicted)
    return report | {"written": written}


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time this machine's collectives and write them as a table of prices."""
    from perfmodel.emulate import measure_prices
    from perfmodel.ingest.tables import write_text

    table = measure_prices(arguments.world_size)
    write_text(arguments.measure, table.to_csv(index=False))
    return {
        "measured": table.to_dict(orient="records"),
        "written": [str(arguments.measure)],
    }


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that cannot be combined."""
    # A prediction takes all three flags or none.
    prediction_flags = [arguments.model, arguments.layout, arguments.global_batch]
    n_missing = prediction_flags.count(None)
    if 0 < n_missing < len(prediction_flags):
        raise PerfModelError(
            "emulate: to compare with a prediction, give --model, --layout and --global-batch"
        )
    if arguments.every < 1:
        raise PerfModelError(
            f"emulate: --every must be at least 1 iteration, got {arguments.every}"
        )
    if arguments.sweep and arguments.model:
        raise PerfModelError(
            "emulate: --sweep changes the delay between iterations, so it cannot be compared with --model; "
            "use --delay instead"
        )


def _draw_curve(curve: "EmulatedCurve", path: Path | None) -> list[str]:
    """Draw the curve of a sweep if a file for it is named; return the files written."""
    if not path:
        return []
    from perfmodel.viz import draw_emulated_curve, save_figure

    save_figure(draw_emulated_curve(curve), path)
    return [str(path)]


def _beside_prediction(
    report: Mapping[str, Any], iteration_s: float, memory_bytes: float
) -> dict[str, float]:
    """Return the predicted iteration time, and its error relative to the emulated one."""
    return {
        "iteration_s": iteration_s,
        "iteration_error": iteration_s / report["iteration_s"] - 1,
        "memory_bytes": memory_bytes,
        "memory_error": memory_bytes / max(1, report["training_memory_bytes"]) - 1,
    }


def _program(
    arguments: argparse.Namespace,
    path: Path,
    cluster: "Cluster",
    prices: "Prices",
    delays_s: Mapping[str, float],
) -> dict[str, Any]:
    """A program in its text form: JAX kernels of its real ranks, one after another."""
    from perfmodel.emulate import classes_of_program, emulate_program
    from perfmodel.ir import parse_function, undistributed
    from perfmodel.ir.execution import random_inputs

    _refuse_flags_of_scripts(arguments)
    program = undistributed(parse_function(read_text(path, data_limit_bytes())))
    if program.n_devices != arguments.world_size:
        raise PerfModelError(
            f"{path}: the program is for {number_of(program.n_devices, 'device')}, not {arguments.world_size}"
        )

    # Ranks of one class do the same, so that one of each is run.
    report: dict[str, Any] = {}
    real_ranks = ranks_of(arguments.real_ranks)
    if arguments.classes is not None:
        classes = classes_of_program(program)
        report["classes"] = [list(ranks) for ranks in classes.ranks]
        real_ranks = classes.representatives
    inputs = random_inputs(program, arguments.seed)
    delayed = replace(prices, delays_s=delays_s)
    runs = [emulate_program(program, inputs, delayed, rank) for rank in real_ranks]

    # A delay of a collective that never ran would otherwise look like one that costs nothing.
    called: list[str] = []
    ranks = []
    for run in runs:
        called += [
            kind for kind, across in zip(run.instructions, run.collective, strict=True) if across
        ]
        ranks.append(
            {
                "rank": run.rank,
                "instructions": len(run.instructions),
                "step_s": run.step_s,
                "communication_s": run.communication_s,
            }
        )
    return report | {
        "cluster": cluster.name,
        "world_size": arguments.world_size,
        "ranks": ranks,
        "never_called": _never_called(delays_s, called),
        "written": _write_instructions(runs, arguments.out) if arguments.out else [],
    }


def _refuse_flags_of_scripts(arguments: argparse.Namespace) -> None:
    """Refuse flags that only a script can follow."""
    script_flags = {
        "--straggler": arguments.straggler != 1,
        "--jitter": arguments.jitter is not None,
        "--fail": arguments.fail,
        "--sweep": arguments.sweep,
        "--pin": arguments.pin,
        "--model": arguments.model,
    }

    # A program's kernels run one after another in this process: there is no other process that
    # could be slowed, pinned or stopped.
    misplaced = [name for name, value in script_flags.items() if value]
    if misplaced:
        raise PerfModelError(
            f"emulate: {', '.join(misplaced)} works only with scripts; a program takes --delay, --set and --out"
        )


def _write_instructions(runs: "Sequence[EmulatedProgram]", out: Path) -> list[str]:
    """Write the times of each instruction in each repeat, rank by rank; return the files."""
    import pandas as pd

    from perfmodel.ingest.tables import write_text

    tables = []
    for run in runs:
        columns: dict[str, Any] = {
            "rank": run.rank,
            "instruction": run.instructions,
            "collective": run.collective,
        }
        for repeat, spans_s in enumerate(run.spans_s):
            columns[f"repeat{repeat}_s"] = spans_s
        tables.append(pd.DataFrame(columns))
    file = out / "instructions.csv"
    write_text(file, pd.concat(tables).to_csv(index=False))
    return [str(file)]


def _by_class(
    arguments: argparse.Namespace, emulation: "Emulation", cluster: "Cluster"
) -> dict[str, Any]:
    """Run a rank of each class in turn; the slowest class sets the pace of the others."""
    from perfmodel.emulate import classes_of_script, run_classes

    of_one_run = {
        "--sweep": arguments.sweep,
        "--model": arguments.model,
        "--out": arguments.out,
        "--png": arguments.png,
        "--peer shaped": arguments.peer == SHAPED,
    }
    misplaced = [name for name, value in of_one_run.items() if value]
    if misplaced:
        raise PerfModelError(
            f"emulate: {', '.join(misplaced)} needs a single run, and --classes makes several; leave one out"
        )

    # Ranks of one class do the same, so that one of each is run.
    classes = classes_of_script(emulation, cluster, arguments.classes)
    ran = {}
    for run in run_classes(emulation, classes, arguments.classes):
        ran |= {rank.rank: rank for rank in run.ranks}
    rows = []
    for ranks in classes.ranks:
        table: Any = ran[ranks[0]].iterations()
        times = {name: float(table[name].median()) for name in ("time_s", "communication_s")}
        rows.append({"ranks": list(ranks), "real": ranks[0]} | times)
    return {
        "cluster": cluster.name,
        "world_size": emulation.world_size,
        "classes": rows,
        "iteration_s": max(row["time_s"] for row in rows),
        "written": [],
    }


def _never_called(delayed: Iterable[str], called: Iterable[str]) -> list[str]:
    """Kinds of collectives that were delayed but never called."""
    return sorted({*delayed} - {delayed_as(kind) for kind in called})


def _write(result: Any, out: Path) -> list[str]:
    """Write the tables and the timeline of an emulated run; returns their paths."""
    from perfmodel.emulate import measured_trace
    from perfmodel.ingest.profiles.chrome import write_measured_trace
    from perfmodel.ingest.tables import write_text

    written = [out / "collectives.csv", out / "iterations.csv"]
    write_text(written[0], result.collectives().to_csv(index=False))
    write_text(written[1], result.iterations().to_csv(index=False))
    if len(result.iterations()):
        written.append(out / "timeline.json.gz")
        write_measured_trace(measured_trace(result), written[-1], "emulation")
    return list(map(str, written))


def _slack(result: Any) -> dict[str, dict[str, float]]:
    """Count collectives by kind, and those that feel a delay; find the delay that stays hidden."""
    import numpy as np

    from perfmodel.emulate import replay, typical

    rank = result.ranks[0]
    count = int((rank.marks.name == "iteration_end").sum())
    # The first iterations are warm-up.
    replayed = replay(typical(rank, np.arange(min(4, count - 1), count)))
    slack = {}
    for kind in sorted({kind for kind in replayed.kinds if kind}):
        slack[kind] = {
            "count": float(replayed.is_of_kind(kind).sum()),
            "felt": replayed.calls_felt(kind),
            "hidden_s": replayed.slack_s(kind),
        }
    return slack


_NO_SLACK_S: Final = 1e-9
"""Slack of a collective below which it counts as none."""
_BUSY_S: Final = 2e-3
"""Emulating a call takes less than this, unless the machine is busy."""


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    # Four kinds of reports: of a program in its text form, by classes of ranks, of prices that were
    # measured, or of a script.
    if "ranks" in report:
        for r in report["ranks"]:
            times = (
                f"{duration(r['step_s'])}, of which {duration(r['communication_s'])} in collectives"
            )
            say(f"rank {r['rank']} of {report['world_size']} on {report['cluster']}: {times}")
    elif "classes" in report:
        for row in report["classes"]:
            ranks = ", ".join(map(str, row["ranks"]))
            times = f"{duration(row['time_s'])}, {duration(row['communication_s'])} in collectives"
            say(f"ranks {ranks}, by rank {row['real']}: iteration {times}")
        say(f"slowest class {duration(report['iteration_s'])}")
    elif "measured" in report:
        for row in report["measured"]:
            say(
                f"{row['collective']:>15} {row['bytes']:>10} bytes, {number_of(row['ranks'], 'rank')}: "
                f"{duration(row['time_s'])}, {duration(row['core_s'])} of the core"
            )
    else:
        real = ", ".join(map(str, report["real_ranks"]))
        say(
            f"rank {real} of {report['world_size']} on {report['cluster']}: {report['collectives']} collectives"
        )
        if report["iterations"]:
            _show_iterations(report)
        training_mib = report["training_memory_bytes"] / 2**20
        say(
            f"peak memory {report['peak_memory_bytes'] / 2**20:.0f} MiB, {training_mib:.0f} MiB of it since the "
            "script initialised torch.distributed"
        )
    wire = report.get("wire")
    if wire:
        say(
            f"on the wire {wire['messages']} messages, {wire['nbytes'] / 2**20:.4g} MiB; the process for the "
            f"emulated ranks used {wire['cpu_s']:.3g} s of CPU time in {wire['wall_s']:.3g} s"
        )
    # Emulating a call takes microseconds: milliseconds mean that something else had the cores.
    if report.get("overhead_s", 0.0) > _BUSY_S:
        say(
            f"emulating a call took {duration(report['overhead_s'])}, which was subtracted; the machine is busy, "
            "so do not trust these times"
        )
    for kind in report.get("never_called", ()):
        say(f"the script called no {kind}, so its delay had no effect")
    written(report["written"])


def _show_iterations(report: Mapping[str, Any]) -> None:
    """Print the times of iterations, the cost of delays, and the prediction."""
    say(
        f"iteration {duration(report['iteration_s'])} (median of {report['iterations']}; 8 of 10 take "
        f"{span(duration(report['iteration_p10_s']), duration(report['iteration_p90_s']))}): "
        f"forward {duration(report['forward_s'])}, backward {duration(report['backward_s'])}, "
        f"optimizer {duration(report['optimizer_s'])}"
    )
    say(
        f"communication {duration(report['communication_s'])}, {report['overlap']:.0%} of it overlapped; "
        f"core busy {report['utilisation']:.0%}"
    )

    # By how much each kind of collective could slow down unnoticed.
    for kind, slack in report.get("slack_s", {}).items():
        tolerance = (
            f"each of the others may take {duration(slack['hidden_s'])} longer without effect"
        )
        if slack["hidden_s"] < _NO_SLACK_S:
            tolerance = "the others slow it with any delay"
        say(f"{kind}: {slack['felt']:.0f} of {slack['count']:.0f} calls slow the step; {tolerance}")
    curve = report.get("curve")
    if curve:
        say(f"{'delay':>9} {'emulated':>10} {'predicted':>10}")
        for delay_s, emulated_s, predicted_s in zip(
            curve["delays_s"], curve["emulated_s"], curve["predicted_s"], strict=True
        ):
            say(f"{duration(delay_s):>9} {duration(emulated_s):>10} {duration(predicted_s):>10}")
        say(
            f"delays of {curve['collective']} up to {duration(curve['hidden_s'])} are hidden by "
            f"computation: {curve['felt']:.0f} calls slow the step with shorter delays, "
            f"{curve['felt_at_most']:.0f} with the longest"
        )
    predicted = report.get("predicted")
    if predicted:
        say(
            f"predicted {duration(predicted['iteration_s'])} ({predicted['iteration_error']:+.1%}), "
            f"memory {predicted['memory_bytes'] / 2**20:.0f} MiB ({predicted['memory_error']:+.1%})"
        )
