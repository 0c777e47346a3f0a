"""`perfmodel emulate`: a training script as some ranks of a cluster that is not there."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._emit import reporting
from perfmodel.cli._emulate_report import show
from perfmodel.cli._emulate_settings import (
    conditions_of,
    delays_and_network,
    predicted_step,
    prices_of,
    ranks_of,
    sweep_of,
    wire_of,
)
from perfmodel.cli._flags import add_framework, add_json
from perfmodel.cli._job_file import add_job_file
from perfmodel.cli._launch import add_from, require
from perfmodel.errors import PerfModelError
from perfmodel.execution.emulation._orders import delayed_as

if TYPE_CHECKING:
    from perfmodel.execution.emulation import Emulation, Prices
    from perfmodel.spec import Cluster

_SWEPT_EVERY = 4


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "emulate", help="run an unmodified training script as if it were some ranks of a cluster: -- python train.py"
    )
    command.add_argument(
        "--world-size", type=int, metavar="N", help="ranks the script believes in (default: of the layout)"
    )
    command.add_argument("--cluster", help="catalog name or TOML: where the emulated ranks are")
    command.add_argument("--real-ranks", default="0", metavar="R,...", help="ranks that run the script (default 0)")
    command.add_argument(
        "--apart", action="store_true", help="real ranks exchange no data either: they wait for one another only"
    )
    command.add_argument(
        "--wire", action="store_true",
        help="one process stands for the other ranks on the wire: gloo's own messages are sent and answered",
    )  # fmt: skip
    command.add_argument(
        "--classes", type=int, metavar="K",
        help="find which ranks are alike (each is tried for two iterations), run one of each kind, K real at once",
    )  # fmt: skip
    command.add_argument("--calibration", type=Path, metavar="DIR", help="made by 'perfmodel fit', of the collectives")
    command.add_argument(
        "--prices", metavar="FILE|MODULE:FUNCTION",
        help="times of collectives instead of the calibration's: csv (collective,ranks,bytes,time_s[,core_s]) "
        "or a function of perfmodel.spec.Collective",
    )  # fmt: skip
    command.add_argument(
        "--occupancy", type=Path, metavar="FILE", help="csv as for --prices: core_s, processor time of collectives"
    )
    command.add_argument(
        "--measure", type=Path, metavar="FILE",
        help="instead of a script: measure times and core time of torch's collectives between N ranks here",
    )  # fmt: skip
    command.add_argument(
        "--delay", action="append", default=[], metavar="KIND=TIME", help="added to collectives, all_reduce=2ms"
    )
    add_job_file(command, "network, as for whatif: inter_node_bandwidth=2x; or ", positional=False, layout=True)
    command.add_argument(
        "--straggler", type=float, default=1.0, metavar="F", help="emulated ranks take F times as long"
    )
    command.add_argument("--jitter", type=float, metavar="S", help="log-normal spread of emulated ranks' compute time")
    command.add_argument("--fail", metavar="RANK@CALL", help="an emulated rank that dies at a collective of the world")
    command.add_argument("--sweep", metavar="KIND=FIRST:LAST:COUNT", help="delays in turn, as all_reduce=0:10ms:11")
    command.add_argument(
        "--every", type=int, default=_SWEPT_EVERY, metavar="I", help="iterations for which each delay of a sweep stays"
    )
    command.add_argument("--png", type=Path, metavar="FILE", help="picture of the sweep's curve")
    command.add_argument("--seed", type=int, default=0, help="of jitter")
    command.add_argument(
        "--pin",
        action="store_true",
        help="keep every real rank on a core of its own, on which threads of collectives come first",
    )
    command.add_argument("--timeout", type=float, default=300.0, metavar="S", help="longest silence of a rank")
    command.add_argument("--out", type=Path, metavar="DIR", help="tables, and the timeline for Perfetto")
    command.add_argument(
        "--model", help="JOB.toml, or a model with --layout and --global-batch: compare with the prediction"
    )
    add_from(command)
    command.add_argument("--layout", help="as for predict")
    add_framework(command)
    command.add_argument("--global-batch", type=int, metavar="B", help="sequences per step")
    command.add_argument("--seq-len", type=int, metavar="S", help="tokens per sequence (default: the model's)")
    command.add_argument("--dtype", choices=("bf16", "fp16", "fp32", "tf32"), help="default fp32")
    command.set_defaults(devices=None)
    require(command, "world_size", "cluster")
    command.add_argument("script", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="as from a shell")
    add_json(command)
    command.set_defaults(run=reporting(run, show))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report, and the files written.

    Raises:
        PerfModelError: impossible settings, and whatever ends an emulation, with rank, call and number.
    """
    from perfmodel import catalog
    from perfmodel.execution.emulation import Emulation, emulate, emulated_curve, measure_prices
    from perfmodel.ingest.tables import write_text
    from perfmodel.measure import usable_cores

    if arguments.measure:
        table = measure_prices(arguments.world_size)
        write_text(arguments.measure, table.to_csv(index=False))
        return {"measured": table.to_dict(orient="records"), "written": [str(arguments.measure)]}
    delays_s, scenario = delays_and_network(arguments)
    known = [arguments.model, arguments.layout, arguments.global_batch]
    if any(value is not None for value in known) and None in known:
        raise PerfModelError("emulate: a prediction to compare with takes --model, --layout and --global-batch")
    if arguments.every < 1:
        raise PerfModelError(f"emulate: --every must be at least 1 iteration, got {arguments.every}")
    if arguments.png and not arguments.sweep:
        raise PerfModelError("emulate: --png draws a curve; give --sweep KIND=FIRST:LAST:COUNT too")
    if arguments.sweep and arguments.model:
        raise PerfModelError("emulate: with --sweep iterations differ; give --delay to compare one with --model")
    cluster = scenario.cluster(catalog.cluster(arguments.cluster))
    cluster.require(arguments.world_size, "the emulated world")
    network = wire_of(arguments, cluster)
    prices, measured = prices_of(arguments, cluster) if network is None else (None, {})
    script = tuple(arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script)
    if len(script) == 1 and script[0].endswith(".ir"):
        if prices is None:
            raise PerfModelError("emulate: a program of JAX kernels sends no messages; leave --wire out")
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
    if arguments.classes is not None:
        return _by_class(arguments, emulation, cluster)
    result = emulate(emulation, arguments.out)
    report: dict[str, Any] = {"cluster": cluster.name} | result.to_dict()
    report["never_called"] = _never_called({*delays_s, *filter(None, [swept])}, result.collectives().kind)
    written = _write(result, arguments.out) if arguments.out else []
    if swept:
        curve = emulated_curve(result, swept, sweep_s, arguments.every)
        report["curve"] = curve.to_dict()
        if arguments.png:
            from perfmodel.viz import draw_emulated_curve, save_figure

            save_figure(draw_emulated_curve(curve), arguments.png)
            written.append(str(arguments.png))
    elif report["iterations"] and network is None:
        report["slack_s"] = _slack(result)
    if predicted is not None and report["iterations"]:
        iteration_s, memory_bytes = predicted
        report["predicted"] = {
            "iteration_s": iteration_s,
            "iteration_error": iteration_s / report["iteration_s"] - 1,
            "memory_bytes": memory_bytes,
            "memory_error": memory_bytes / max(1, report["training_memory_bytes"]) - 1,
        }
    return report | {"written": written}


