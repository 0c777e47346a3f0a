"""Times that a folder's tables hold already."""

from pathlib import Path

from perfmodel.measure._estimate import kept_rows
from perfmodel.measure._plan import Plan
from perfmodel.measure._rows import is_suspect, point_key
from perfmodel.ops import Op


def recorded_s(plan: Plan, folder: Path | str) -> dict[Op, float]:
    """Seconds of the plan's ops that the plan's tables in `folder` hold, measured undisturbed with warm caches."""
    kept = kept_rows(plan, Path(folder))
    rows = {
        point.op: kept.get(point_key(point))
        for point in (*plan.kernel_points, *plan.collective_points)
        if not point.cold
    }
    return {op: row["time_us"] * 1e-6 for op, row in rows.items() if row is not None and not is_suspect(row)}
