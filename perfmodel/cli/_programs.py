"""`perfmodel distribute` and `perfmodel simulate`: writes a model as a distributed program, and
predicts its time."""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perfmodel.cli._files import PROGRAM_HELP
from perfmodel.cli._flags import add_calibration, add_json, sequence_length
from perfmodel.cli._import_model import add_dimensions, dimension
from perfmodel.cli._show import emit, reporting, written
from perfmodel.display import progress, say
from perfmodel.errors import PerfModelError
from perfmodel.units import GIB, dtype_name, duration, number_of, scaled

if TYPE_CHECKING:
    from perfmodel.ir import Program
    from perfmodel.ir.importers import SourceSettings

_LAYOUT = (
    "as dp=2,tp=2,pp=2,micro_batches=4 (also ep, vpp, schedule, steps, zero, sequence_parallel, "
    "checkpoint), or the four numbers D/T/P/K"
)


def add_distribute(commands: Any) -> None:
    """Register the command `distribute` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "distribute",
        help="write a model as a distributed program, with data, tensor and pipeline parallelism",
    )
    add_source(command, "SOURCE")
    command.add_argument("--layout", default="", help=f"{_LAYOUT}; default: one device")
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        required=True,
        help="text form of the program (FILE.ir)",
    )
    add_json(command)
    command.set_defaults(run=reporting(distribute, show_distributed))


def add_simulate(commands: Any) -> None:
    """Register the command `simulate` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "simulate", help="predict time, memory and timeline of a program on a cluster"
    )
    add_source(command, "PROGRAM")
    command.add_argument("--layout", default="", help=f"first distribute the program, {_LAYOUT}")
    command.add_argument("--cluster", required=True, help="catalog name or TOML")
    command.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="timeline as Chrome trace (json or json.gz)",
    )
    add_calibration(command)
    add_json(command)
    command.set_defaults(run=reporting(simulate, show_simulated))


def add_source(command: argparse.ArgumentParser, metavar: str) -> None:
    """Add the flags for the program and for settings that its source leaves open."""
    command.add_argument("program", metavar=metavar, help=PROGRAM_HELP)
    command.add_argument(
        "--global-batch", type=int, metavar="B", help="samples per step (for catalog models)"
    )
    command.add_argument(
        "--seq-len",
        type=sequence_length,
        default=0,
        metavar="S",
        help="tokens per sequence (catalog models)",
    )
    command.add_argument(
        "--dtype",
        type=dtype_name,
        default="fp32",
        choices=("fp64", "fp32", "bf16", "fp16"),
        help="element type (catalog models)",
    )
    command.add_argument(
        "--mode",
        choices=("train", "inference"),
        help="training step or forward pass (default: train if the source returns a loss; catalog models: train)",
    )
    command.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="read the PyTorch module as one of N tensor-parallel ranks that call collectives, and write all N",
    )
    command.add_argument(
        "--sharded",
        action="append",
        default=[],
        metavar="NAME=AXIS",
        help="with --ranks: a tensor that is sharded over the ranks but not marked as such by "
        "Megatron-LM (repeatable)",
    )
    add_values(command)


def add_values(command: argparse.ArgumentParser) -> None:
    """Add the flags for sizes and inputs that a program's source leaves open."""
    add_dimensions(command)
    command.add_argument(
        "--input-value",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of an input that shapes or masks depend on: a number, a JSON list or FILE.npy (repeatable)",
    )
    command.add_argument(
        "--pad-vocab",
        type=int,
        default=1,
        metavar="N",
        help="pad vocabularies to a multiple of N: 50257 needs it for tp=8",
    )


def source_program(arguments: argparse.Namespace) -> "Program":
    """The program described by the flags of `add_source`.

    Raises:
        PerfModelError: as `perfmodel.ir.importers.read_program`.
    """
    from perfmodel.ir.importers import read_program, sharded_axis

    if arguments.ranks < 1:
        raise PerfModelError(f"--ranks must be at least 1, got {arguments.ranks}")
    settings = replace(
        _source_settings(arguments, arguments.global_batch, arguments.mode),
        ranks=arguments.ranks,
        sharded=dict(map(sharded_axis, arguments.sharded)),
    )
    return read_program(arguments.program, settings)


def _source_settings(
    arguments: argparse.Namespace, batch: int | None, mode: Literal["train", "inference"] | None
) -> "SourceSettings":
    """Settings of a source from the flags for sizes, element type and inputs, for one device."""
    from perfmodel.ir.importers import SourceSettings, input_value

    return SourceSettings(
        batch=batch,
        seq_len=arguments.seq_len or 0,
        dtype=arguments.dtype or "fp32",
        mode=mode,
        dims=dict(map(dimension, arguments.dim)),
        values=dict(map(input_value, arguments.input_value)),
        pad_vocab=arguments.pad_vocab,
    )


def _distributed(arguments: argparse.Namespace) -> "Program":
    """Read the program that the flags name, and distribute it if they state a layout."""
    from perfmodel.ir.distribute import Degrees, distribute

    program = source_program(arguments)
    if not arguments.layout:
        return program
    if program.n_devices > 1:
        raise PerfModelError(
            f"{arguments.program}: is already distributed over {number_of(program.n_devices, 'device')}; leave --layout out"
        )
    return distribute(program, Degrees.parse(arguments.layout))


