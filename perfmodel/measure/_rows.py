"""Ops and timings as rows of a measurement table."""

from dataclasses import fields
from typing import Any, Final

from perfmodel.measure._harness import StoppingRule, Timing
from perfmodel.spec import Collective, KernelOp

SOURCE: Final = "perfmodel"
SUSPECT: Final = "suspect_interference"
"""`variant` of rows that kept being disturbed; not for fitting."""

MEASURED: Final = ("time_us", "time_us_std", "ci95_half_width", "interference")
"""Columns of real numbers; all other numeric ones hold whole numbers."""

Row = dict[str, Any]
"""Column -> value, JSON types only."""


def op_columns(op: KernelOp) -> Row:
    """The op's own columns: family, name, element type, shape and pass."""
    shape = {f.name: getattr(op, f.name) for f in fields(op) if f.name not in ("op", "dtype", "pass_")}
    shape = {name: int(v) if isinstance(v, bool) else v for name, v in shape.items()}
    return {"op_family": op.family, "op": op.op, "dtype": op.dtype, **shape, "pass": op.pass_}


def collective_columns(op: Collective) -> Row:
    """The collective's own columns; sizes follow nccl-tests."""
    return {
        "collective": op.collective,
        "num_ranks": op.num_ranks,
        "num_nodes": op.num_nodes,
        "ranks_per_node": op.ranks_per_node,
        "bytes": int(op.bytes),
        "dtype": op.dtype,
    }


def timing_columns(timing: Timing, rule: StoppingRule, variant: str = "") -> Row:
    """Median, spread and quality of a timing; `variant` gives way to `SUSPECT` where it was disturbed."""
    disturbed = timing.interference > rule.interference_limit
    return {
        "time_us": round(timing.median_s * 1e6, 4),
        "time_us_std": round(timing.std_s * 1e6, 4),
        "n_repeats": timing.n_repeats,
        "n_set_aside": timing.n_set_aside,
        # no interval below 6 repeats: an empty cell, as tables hold no infinities
        "ci95_half_width": round(timing.half_width, 5) if timing.half_width < float("inf") else None,
        "interference": round(timing.interference, 4),
        "variant": SUSPECT if disturbed else variant,
    }
