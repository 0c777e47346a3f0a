"""Analytical kernel times at typical shares of the nominal rates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn import kernel_physics, table_rows
from perfmodel.cost.learn.collectives import device_name
from perfmodel.cost.learn.parameters import power_join
from perfmodel.cost.learn.rows import Rows, rows_from_ops
from perfmodel.cost.learn.stack import Figures, with_whole_units
from perfmodel.ingest.tables import relabel
from perfmodel.ops import FAMILIES, KernelOp, Op
from perfmodel.ops.physics import vector_rate
from perfmodel.spec import Device

if TYPE_CHECKING:
    import pandas as pd

FIXED_S: Final = 4e-6
"""Time of an empty kernel: launch latency and tail on current accelerators."""
COMPUTE_SHARE: Final = 0.65
"""Share of the peak rate that kernels typically reach."""
MEMORY_SHARE: Final = 0.75
"""Share of the memory bandwidth that kernels typically reach."""
HALF_WIDTH: Final = 0.6
"""Half-width of the analytical 90 % interval, in log time."""
_POWER: Final = 3.0
"""Power of the norm that joins compute and memory time: between their sum (1) and the longer of them (inf)."""
_WIDER: Final = {"fp4": ("fp8",), "int8": ("bf16", "fp16")}
"""Element types of twice the bits, for those that nobody measured."""
_UNMEASURED: Final = ("fp4", "int8")


def roofline_time(figures: Figures, rows: Rows) -> Float64[np.ndarray, "n"]:
    """Seconds of every row by the wave-quantised roofline, without measurements.

    fixed + (compute^3 + memory^3)^(1/3), where compute is the wave-quantised work over 65 % of the
    peak rate, or what the vector lanes take if that is longer, and memory the compulsory traffic over 75 % of the
    bandwidth (roofline: Williams et al., CACM 52(4), 2009).
    """
    physics, machine = kernel_physics(figures, rows)
    # tensor units and vector lanes work side by side: the longer of the two counts
    compute = np.maximum(
        physics.quantised_flops / (machine.peak * COMPUTE_SHARE), physics.vector_ops / vector_rate(np, machine)
    )
    memory = physics.bytes / (machine.bandwidth * MEMORY_SHARE)
    return FIXED_S + power_join(np, compute, memory, _POWER)


def least_of_rows(figures: Figures, rows: Rows) -> Float64[np.ndarray, "n"]:
    """Lower bound of each row's time if it is a matrix product: its FLOPs at the nominal rate."""
    physics, machine = kernel_physics(figures, rows)
    return physics.flops / machine.peak


def roofline_seconds(device: Device, ops: Sequence[KernelOp]) -> Float64[np.ndarray, "n"]:
    """Seconds of ops of any families on a device by the roofline alone (`roofline_time`)."""
    return _of_ops(roofline_time, device, ops)


def least_seconds(device: Device, ops: Sequence[KernelOp]) -> Float64[np.ndarray, "n"]:
    """Lower bounds of ops' times on a device, for matrix products (`least_of_rows`)."""
    return _of_ops(least_of_rows, device, ops)


def slowed_unit_seconds(device: Device, ops: Sequence[Op]) -> Float64[np.ndarray, "n"]:
    """Seconds by which the FLOPs of ops take longer than with the fastest tensor units of the device's die.

    0 on most devices, and of what takes no such units (`with_whole_units`).
    """
    longer_s = np.zeros(len(ops))
    own = Figures.of(device)
    whole = with_whole_units(own)
    products = {i: op for i, op in enumerate(ops) if isinstance(op, KernelOp) and op.uses_matrix_units}
    if whole is own or not products:
        return longer_s
    for members, rows in rows_by_family(list(products.values())):
        at = np.array(list(products))[members]
        longer_s[at] = least_of_rows(own, rows) - least_of_rows(whole, rows)
    return longer_s


def _of_ops(
    seconds: Callable[[Figures, Rows], Float64[np.ndarray, "n"]], device: Device, ops: Sequence[KernelOp]
) -> Float64[np.ndarray, "n"]:
    # weights files know no 4-bit rate, so figures have none: only a roofline asks for it
    figures = Figures.of(device)
    figures = replace(figures, peaks=figures.peaks | {"fp4": device.peak.flops_per_s("fp4")})
    time_s = np.zeros(len(ops))
    for members, rows in rows_by_family(ops):
        time_s[members] = seconds(figures, rows)
    return time_s


def rows_by_family(ops: Sequence[KernelOp]) -> Iterator[tuple[np.ndarray, Rows]]:
    """Group ops by family as rows, with their positions."""
    by_family: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        by_family.setdefault(op.family, []).append(index)
    for members in by_family.values():
        yield np.array(members), rows_from_ops([ops[i] for i in members])


def as_measured(device: Device, op: KernelOp) -> KernelOp:
    """Return the kernel in the nearest measured element type that the device supports.

    Another type for 4-bit floats and 8-bit integers alone, of which there are no measurements.
    """
    if op.dtype not in _UNMEASURED:
        return op
    # 8 bits before 16, as the narrowest type runs most like it
    return replace(op, dtype=next(name for name in ("fp8", "bf16", "fp16", "fp32") if name in device.dtypes))


def wider(device: Device, op: KernelOp) -> KernelOp:
    """Return the product with elements twice as wide, for unmeasured types.

    The op itself for any other type, and where the device has no wider one.
    """
    if not op.is_matmul:
        return op
    dtype = next((name for name in _WIDER.get(op.dtype, ()) if name in device.dtypes), op.dtype)
    return replace(op, dtype=dtype) if dtype != op.dtype else op


def measured_work(table: "pd.DataFrame", device: Device) -> "pd.DataFrame":
    """Work and time of every measured kernel of a device, for a roofline.

    Args:
        table: measured kernels, as `perfmodel.ingest.tables.read_table` reads them.

    Returns:
        A row per kernel that can be read: `family`, `dtype`, `flops`, `bytes` (compulsory traffic), `time_s`.
    """
    import pandas as pd

    on_device = relabel(np.asarray(table["device"]), device_name) == device.name
    parts = []
    for family in FAMILIES:
        family_rows = pd.DataFrame(table[on_device & (table["op_family"] == family)])
        if family_rows.empty:
            continue
        # Rows that lack a size or have a type that the family does not know have a reason, and no place in a roofline.
        queries = table_rows(family_rows, family)
        readable = np.flatnonzero(queries.reasons == "")
        rows = queries.rows.take(readable)
        physics, _ = kernel_physics(Figures.of(device), rows)
        columns = {
            "family": family,
            "dtype": np.asarray(family_rows["dtype"])[readable],
            "flops": physics.flops,
            "bytes": physics.bytes,
            "time_s": np.asarray(family_rows["time_us"], float)[readable] * 1e-6,
        }
        parts.append(pd.DataFrame(columns))
    empty = pd.DataFrame(columns=["family", "dtype", "flops", "bytes", "time_s"])
    return pd.concat(parts, ignore_index=True) if parts else empty
