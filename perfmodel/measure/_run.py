"""A plan run from start to finish: tables and cards."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.io import read_table, write_table
from perfmodel.measure._card import Card, collector_sha256, write_card
from perfmodel.measure._collectives import collective_row
from perfmodel.measure._earlier import earlier_rows
from perfmodel.measure._group import RankGroup, check_collective
from perfmodel.measure._harness import StoppingRule
from perfmodel.measure._kernels import call_overhead_s, device_meter, kernel_row
from perfmodel.measure._meter import machine_meter, pinned_to_one_core, wait_until_quiet
from perfmodel.measure._partial import PartialFile
from perfmodel.measure._plan import Plan
from perfmodel.measure._rows import MEASURED, Row, collective_columns, op_columns
from perfmodel.measure._sweep import sweep
from perfmodel.spec import Collective, KernelOp, Op

Progress = Callable[[Op], None]

OUTLIERS: Final = "samples above interference_limit are set aside; none is dropped for its value"


def run_plan(plan: Plan, folder: Path | str, progress: Progress = lambda op: None) -> list[Card]:
    """Measure what the plan asks for and write a table with its card per kind of op.

    Rows are kept in `.<table>.partial` while the sweep runs: started again after an interruption,
    it goes on with the next row; started again over a finished table, it measures the disturbed
    rows again. Kernels run on one core, so call this before JAX has run anything.

    Args:
        progress: called with each op before it is measured.

    Raises:
        PerfModelError: for an op that cannot be measured.
        CalibrationError: if a rank fails, or a partial file belongs to another device or collector.
    """
    for op in plan.collectives:
        check_collective(op)
    cards = []
    if plan.kernels:
        with pinned_to_one_core():
            cards.append(_run_kernels(plan, Path(folder) / plan.kernel_table, progress))
    if plan.collectives:
        cards.append(_run_collectives(plan, Path(folder) / plan.collective_table, progress))
    return cards


def _run_kernels(plan: Plan, path: Path, progress: Progress) -> Card:
    meter = device_meter()

    def measure(ops: Sequence[KernelOp]) -> Iterator[Row]:
        for op in ops:
            progress(op)
            yield kernel_row(op, plan.device, plan.rule, meter)

    partial = _partial(path, plan.device)
    rows = sweep(
        plan.kernels, op_columns, measure, partial,
        interference_limit=plan.rule.interference_limit, attempts=plan.attempts,
        earlier=earlier_rows(path, plan.device, plan.kernels, op_columns),
    )  # fmt: skip
    overhead_us = round(call_overhead_s(plan.rule, meter) * 1e6, 2)
    return _finish(path, rows, plan.rule, partial, {"threads": 1, "call_overhead_us": overhead_us})


def _run_collectives(plan: Plan, path: Path, progress: Progress) -> Card:
    rule, meter = plan.collective_rule, machine_meter()

    def measure(ops: Sequence[Collective]) -> Iterator[Row]:
        quiet = _when_quiet(ops, rule.interference_limit, plan.patience_s)
        for num_ranks, members in groupby(quiet, key=lambda op: op.num_ranks):
            with ExitStack() as stack:
                group = stack.enter_context(RankGroup(num_ranks))
                for op in members:
                    progress(op)
                    yield collective_row(group, op, plan.device, rule, meter)

    partial = _partial(path, plan.device)
    rows = sweep(
        plan.collectives, collective_columns, measure, partial,
        interference_limit=rule.interference_limit, attempts=plan.attempts,
        earlier=earlier_rows(path, plan.device, plan.collectives, collective_columns),
    )  # fmt: skip
    return _finish(path, rows, rule.resolved_by(meter), partial, {"pinning": "rank r on core r modulo cores"})


def _when_quiet(ops: Iterable[Collective], limit: float, patience_s: float) -> Iterator[Collective]:
    """Hands out each op once the machine is quiet, or the patience for all of them is used up."""
    for op in ops:
        patience_s -= wait_until_quiet(limit, patience_s)
        yield op


def _partial(path: Path, device: str) -> PartialFile:
    header = {"device": device, "collector": collector_sha256(), "jax": version("jax")}
    path.parent.mkdir(parents=True, exist_ok=True)
    return PartialFile(path.with_name(f".{path.name}.partial"), header)


def _finish(path: Path, rows: list[Row], rule: StoppingRule, partial: PartialFile, method: dict[str, Any]) -> Card:
    import pandas as pd

    table = pd.DataFrame(rows)
    # sizes are whole numbers also where a family lacks the column
    numbers = table.select_dtypes("float").columns.difference(MEASURED)
    whole = [name for name in numbers if np.all(np.mod(table[name].dropna().to_numpy(), 1) == 0)]
    table = table.astype(dict.fromkeys(whole, "Int64"))
    write_table(path, table)
    card = write_card(path, read_table(path), rule, {"outliers": OUTLIERS, **method})
    partial.remove()
    return card