def distribute(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the program; returns its statistics.

    Raises:
        PerfModelError: as `source_program`, or a layout that the program does not divide into.
    """
    from collections import Counter

    from perfmodel.ingest.tables import write_text
    from perfmodel.ir import OPS, live_memory, to_text, work

    program = _distributed(arguments)
    write_text(arguments.out, to_text(program))

    # The report counts collectives, parameters and FLOPs of the program as it was written.
    done = work(program.function)
    ops = Counter(i.op for i in program.function.instructions if OPS[i.op].collective)
    return {
        "program": program.function.name,
        "devices": program.n_devices,
        "instructions": len(program.function.instructions),
        "collectives": dict(sorted(ops.items())),
        "parameters": sum(prod(w.shape) for w in program.inputs_of("parameter")),
        "flops": float(done.flops.sum()),
        "peak_memory_bytes": float(live_memory(program.function).peak_bytes.max()),
        "written": [str(arguments.out)],
    }


def show_distributed(report: Mapping[str, Any]) -> None:
    """The report for people."""
    say(
        f"@{report['program']}: {report['instructions']} instructions on {report['devices']} device(s), "
        f"{report['parameters']:,} parameters, {scaled(report['flops'], 'FLOP')}"
    )
    say(
        "collectives: "
        + (", ".join(f"{op} {n}" for op, n in report["collectives"].items()) or "none")
    )
    say(f"peak memory of live values: {report['peak_memory_bytes'] / GIB:.3g} GiB per device")
    written(report["written"])


def simulate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate the program and return its timing.

    Raises:
        PerfModelError: as `distribute`, or a cluster with fewer devices.
    """
    from perfmodel import catalog
    from perfmodel.ir import execution, live_memory

    cluster = catalog.cluster(arguments.cluster)
    program = _distributed(arguments)
    structure = execution.program_structure(program.function, cluster)
    timeline = execution.simulate(
        structure, execution.cluster_timer(cluster, arguments.calibration)
    )

    # Memory follows from the order of instructions alone, whatever time they take.
    memory = live_memory(program.function).peak_bytes
    busy_s = timeline.device_busy_s()
    report: dict[str, Any] = {
        "program": program.function.name,
        "cluster": cluster.name,
        "devices": program.n_devices,
        "instructions": len(program.function.instructions),
        "step_time_s": timeline.makespan_s,
        "busy_s": busy_s.tolist(),
        "bubble_fraction": 1 - float(busy_s.mean()) / timeline.makespan_s,
        "peak_memory_bytes": memory.tolist(),
        "fits": bool(memory.max() <= cluster.device.memory_bytes),
    }
    if arguments.trace:
        execution.write_chrome_trace(structure, timeline, arguments.trace)
        report["written"] = [str(arguments.trace)]
    return report


def show_simulated(report: Mapping[str, Any]) -> None:
    """The report for people."""
    say(
        f"@{report['program']} on {report['devices']} device(s) of {report['cluster']}: "
        f"{duration(report['step_time_s'])}, {report['bubble_fraction']:.1%} idle"
    )
    peak = max(report["peak_memory_bytes"]) / GIB
    say(
        f"peak memory of live values: {peak:.3g} GiB per device, which {'fits' if report['fits'] else 'does NOT fit'}"
    )
    written(report.get("written", ()))


def search_program(arguments: argparse.Namespace) -> int:
    """`perfmodel search PROGRAM`: evaluates every D/T/P/K distribution of a program.

    Raises:
        PerfModelError: as `perfmodel.ir.importers.read_program` and `search_programs`; several
            batches.
    """
    from perfmodel import catalog
    from perfmodel.ingest.tables import write_json
    from perfmodel.ir.importers import read_program
    from perfmodel.ir.program_search import MICRO_BATCHES, search_programs

    # A program states its batch and mode itself; flags only override what its source leaves open.
    batches = arguments.global_batch
    if batches and len(batches) > 1:
        raise PerfModelError(
            f"{arguments.program}: a program is searched for one global batch; give --global-batch a single number"
        )
    # A source that returns a loss becomes a training step.
    mode = "inference" if arguments.mode == "inference" else None
    settings = _source_settings(arguments, batches[0] if batches else None, mode)
    if arguments.dtype not in (None, "fp32", "bf16", "fp16"):
        raise PerfModelError(
            f"{arguments.program}: programs are in fp32, bf16 or fp16, not {arguments.dtype}"
        )
    cluster = catalog.cluster(arguments.cluster)
    # A search distributes the program of one device by itself.
    program = read_program(arguments.program, settings)
    with progress("programs") as report:
        result = search_programs(
            program,
            cluster,
            arguments.devices or cluster.capacity,
            schedule=arguments.schedules or "1f1b",
            micro_batches=arguments.micro_batches or MICRO_BATCHES,
            calibration=arguments.calibration,
            progress=report,
        )
    if not result.candidates:
        reasons = ", ".join(f"{reason} ({n})" for reason, n in result.rejected.items())
        raise PerfModelError(
            f"{arguments.program}: none of the {result.evaluated} distributions is possible: {reasons}"
        )
    shown = result.to_dict() | {"layouts": result.to_dict()["layouts"][: arguments.top]}
    if arguments.out:
        write_json(arguments.out, result.to_dict())
    emit(arguments, shown, lambda: _show_search(shown))
    return 0


def _show_search(report: Mapping[str, Any]) -> None:
    """Print the distributions that a search found."""
    say(
        f"@{report['program']}, batch {report['global_batch']}, on {report['cluster']}: "
        f"{report['feasible']} of {report['evaluated']} distributions fit"
    )
    say(f"{'D/T/P/K':>12}  {'step':>10}  {'samples/s':>10}  {'memory':>9}")
    for row in report["layouts"]:
        say(
            f"{row['dtpk']:>12}  {duration(row['step_time_s']):>10}  {row['samples_per_s']:>10,.4g}  "
            f"{row['peak_memory_bytes'] / GIB:>5.2f} GiB"
        )
