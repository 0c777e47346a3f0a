"""Runs a plan, and writes tables and cards."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.errors import CalibrationError
from perfmodel.ingest.tables import read_table, write_table
from perfmodel.measure._checks import check_plan, nccl_tests_of
from perfmodel.measure._plan import Plan
from perfmodel.measure.backends import (
    Backend,
    beside_row,
    call_overhead_s,
    check_device,
    collective_row,
    kernel_row,
    nccl_tests_rows,
    open_backend,
    transport_of,
)
from perfmodel.measure.estimate import finished_rows
from perfmodel.measure.ranks import (
    Agent,
    EmulatedHosts,
    Host,
    RankGroup,
    members,
    unavailable,
)
from perfmodel.measure.tables import (
    MEASURED,
    Card,
    Measure,
    PartialFile,
    Point,
    Row,
    card_path,
    collector_sha256,
    locked,
    point_key,
    read_card,
    software,
    sweep,
    write_card,
)
from perfmodel.measure.timing import StoppingRule, wait_until_quiet
from perfmodel.ops import Collective

Progress = Callable[[Point], None]
"""Called with each point before it is measured."""

OUTLIERS: Final = (
    "samples above interference_limit are set aside; no sample is dropped because of its value"
)
"""Sentence on outliers for the card."""


@dataclass(frozen=True, kw_only=True)
class TableRun:
    """The run that fills one table."""

    path: Path
    """File of the table."""
    device: str
    """Text of the `device` column."""
    points: tuple[Point, ...]
    """Rows that the table should have."""
    measure: Measure
    """Function that measures the points."""
    rule: StoppingRule
    attempts: int
    """Largest number of measurements of a row that other work disturbs."""
    packages: tuple[str, ...]
    """Python packages whose versions belong to the measurements."""
    accelerator: str | None = None
    """Name of the accelerator as its driver gives it; None for a CPU."""
    method: Callable[[], Mapping[str, Any]]
    """Figures for the card that tell how it was measured."""

    @property
    def partial(self) -> PartialFile:
        """The file that holds this table's rows until the table is finished."""
        header = {"device": self.device, "collector": collector_sha256(), **software(self.packages)}
        return PartialFile(self.path.with_name(f".{self.path.name}.partial"), header)


def run_plan(
    plan: Plan,
    folder: Path | str,
    backend: str = "jax",
    *,
    progress: Progress = lambda point: None,
    only_missing: bool = False,
    agents: Sequence[Agent] = (),
) -> list[Card]:
    """Measure what the plan asks for and write a table with its card per kind of op.

    Rows are kept in `.<table>.partial` while the sweep runs. After any interruption, a new run
    continues with the next row. If the table is complete, it measures disturbed rows again, and
    rows that are new in the plan. No row is ever dropped or overwritten by one of another device,
    software or collector. Kernels run on one core, so call this before JAX has run anything.

    Args:
        backend: `jax`, `torch`, or `nccl-tests` for collectives alone.
        progress: called with each point before it is measured.
        only_missing: leave finished tables as they are, their disturbed rows too.
        agents: the processes of a launch (`gathered`), which collectives then run on; none:
            processes of this host.

    Raises:
        PerfModelError: for an op that cannot be measured; nothing has been measured then.
        CalibrationError: if another run holds the folder, the device is not the plan's, a rank
            fails, or rows in the folder belong to another device, software or collector.
    """
    # Everything that can be refused is refused before the first measurement, which may take hours.
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_plan(plan, backend, started=bool(agents))
    check_machine(plan, backend, agents)
    with locked(folder):
        _tidy(plan, folder)
        table_runs = tables(plan, folder, backend, progress, agents)
        return [_run_table(table, only_missing) for table in table_runs]


def check_machine(plan: Plan, backend: str, agents: Sequence[Agent] = ()) -> None:
    """Refuse a plan that this machine, or the processes started for it, cannot measure.

    Raises:
        PerfModelError: where a package, a device or its units are missing, or the device is another
            one.
    """
    # The device of nccl-tests is the one that its programs print (`nccl_tests_rows`).
    if backend == "nccl-tests":
        tests = nccl_tests_of(plan)
        for op in plan.collectives:
            tests.check_program(op)
        return

    # Kernels, on the device that the backend finds.
    if plan.kernel_points or plan.beside_kernels:
        with open_backend(backend) as opened:
            if not plan.any_device:
                check_device(plan.device, opened.accelerator)
            for point in (*plan.kernel_points, *plan.beside_points):
                opened.check(point.kernel, cold=point.cold)
    if plan.beside_kernels:
        transport_of(backend).check_ranks(
            max(collective.num_ranks for _, collective in plan.beside_kernels)
        )

    # Collectives, between processes that have come, or on as many devices of this machine.
    for op in plan.collectives:
        members(agents, op)
    if plan.collectives:
        transport = transport_of(backend)
        if not plan.any_device:
            check_device(plan.device, transport.accelerator())
        if not agents:
            transport.check_ranks(max(op.num_ranks * op.concurrent for op in plan.collectives))
        missing = unavailable() if plan.emulated_network else ""
        if missing:
            raise CalibrationError(f"hosts cannot be emulated here: {missing}")


