"""Collectives measured by the programs of nccl-tests, started through a launcher (mpirun, srun)."""

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfmodel.errors import CalibrationError, PerfModelError, UnknownNameError
from perfmodel.ingest import read_measurements
from perfmodel.ingest._nccl_tests import COLLECTIVES
from perfmodel.measure.backends._backend import check_device
from perfmodel.measure.tables import SOURCE, Point, Row, collective_columns, present
from perfmodel.ops import Collective
from perfmodel.processes import run_supervised

if TYPE_CHECKING:
    import pandas as pd

PROGRAMS: Final = {kind: f"{test}_perf" for test, kind in COLLECTIVES.items()}
"""Program of nccl-tests for each collective."""
DTYPES: Final = {
    "fp32": "float",
    "bf16": "bfloat16",
    "fp16": "half",
    "fp8": "fp8_e4m3",
    "fp64": "double",
    "int8": "int8",
}
"""Element types as nccl-tests names them."""

ALIGNMENT: Final = 16
"""Bytes of a rank's share are a multiple of this, or nccl-tests rounds them down."""


@dataclass(frozen=True, kw_only=True)
class NcclTests:
    """The way to start nccl-tests, with one process per rank and one GPU per process."""

    launcher: str = ""
    """Command line before the program; `{num_ranks}`, `{num_nodes}` and `{ranks_per_node}` are
    filled in, e.g. `mpirun -np {num_ranks} -host a:8,b:8` or
    `srun -N {num_nodes} -n {num_ranks}`."""
    folder: str = ""
    """Folder of the programs (`all_reduce_perf`, ...) on every node; empty: they are on the search
    path."""
    arguments: str = "-w 5 -n 20 -N 8"
    """Arguments of every program: warm-up calls, iterations per timing, and number of timings,
    whose median is used."""
    timeout_s: float = 900.0
    """Seconds that one run of a program may take."""

    @property
    def calls_per_size(self) -> int:
        """Calls that a program makes of one size: warm-up and iterations, out of place and in
        place, every time."""

        # Defaults are those of nccl-tests.
        def argument(flag: str, default: int) -> int:
            match = re.search(rf"(?:^|\s){flag}\s*(\d+)", self.arguments)
            return int(match[1]) if match else default

        return 2 * argument("-N", 1) * (argument("-w", 1) + argument("-n", 20))

    def check_program(self, op: Collective) -> None:
        """Refuse a launcher or program that this machine lacks.

        Raises:
            CalibrationError: naming it.
        """
        # The supervisor would tell no more of a missing program than exit status 127.
        program = self.command(op, int(op.bytes), int(op.bytes), 2)[0]
        if shutil.which(program) is None:
            raise CalibrationError(
                f"{program}: no such program; set launcher and folder of [nccl_tests]"
            )

    def command(self, op: Collective, smallest: int, largest: int, factor: int) -> list[str]:
        """The command that measures sizes from `smallest` to `largest` bytes, each `factor` times
        the previous one."""
        # One GPU per process (`-g 1`); the launcher starts as many processes as there are ranks.
        sizes = f"-b {smallest} -e {largest} -f {factor} -d {DTYPES[op.dtype]} -g 1"
        try:
            launcher = self.launcher.format(
                num_ranks=op.num_ranks, num_nodes=op.num_nodes, ranks_per_node=op.ranks_per_node
            )
        except (KeyError, IndexError, ValueError) as error:
            raise CalibrationError(
                f"nccl_tests: launcher {self.launcher!r} is not a valid template ({error!r}); it may use "
                "{num_ranks}, {num_nodes} and {ranks_per_node}"
            ) from None
        program = str(Path(self.folder) / PROGRAMS[op.collective])
        return [*shlex.split(launcher), program, *shlex.split(sizes), *shlex.split(self.arguments)]


def check_nccl_tests(op: Collective) -> None:
    """Raise `PerfModelError` unless nccl-tests has a program for the collective."""
    if op.collective not in PROGRAMS:
        raise UnknownNameError("collective to measure", op.collective, PROGRAMS)
    if op.dtype not in DTYPES:
        raise UnknownNameError("dtype to measure", op.dtype, DTYPES)
    if op.concurrent > 1:
        raise PerfModelError(
            f"{op.collective}: nccl-tests runs a single group; leave concurrent out, or measure with torch"
        )
    if op.bytes < 1 or op.bytes % (ALIGNMENT * op.num_ranks):
        raise PerfModelError(
            f"nccl-tests measures multiples of {ALIGNMENT} bytes per rank; {op.collective} of {op.bytes:g} bytes "
            f"over {op.num_ranks} ranks is not one"
        )


