"""Times that a folder's tables hold already."""

from pathlib import Path

from perfmodel.measure._earlier import earlier_rows
from perfmodel.measure._plan import Plan
from perfmodel.measure._rows import collective_columns, op_columns
from perfmodel.spec import Op


def recorded_s(plan: Plan, folder: Path | str) -> dict[Op, float]:
    """Seconds of the plan's ops that the plan's tables in `folder` hold, measured undisturbed by this collector."""
    kernels = earlier_rows(Path(folder) / plan.kernel_table, plan.device, plan.kernels, op_columns)
    collectives = earlier_rows(Path(folder) / plan.collective_table, plan.device, plan.collectives, collective_columns)
    return {op: row["time_us"] * 1e-6 for op, row in [*kernels, *collectives]}