def _program(
    arguments: argparse.Namespace, path: Path, cluster: "Cluster", prices: "Prices", delays_s: Mapping[str, float]
) -> dict[str, Any]:
    """A program in its text form: JAX kernels of its real ranks, one after another."""
    from dataclasses import replace

    import pandas as pd

    from perfmodel.execution import random_inputs
    from perfmodel.execution.emulation import classes_of_program, emulate_program
    from perfmodel.ingest.tables import write_text
    from perfmodel.program.ir import parse_function, undistributed

    of_scripts = {
        "--straggler": arguments.straggler != 1, "--jitter": arguments.jitter is not None, "--fail": arguments.fail,
        "--sweep": arguments.sweep, "--pin": arguments.pin, "--model": arguments.model,
    }  # fmt: skip
    if given := [name for name, value in of_scripts.items() if value]:
        raise PerfModelError(f"emulate: {', '.join(given)} is for scripts; a program takes --delay, --set and --out")
    program = undistributed(parse_function(path.read_text()))
    classes = classes_of_program(program) if arguments.classes is not None else None
    if program.n_devices != arguments.world_size:
        raise PerfModelError(f"{path}: the program is for {program.n_devices} devices, not {arguments.world_size}")
    inputs = random_inputs(program, arguments.seed)
    delayed = replace(prices, delays_s=delays_s)
    real = classes.representatives if classes is not None else ranks_of(arguments.real_ranks)
    runs = [emulate_program(program, inputs, delayed, rank) for rank in real]
    ranks = [
        {"rank": r.rank, "instructions": len(r.instructions), "step_s": r.step_s, "communication_s": r.communication_s}
        for r in runs
    ]
    written = []
    if arguments.out:
        tables = [
            pd.DataFrame(
                {"rank": r.rank, "instruction": r.instructions, "collective": r.collective}
                | {f"repeat{n}_s": spans_s for n, spans_s in enumerate(r.spans_s)}
            )
            for r in runs
        ]
        written.append(str(arguments.out / "instructions.csv"))
        write_text(Path(written[0]), pd.concat(tables).to_csv(index=False))
    called = (kind for r in runs for kind, across in zip(r.instructions, r.collective, strict=True) if across)
    alike = {} if classes is None else {"classes": [list(ranks) for ranks in classes.ranks]}
    return alike | {
        "cluster": cluster.name, "world_size": arguments.world_size, "ranks": ranks,
        "never_called": _never_called(delays_s, called), "written": written,
    }  # fmt: skip