def nccl_tests_rows(
    points: Sequence[Point],
    tests: NcclTests,
    device: str,
    interconnect: str,
    progress: Callable[[Point], None],
    *,
    any_device: bool = False,
) -> Iterator[Row]:
    """Rows of collectives in order; sizes in geometric progression share one run of a program.

    Raises:
        CalibrationError: if a program fails, does not print a size that it was asked for, or runs
            on another device than `device` (unless `any_device`).
    """
    # Neighbours that differ in nothing but their size, in runs that one program can measure.
    for _, same_but_size in groupby(
        points, key=lambda point: collective_columns(point.collective) | {"bytes": 0}
    ):
        for run, factor in geometric_runs(list(same_but_size)):
            for point in run:
                progress(point)
            op = run[0].collective
            tests.check_program(op)
            command = tests.command(op, int(op.bytes), int(run[-1].collective.bytes), factor)
            table = _measured(command, tests.timeout_s, None if any_device else device)
            for point in run:
                yield _row(point.collective, table, device, interconnect)


def geometric_runs(points: Sequence[Point]) -> list[tuple[list[Point], int]]:
    """Split sizes into runs that grow by a whole factor, and return each with its factor."""
    runs: list[tuple[list[Point], int]] = []
    for point in points:
        if runs:
            run, factor = runs[-1]
            # The program multiplies by whole factors only, the same one every time.
            quotient, remainder = divmod(int(point.collective.bytes), int(run[-1].collective.bytes))
            if remainder == 0 and quotient > 1 and (len(run) == 1 or quotient == factor):
                runs[-1] = ([*run, point], quotient)
                continue
        runs.append(([point], 2))
    return runs


def _check_devices(device: str, table: "pd.DataFrame") -> None:
    """Refuse rows of other devices than `device`."""
    for accelerator in {*table["device"]} - {""}:
        check_device(device, accelerator)


def _measured(command: list[str], timeout_s: float, device: str | None) -> "pd.DataFrame":
    """The table that a program prints, checked to be of `device` if that is given."""
    command_text = shlex.join(command)
    try:
        done = run_supervised(command, timeout_s)
    except subprocess.TimeoutExpired:
        raise CalibrationError(f"not finished after {timeout_s:g} s: {command_text}") from None
    if done.returncode:
        last_line = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise CalibrationError(f"exit status {done.returncode} ({last_line}) from: {command_text}")

    # Its output is read like any file of nccl-tests.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nccl-tests.txt"
        path.write_text(done.stdout)
        try:
            table = read_measurements("nccl-tests", [path])
            if device is not None:
                _check_devices(device, table)
        except PerfModelError as error:
            raise CalibrationError(f"{error}; the command was: {command_text}") from None
    return table


def _row(op: Collective, table: "pd.DataFrame", device: str, interconnect: str) -> Row:
    """The out-of-place time of a size that nccl-tests printed, which has no interval."""
    same_size: list[Row] = []
    for record in table.to_dict("records"):
        if record["bytes"] == op.bytes:
            same_size.append({str(name): value for name, value in record.items()})
    # Times in place are measured too, but frameworks call collectives out of place.
    row = min(same_size, key=lambda row: "in_place" in str(row.get("variant", "")), default=None)
    if row is None:
        raise CalibrationError(
            f"nccl-tests printed no time of {op.collective} of {op.bytes:g} bytes"
        )
    spread_us = row.get("time_us_std")
    return {
        "source": SOURCE,
        "device": device,
        "interconnect": interconnect,
        "algorithm": str(row.get("algorithm", "auto")),
        **collective_columns(op),
        "time_us": float(row["time_us"]),
        "time_us_std": float(spread_us or 0.0) if present(spread_us) else 0.0,
        "n_repeats": int(row.get("n_repeats", 1)),
        "n_set_aside": 0,
        "ci95_half_width": None,
        "interference": 0.0,
        "variant": "",
        "software": str(row.get("software", "nccl-tests")),
    }
