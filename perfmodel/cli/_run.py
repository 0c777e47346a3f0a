"""`perfmodel run`: executes a program on local processes, checked by a reference executor."""

import argparse
import sys
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._flags import add_json
from perfmodel.cli._show import emit, written
from perfmodel.display import say
from perfmodel.errors import PerfModelError
from perfmodel.files import DAMAGED, data_limit_bytes, read_text, require_archive_within
from perfmodel.units import duration, number_of

if TYPE_CHECKING:
    import numpy as np

    from perfmodel.ir import Program

_TOLERANCE = {8: 1e-10, 4: 1e-4, 2: 5e-2, 1: 0.0}
"""Largest relative error that rounding explains in a shallow program, by bytes of an element."""
_ROUNDING = 4.0
"""Largest error that rounding explains in a deep program, as a multiple of the change from rounding
its inputs."""


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="execute a distributed program on local processes, check its results and time it",
    )
    command.add_argument("program", type=Path, metavar="PROGRAM", help="text form of a program")
    command.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of processes; must equal the program's number of devices (the default)",
    )
    command.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE",
        help="arrays by parameter name (npz); default: random",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of random inputs")
    command.add_argument(
        "--repeats", type=int, default=3, metavar="R", help="timed runs (default 3)"
    )
    command.add_argument(
        "--backend",
        default="jax",
        choices=("jax", "torch"),
        help="library whose kernels and collectives run (default jax)",
    )
    command.add_argument(
        "--cluster",
        help="also predict the program's time on this cluster (catalog name or TOML)",
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="measured timeline as Chrome trace (json or json.gz)",
    )
    add_json(command)
    command.set_defaults(run=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    report = run(arguments)
    emit(arguments, report, lambda: show(report))
    return 0 if report["agrees_with_reference"] else 1


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the command; return its report.

    Raises:
        PerfModelError: a program that is malformed or of another number of devices, or unusable
            inputs.
    """
    from perfmodel.ir import execution

    program = _read_program(arguments.program)
    arguments.ranks = arguments.ranks or program.n_devices
    if program.n_devices != arguments.ranks:
        raise PerfModelError(
            f"{arguments.program}: the program is for {number_of(program.n_devices, 'device')}, not {arguments.ranks}; "
            f"use --ranks {program.n_devices}"
        )
    inputs = _inputs(arguments) or execution.random_inputs(program, arguments.seed)
    expected = execution.execute(program, inputs)
    say(f"running on {arguments.ranks} processes ...", file=sys.stderr)
    result = execution.run(program, inputs, repeats=arguments.repeats, backend=arguments.backend)

    # Compare with the reference executor. In a deep program rounding grows, so that a failed
    # comparison is repeated against what rounding of the inputs alone would change.
    errors = _relative_errors(result.outputs, expected)
    tolerance = {name: _TOLERANCE[value.dtype.itemsize] for name, value in expected.items()}
    agree = all(errors[name] <= tolerance[name] for name in expected)
    if not agree:
        rounded_inputs = execution.rounded_inputs(program, inputs, arguments.seed)
        rounding = _relative_errors(execution.execute(program, rounded_inputs), expected)
        agree = all(
            errors[name] <= max(tolerance[name], _ROUNDING * rounding[name]) for name in expected
        )
    largest_error = None
    if not any(map(isnan, errors.values())):
        largest_error = max(errors.values(), default=0.0)
    report: dict[str, Any] = {
        "program": program.function.name,
        "ranks": arguments.ranks,
        "instructions": len(program.function.instructions),
        "agrees_with_reference": agree,
        "largest_relative_error": largest_error,
        "makespan_s": result.timeline.makespan_s,
        "makespans_s": result.makespans_s.tolist(),
        "busy_s": result.timeline.device_busy_s().tolist(),
        "clock_offset_s": result.clock_offset_s.tolist(),
    }
    if arguments.cluster:
        report["predicted_s"] = _predicted_s(program.function, arguments.cluster)
    if arguments.out:
        execution.write_chrome_trace(result.program, result.timeline, arguments.out)
        report["written"] = [str(arguments.out)]
    return report


def show(report: Mapping[str, Any]) -> None:
    """The report for people."""
    verdict = "agrees with" if report["agrees_with_reference"] else "DIFFERS from"
    say(
        f"@{report['program']}: {report['instructions']} instructions on {number_of(report['ranks'], 'process')}"
    )
    error = report["largest_relative_error"]
    say(
        f"{verdict} the reference executor (largest relative error {'NaN' if error is None else f'{error:.1e}'})"
    )
    say(
        f"median of {number_of(len(report['makespans_s']), 'run')}: {duration(report['makespan_s'])}"
    )
    for rank, busy_s in enumerate(report["busy_s"]):
        say(f"  rank {rank}: busy {duration(busy_s)}")
    if "predicted_s" in report:
        say(f"predicted on the cluster: {duration(report['predicted_s'])}")
    written(report.get("written", ()))


def _inputs(arguments: argparse.Namespace) -> "dict[str, np.ndarray] | None":
    """Read the arrays of --inputs; None if it is not given."""
    import numpy as np

    if arguments.inputs is None:
        return None
    try:
        require_archive_within(arguments.inputs)
        with np.load(arguments.inputs) as arrays:
            return dict(arrays)
    except (ValueError, TypeError, MemoryError, *DAMAGED) as error:
        raise PerfModelError(
            f"{arguments.inputs}: not a readable npz file of arrays ({error})"
        ) from None


def _read_program(path: Path) -> "Program":
    """The program in a text file."""
    from perfmodel.ir import parse_program

    try:
        text = read_text(path, data_limit_bytes())
    except ValueError as error:
        raise PerfModelError(f"{path}: this is not a program in text form ({error})") from None
    try:
        return parse_program(text)
    except PerfModelError as error:
        raise PerfModelError(f"{path}: {error}") from None


def _relative_errors(
    computed: Mapping[str, "np.ndarray"], expected: Mapping[str, "np.ndarray"]
) -> dict[str, float]:
    """`_relative_error` of every output."""
    return {name: _relative_error(computed[name], value) for name, value in expected.items()}


def _relative_error(computed: "np.ndarray", expected: "np.ndarray") -> float:
    """Largest difference over the largest value; NaN if an element is NaN in only one."""
    import numpy as np

    # A masked value may be NaN on both sides, which agrees.
    known = ~(np.isnan(computed) & np.isnan(expected))
    scale = float(abs(expected[known]).max(initial=0.0)) or 1.0
    return float(abs(computed[known] - expected[known]).max(initial=0.0)) / scale


def _predicted_s(function: Any, cluster_name: str) -> float:
    """Predicted seconds of a function on a cluster."""
    from perfmodel import catalog
    from perfmodel.ir import execution

    cluster = catalog.cluster(cluster_name)
    structure = execution.program_structure(function, cluster)
    return execution.simulate(structure, execution.cluster_timer(cluster)).makespan_s