def check_folder(plan: Plan, folder: Path, backend: str) -> None:
    """Refuse a folder whose rows were measured on another device or with other software.

    Raises:
        CalibrationError: naming the file.
    """
    if not folder.is_dir():
        return
    # Reading raises the errors; an interrupted run's partial file takes the place of the table.
    for table in tables(plan, folder, backend, lambda point: None, ()):
        if table.partial.read() is None:
            finished_rows(table.path, table.device, table.packages)


def tables(
    plan: Plan, folder: Path, backend: str, progress: Progress, agents: Sequence[Agent]
) -> Iterator[TableRun]:
    """Iterate over the tables of a checked plan; run each before advancing."""
    if backend == "nccl-tests":
        yield _by_nccl_tests(plan, folder, progress)
        return
    # One after another, as a backend keeps the process to one core until its table is done.
    if plan.kernel_points:
        with open_backend(backend) as opened:
            yield _kernels(plan, folder, opened, progress)
    if plan.beside_kernels:
        yield _kernels_beside_collectives(plan, folder, backend, progress)
    if plan.collectives:
        yield _collectives(plan, folder, backend, progress, agents)


def _kernels(plan: Plan, folder: Path, backend: Backend, progress: Progress) -> TableRun:
    """The table of kernels, measured on an open backend."""

    def measure(points: Sequence[Point]) -> Iterator[Row]:
        for point in points:
            progress(point)
            yield kernel_row(backend, point, plan.device, plan.rule, plan.load_s)

    # Measured when the table is written, as it takes a moment, and a table may have nothing left to
    # measure.
    def method() -> Mapping[str, Any]:
        return {
            **backend.method,
            "call_overhead_us": round(call_overhead_s(backend, plan.rule) * 1e6, 2),
        }

    return TableRun(
        path=folder / plan.kernel_table,
        device=plan.device,
        points=plan.kernel_points,
        measure=measure,
        rule=plan.rule,
        attempts=plan.attempts,
        packages=backend.packages,
        accelerator=backend.accelerator,
        method=method,
    )


def _kernels_beside_collectives(
    plan: Plan, folder: Path, backend: str, progress: Progress
) -> TableRun:
    """The table of kernels beside collectives, measured on our own ranks."""
    transport = transport_of(backend)
    meter = transport.meter()
    rule = plan.rule.resolved_by(meter)
    # Ranks have cores of their own, so that the backend, which keeps this process to one, is closed
    # before they start.
    with open_backend(backend) as opened:
        kernel_software = opened.software
        packages = opened.packages
        accelerator = opened.accelerator
    collective_of = dict(plan.beside_kernels)

    # A kernel by itself runs on the ranks of a collective that it is measured beside, too.
    def on_ranks(point: Point) -> Collective:
        return point.beside or collective_of[point.kernel]

    def measure(points: Sequence[Point]) -> Iterator[Row]:
        quiet = _when_quiet(points, rule.interference_limit, plan.patience_s)
        for collective, same_ranks in groupby(quiet, key=on_ranks):
            with RankGroup(collective.num_ranks, transport.session) as group:
                group.load(collective)
                for point in same_ranks:
                    progress(point)
                    yield beside_row(group, point, plan.device, plan.rule, meter, kernel_software)

    return TableRun(
        path=folder / plan.beside_table,
        device=plan.device,
        points=plan.beside_points,
        measure=measure,
        rule=rule,
        attempts=plan.attempts,
        packages=packages,
        accelerator=accelerator,
        method=lambda: {"kernels": "on all ranks at once, the slowest counts", **transport.method},
    )