def _by_class(arguments: argparse.Namespace, emulation: "Emulation", cluster: "Cluster") -> dict[str, Any]:
    """A rank of each class, in turn; the slowest class is the job's pace where none waits for another."""
    from perfmodel.execution.emulation import classes_of_script, run_classes

    of_one_run = {
        "--sweep": arguments.sweep,
        "--model": arguments.model,
        "--out": arguments.out,
        "--png": arguments.png,
    }
    if given := [name for name, value in of_one_run.items() if value]:
        raise PerfModelError(f"emulate: {', '.join(given)} is of one run; --classes makes several, leave one out")
    classes = classes_of_script(emulation, cluster, arguments.classes)
    ran = {rank.rank: rank for run in run_classes(emulation, classes, arguments.classes) for rank in run.ranks}
    rows = []
    for ranks in classes.ranks:
        table: Any = ran[ranks[0]].iterations()
        times = {name: float(table[name].median()) for name in ("time_s", "communication_s")}
        rows.append({"ranks": list(ranks), "real": ranks[0]} | times)
    return {
        "cluster": cluster.name, "world_size": emulation.world_size, "classes": rows,
        "iteration_s": max(row["time_s"] for row in rows), "written": [],
    }  # fmt: skip


def _never_called(delayed: Iterable[str], called: Iterable[str]) -> list[str]:
    """Kinds that were to take longer, of which there was none."""
    return sorted({*delayed} - {delayed_as(kind) for kind in called})


def _write(result: Any, out: Path) -> list[str]:
    from perfmodel.execution.emulation import measured_trace
    from perfmodel.ingest import write_measured_trace
    from perfmodel.ingest.tables import write_text

    written = [out / "collectives.csv", out / "iterations.csv"]
    write_text(written[0], result.collectives().to_csv(index=False))
    write_text(written[1], result.iterations().to_csv(index=False))
    if len(result.iterations()):
        written.append(out / "timeline.json.gz")
        write_measured_trace(measured_trace(result), written[-1], "emulation")
    return list(map(str, written))


def _slack(result: Any) -> dict[str, dict[str, float]]:
    """By kind of collective: how many are felt, and what delay of each would be hidden."""
    import numpy as np

    from perfmodel.execution.emulation import replay, typical

    rank = result.ranks[0]
    count = int((rank.marks.name == "iteration_end").sum())
    found = replay(typical(rank, np.arange(min(4, count - 1), count)))
    kinds = sorted({kind for kind in found.kinds if kind})
    return {
        kind: {
            "count": float(found.of(kind).sum()), "felt": found.felt(kind), "hidden_s": found.slack_s(kind),
        }
        for kind in kinds
    }  # fmt: skip
