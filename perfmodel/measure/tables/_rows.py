"""Ops and timings as rows of a measurement table."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isnan
from typing import Any, Final

from perfmodel.errors import PerfModelError
from perfmodel.measure.timing import StoppingRule, Timing
from perfmodel.ops import Collective, KernelOp, Op

SOURCE: Final = "perfmodel"
"""`source` column of rows that this package measured."""
SUSPECT: Final = "suspect_interference"
"""Start of the `variant` of rows that kept being disturbed; not for fitting."""
COLD: Final = "cold"
"""End of the `variant` of rows measured with the op's data out of the caches."""
LOADED: Final = "loaded"
"""End of the `variant` of kernels measured after the device has worked for a while, at the clock
that it keeps then."""
BESIDE: Final = "beside_a_collective"
"""State of kernels measured while a collective runs, whose kind, bytes and ranks follow in their
`variant`."""
_STATE: Final = re.compile(
    rf"(?:^|_)({COLD}|{LOADED}|groups_at_once_\d+|beside_[a-z_]+_\d+_bytes_\d+_ranks)$"
)
"""State of the machine in which a row was measured, at the end of its `variant`."""

MEASURED: Final = ("time_us", "time_us_std", "ci95_half_width", "interference")
"""Columns of real numbers; all other numeric ones hold whole numbers."""

NOT_IDENTITY: Final = frozenset(
    {
        *MEASURED,
        "n_repeats",
        "n_set_aside",
        "source",
        "device",
        "interconnect",
        "algorithm",
        "software",
        "variant",
    }
)
"""Columns that do not distinguish rows of a plan."""

Row = dict[str, Any]
"""Column -> value, JSON types only."""


@dataclass(frozen=True)
class Point:
    """The measurement of one table row."""

    op: Op
    cold: bool = False
    """Whether the op's data are out of the caches before every call."""
    loaded: bool = False
    """Whether the device works for a while before the first sample."""
    beside: Collective | None = None
    """A collective that runs on the device at the same time."""

    @property
    def state(self) -> str:
        """State of the machine, unless it is the default (warm caches, cool device, alone)."""
        if isinstance(self.op, Collective):
            return f"groups_at_once_{self.op.concurrent}" if self.op.concurrent > 1 else ""
        if self.cold:
            return COLD
        if self.beside is not None:
            return f"beside_{self.beside.collective}_{self.beside.bytes:.0f}_bytes_{self.beside.num_ranks}_ranks"
        return LOADED if self.loaded else ""

    @property
    def kernel(self) -> KernelOp:
        """The op of a kernel's row.

        Raises:
            PerfModelError: the row is a collective's.
        """
        if isinstance(self.op, Collective):
            raise PerfModelError(
                f"{self.op.collective} is a collective, not a kernel; use `collective`"
            )
        return self.op

    @property
    def collective(self) -> Collective:
        """The op of a collective's row.

        Raises:
            PerfModelError: the row is a kernel's.
        """
        if not isinstance(self.op, Collective):
            raise PerfModelError(f"{self.op.family} is a kernel, not a collective; use `kernel`")
        return self.op


def point_key(point: Point) -> str:
    """Identity of a row before it is measured."""
    op = point.op
    columns = collective_columns(op) if isinstance(op, Collective) else op_columns(op)
    return _key(columns, point.state)


def row_key(row: Mapping[str, Any]) -> str:
    """Identity of a measured row, also of one read back from a table: `point_key` of its point."""
    columns = {name: value for name, value in row.items() if name not in NOT_IDENTITY}
    state = _STATE.search(str(row.get("variant", "")))
    return _key(columns, state.group(1) if state else "")


def state_of(variant: str) -> str:
    """`COLD`, `LOADED` or `BESIDE`, from the `variant` of a kernel's row; else empty."""
    state = _STATE.search(variant)
    if state is None:
        return ""
    return BESIDE if state.group(1).startswith("beside_") else state.group(1)


def _key(columns: Mapping[str, Any], state: str) -> str:
    """Columns as a text that is equal for equal rows, before and after writing to a file."""
    # Tables hold whole numbers as 4.0 beside empty cells, and cells that an op lacks are empty.
    values = {}
    for name, value in columns.items():
        if present(value):
            is_whole = isinstance(value, float) and value == int(value)
            values[name] = int(value) if is_whole else value
    if state:
        values["cache"] = state
    return json.dumps(values, sort_keys=True)


def present(value: Any) -> bool:
    """Whether a cell is not empty."""
    return value is not None and value != "" and not (isinstance(value, float) and isnan(value))


def is_suspect(row: Mapping[str, Any]) -> bool:
    """Whether the row stayed disturbed by other work."""
    return str(row.get("variant", "")).startswith(SUSPECT)


def op_columns(op: KernelOp) -> Row:
    """The op's own columns: family, name, element type, shape and pass."""
    # The remaining fields are the shape; flags are 0 or 1 in tables.
    shape = {}
    for field in fields(op):
        value = getattr(op, field.name)
        if field.name not in ("op", "dtype", "pass_"):
            shape[field.name] = int(value) if isinstance(value, bool) else value
    return {"op_family": op.family, "op": op.op, "dtype": op.dtype, **shape, "pass": op.pass_}


def collective_columns(op: Collective) -> Row:
    """The collective's own columns; sizes follow nccl-tests."""
    # How many groups ran at once is in the row's `variant` (`Point.state`).
    return {
        "collective": op.collective,
        "num_ranks": op.num_ranks,
        "num_nodes": op.num_nodes,
        "ranks_per_node": op.ranks_per_node,
        "bytes": int(op.bytes),
        "dtype": op.dtype,
    }


def timing_columns(
    timing: Timing, rule: StoppingRule, variant: str = "", *, state: str = ""
) -> Row:
    """Median, spread and quality of a timing; `variant` is `SUSPECT` if it was disturbed.

    Args:
        state: see `Point.state`.
    """
    if timing.interference > rule.interference_limit:
        variant = SUSPECT
    if state:
        variant = f"{variant}_{state}" if variant else state

    # There is no interval below 6 repeats: an empty cell, as tables hold no infinities.
    half_width = round(timing.half_width, 5) if timing.half_width < float("inf") else None
    return {
        "time_us": round(timing.median_s * 1e6, 4),
        "time_us_std": round(timing.std_s * 1e6, 4),
        "n_repeats": timing.n_repeats,
        "n_set_aside": timing.n_set_aside,
        "ci95_half_width": half_width,
        "interference": round(timing.interference, 4),
        "variant": variant,
    }