def _collectives(
    plan: Plan, folder: Path, backend: str, progress: Progress, agents: Sequence[Agent]
) -> TableRun:
    """The table of collectives, measured between our own ranks."""
    transport = transport_of(backend)
    meter = transport.meter()
    rule = plan.collective_rule.resolved_by(meter)

    # Neighbouring points with the same ranks share one group.
    def on_ranks(point: Point) -> tuple[int, int, Sequence[Agent]]:
        op = point.collective
        return op.num_ranks * op.concurrent, op.num_nodes, members(agents, op)

    # Starting ranks takes seconds, so collectives of the same ones share them.
    def measure(points: Sequence[Point]) -> Iterator[Row]:
        quiet = _when_quiet(points, rule.interference_limit, plan.patience_s)
        for (num_ranks, num_nodes, ranks), same_ranks in groupby(quiet, key=on_ranks):
            with (
                _hosts(plan, num_nodes) as hosts,
                RankGroup(num_ranks, transport.session, hosts, agents=ranks) as group,
            ):
                for point in same_ranks:
                    progress(point)
                    yield collective_row(
                        group,
                        point.collective,
                        plan.device,
                        rule,
                        meter,
                        transport,
                        plan.interconnect,
                    )

    # The card's description of the method: pinning, and where the ranks ran.
    method: dict[str, Any] = {"pinning": "rank r on core r modulo cores", **transport.method}
    if plan.emulated_network:
        method["emulated_network"] = asdict(plan.emulated_network)
    if agents:
        method |= {"nodes": len({agent.hello.node for agent in agents}), "processes": len(agents)}
    return TableRun(
        path=folder / plan.collective_table,
        device=plan.device,
        points=plan.collective_points,
        measure=measure,
        rule=rule,
        attempts=plan.attempts,
        packages=(transport.package, "numpy", "perfmodel"),
        method=lambda: method,
    )


@contextmanager
def _hosts(plan: Plan, num_nodes: int) -> Iterator[tuple[Host, ...]]:
    """Return the hosts on which ranks run, for groups over a number of emulated nodes."""
    network = plan.emulated_network
    if num_nodes == 1 or network is None:
        yield ()
        return
    with EmulatedHosts(num_nodes, network.bandwidth_bytes_per_s, network.latency_s) as emulated:
        yield emulated.hosts


def _by_nccl_tests(plan: Plan, folder: Path, progress: Progress) -> TableRun:
    """The table of collectives, measured by the programs of nccl-tests."""
    tests = nccl_tests_of(plan)

    # Measured once, because its programs do not report the interference that would justify
    # measuring a row again.
    def measure(points: Sequence[Point]) -> Iterator[Row]:
        return nccl_tests_rows(
            points, tests, plan.device, plan.interconnect, progress, any_device=plan.any_device
        )

    return TableRun(
        path=folder / plan.collective_table,
        device=plan.device,
        points=plan.collective_points,
        measure=measure,
        rule=plan.collective_rule,
        attempts=1,
        packages=("perfmodel",),
        method=lambda: {"nccl_tests": tests.arguments},
    )


def _run_table(table: TableRun, only_missing: bool) -> Card:
    """Measure the missing rows of a table, and write it with its card."""
    partial = table.partial

    def earlier() -> Sequence[Any]:
        return finished_rows(table.path, table.device, table.packages)

    # A table that has all its rows is left as it is, unless a sweep over it was interrupted.
    if only_missing and partial.read() is None:
        finished = {record.key for record in earlier()}
        if finished and finished >= set(map(point_key, table.points)):
            return read_card(table.path)
    rows = sweep(
        table.points,
        table.measure,
        partial,
        interference_limit=table.rule.interference_limit,
        attempts=table.attempts,
        earlier=earlier,
    )
    return _finish(table, rows, partial)


def _finish(table: TableRun, rows: list[Row], partial: PartialFile) -> Card:
    """Write the table, then its card, and remove the partial file last, so that this can be
    repeated after an interrupt."""
    import pandas as pd

    # Sizes are whole numbers also where a family lacks the column, which makes pandas take them for
    # floats.
    frame = pd.DataFrame(rows)
    numbers = frame.select_dtypes("float").columns.difference(list(MEASURED))
    whole_numbers = []
    for name in numbers:
        values = frame[name].dropna().to_numpy()
        if np.all(np.mod(values, 1) == 0):
            whole_numbers.append(name)
    method = {"outliers": OUTLIERS, **table.method()}
    write_table(table.path, frame.astype(dict.fromkeys(whole_numbers, "Int64")))
    card = write_card(
        table.path,
        read_table(table.path),
        table.rule,
        method,
        packages=table.packages,
        accelerator=table.accelerator,
    )
    partial.remove()
    return card


def _when_quiet(points: Iterable[Point], limit: float, patience_s: float) -> Iterator[Point]:
    """Yield each point when the machine is quiet, or when the total waiting time is used up."""
    for point in points:
        patience_s -= wait_until_quiet(limit, patience_s)
        yield point


def _tidy(plan: Plan, folder: Path) -> None:
    """Remove temporary files of writes that were killed before their rename."""
    # Files are written under a temporary name beside their own (`perfmodel.ingest.tables`).
    names: list[str] = []
    for table in (
        folder / plan.kernel_table,
        folder / plan.beside_table,
        folder / plan.collective_table,
    ):
        names += [table.name, card_path(table).name, f".{table.name}.partial"]
    for leftover in chain.from_iterable(folder.glob(f".{name}.*.tmp") for name in names):
        with suppress(OSError):
            leftover.unlink()
