"""Analytical kernel times at typical shares of the nominal rates, and under a power limit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeGuard

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn import PriceQuery, kernel_physics, table_rows
from perfmodel.cost.learn.collectives import device_name
from perfmodel.cost.learn.parameters import power_join
from perfmodel.cost.learn.rows import Rows, rows_from_ops
from perfmodel.cost.learn.stack import Figures, with_whole_units
from perfmodel.ingest.tables import relabel
from perfmodel.ops import FAMILIES, Attention, Convolution, Gemm, KernelOp, MoE, Op
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
"""Power of the norm that joins compute and memory time: between their sum (1) and the longer of
them (inf)."""
_WIDER: Final = {"fp4": ("fp8",), "int8": ("bf16", "fp16")}
"""Element types with twice the bits, for unmeasured types."""
_UNMEASURED: Final = ("fp4", "int8")
_LARGEST_TILE: Final = 512
"""Most queries or keys of a tile of fused attention: FlashAttention, cuDNN and AITER have 64 to
256."""
_FEW_CORES: Final = 4
"""Most compute units of a TPU."""


def roofline_time(figures: Figures, rows: Rows) -> Float64[np.ndarray, "n"]:
    """Seconds of every row by the wave-quantised roofline, without measurements.

    fixed + (compute^3 + memory^3)^(1/3), where compute is the wave-quantised work over 65 % of the
    peak rate, or what the vector lanes take if that is longer, and memory the compulsory traffic
    over 75 % of the bandwidth (roofline: Williams et al., CACM 52(4), 2009).
    """
    physics, machine = kernel_physics(figures, rows)
    # tensor units and vector lanes work side by side: the longer of the two counts
    compute = np.maximum(
        physics.quantised_flops / (machine.peak * COMPUTE_SHARE),
        physics.vector_ops / vector_rate(np, machine),
    )
    memory = physics.bytes / (machine.bandwidth * MEMORY_SHARE)
    return FIXED_S + power_join(np, compute, memory, _POWER)


def least_of_rows(figures: Figures, rows: Rows) -> Float64[np.ndarray, "n"]:
    """Lower bound of each row's time if it is a matrix product: its FLOPs at the nominal rate."""
    physics, machine = kernel_physics(figures, rows)
    return physics.flops / machine.peak


def roofline_seconds(device: Device, ops: Sequence[KernelOp]) -> Float64[np.ndarray, "n"]:
    """Seconds of ops of any families on a device by the roofline alone (`roofline_time`)."""
    return _seconds_by_family(roofline_time, device, ops)


def least_seconds(device: Device, ops: Sequence[KernelOp]) -> Float64[np.ndarray, "n"]:
    """Lower bounds of ops' times on a device, for matrix products (`least_of_rows`)."""
    return _seconds_by_family(least_of_rows, device, ops)


def slowed_unit_seconds(device: Device, ops: Sequence[Op]) -> Float64[np.ndarray, "n"]:
    """Seconds by which the FLOPs of ops take longer than with the fastest tensor units of the
    device's die.

    0 on most devices, and of what takes no such units (`with_whole_units`).
    """
    longer_s = np.zeros(len(ops))
    figures = Figures.of(device)
    unslowed = with_whole_units(figures)
    products = {
        i: op for i, op in enumerate(ops) if isinstance(op, KernelOp) and op.uses_matrix_units
    }
    if unslowed is figures or not products:
        return longer_s
    for members, rows in rows_by_family(list(products.values())):
        product_index = np.array(list(products))[members]
        longer_s[product_index] = least_of_rows(figures, rows) - least_of_rows(unslowed, rows)
    return longer_s


def log_computed_share(request: PriceQuery) -> Float64[np.ndarray, "n"]:
    """Log of the longest time under a causal mask over that without one, at most 0.

    A fused kernel skips tiles of scores that the mask hides, and computes half in vain of those
    that it cuts. A tile of the last queries sees all keys, whoever waits for it: at worst a
    multiprocessor begins it when all others are done (FlashAttention-2, arXiv 2307.08691, sections
    3.2 and 3.3). Sliding windows, and rows of tables that mix phases, keep the bound of all scores;
    so do devices of few large cores, TPUs, whose tiles are a setting of the run and may be as large
    as the sequence (MaxText configs/base.yml, `sa_block_q`).
    """
    shape = request.rows.shape
    queries, keys = shape["seq_q"], shape["seq_kv"]
    all_pairs = queries * keys
    visible_pairs = np.where(
        keys >= queries, all_pairs - queries * (queries - 1) / 2, keys * (keys + 1) / 2
    )
    computed_share = (visible_pairs + queries * _LARGEST_TILE / 2) / all_pairs

    tiles = shape["batch"] * shape["heads"] * np.ceil(queries / _LARGEST_TILE)
    units = request.of_query(lambda query: query.figures.units)
    last_tile_share = units / tiles

    has_window = (shape["window"] > 0) & (shape["window"] < keys)
    is_plain = ~has_window & (shape["mixed_n_decode"] == 0)
    has_small_tiles = units > _FEW_CORES
    return np.where(
        is_plain & has_small_tiles, np.log(np.minimum(computed_share + last_tile_share, 1.0)), 0.0
    )


def log_by_share_of_roofline(
    device: Device,
    ops: Sequence[KernelOp],
    stand_ins: Sequence[KernelOp],
    log_stand_in: Float64[np.ndarray, "n"],
) -> Float64[np.ndarray, "n"]:
    """Log seconds of ops in types that nobody measured, by the times of the same kernels in
    measured types.

    Each reaches the share of its roofline that its stand-in does, but no more than its nominal
    rate.
    """
    roofline_ratio = roofline_seconds(device, ops) / roofline_seconds(device, stand_ins)
    reached_s = np.exp(log_stand_in) * roofline_ratio
    return np.log(np.maximum(reached_s, least_seconds(device, ops)))


def _seconds_by_family(
    seconds: Callable[[Figures, Rows], Float64[np.ndarray, "n"]],
    device: Device,
    ops: Sequence[KernelOp],
) -> Float64[np.ndarray, "n"]:
    """Seconds of ops of any families, by a function of one family's rows."""
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
    return replace(
        op, dtype=next(name for name in ("fp8", "bf16", "fp16", "fp32") if name in device.dtypes)
    )


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
        A row per kernel that can be read: `family`, `dtype`, `flops`, `bytes` (compulsory traffic),
        `time_s`.
    """
    import pandas as pd

    on_device = relabel(np.asarray(table["device"]), device_name) == device.name
    parts = []
    for family in FAMILIES:
        family_rows = pd.DataFrame(table[on_device & (table["op_family"] == family)])
        if family_rows.empty:
            continue
        # Rows that lack a size or have a type that the family does not know have a reason, and no
        # place in a roofline.
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


# --- sustained products under a power limit
# ------------------------------------------------------------
#
# Tables time a kernel by itself, on a cool device and at its highest clock. Under load the clock
# falls until the power fits the limit. Voltage falls with it, and energy per operation with a power
# of the rate (`_VOLTAGE`).


@dataclass(frozen=True)
class DieEnergy:
    """Energy of arithmetic and memory traffic of a die at its power limit."""

    flop_j: float
    """Energy of a 16-bit FLOP in tensor units, random operands, at `unit_flops_per_s`."""
    unit_flops_per_s: float
    """16-bit rate of one multiprocessor at which `flop_j` was measured."""
    byte_j: float
    """Energy of a byte of memory traffic."""


_GA100: Final = DieEnergy(1.26e-12, 257e12 / 108, 118e-12)
"""A100 at 400 W: products of 8192 hold 257 TFLOP/s on random operands and 295 on zeros
(thonking.ai, strangely matrix multiplications, 2024). Energy per byte: power over bandwidth in the
fp64 ladders of te42kyfo/gpu-benches."""
_GH100: Final = DieEnergy(0.79e-12, 600e12 / 132, 122e-12)
"""Geometric mean of two sources of products on random operands, brought to one rate by `_VOLTAGE`;
their own in 16-bit FLOPs: 0.78 pJ at 600 TFLOP/s on H200 NVL at 600 W (a layer's products, 19.2
TFLOP, take 32.0 ms 100 times in a row, Transformer Engine 2, docs/examples/gemm_profiling); 0.85 pJ
at 675 on H200 at 700 W (8 bits, 8192 and 16384 after 10,000 others, Azure AI benchmarking guide,
results of ND H200 v5). Energy per byte: as for GA100, on H200."""
_GB100: Final = DieEnergy(0.572e-12, 1200e12 / 148, 103e-12)
"""Geometric mean of four sources of products on random operands, brought to one rate by `_VOLTAGE`;
their own in 16-bit FLOPs: 0.54 pJ at 1,300 TFLOP/s and 0.65 pJ at 1,080 on B200 at 1,000 W (the
median of six large products in steady 10 s loops, arjunds/efficient-ai, GPU_power/microbench; and
of 178 products of 1.5 ms and longer, SimuMax 1.2, configs/system/b200_bf16_ceperm.json, the limit
taken to be nominal); 0.62 pJ at 1,470 on GB200 at 1,200 W and 0.635 pJ at 1,740 on GB300 at 1,400 W
(8 bits, 8192 and 16384 after 10,000 others, Azure AI benchmarking guide, results of ND GB200 v6 and
ND GB300 v6); 0.39 pJ at 617 on GB300 at 500 W (facebookexperimental/triton, pull request 2023).
Energy per byte: streams that the limit holds back (efficient-ai)."""
_GFX942: Final = DieEnergy(0.997e-12, 700e12 / 304, 122e-12)
"""Geometric mean of MI325X and MI300X, brought to one rate by `_VOLTAGE`; their own: 1.10 pJ at 785
TFLOP/s and 1,000 W, 0.93 pJ at 668 and 750 W (best products of a search over shapes, means of 100
after 50 others, stas00/ml-engineering, compute/accelerator/benchmarks; the limits taken to be
nominal). Energy per byte assumed as for GH100."""
_VOLTAGE: Final = 0.47
"""Exponent of the rate in the energy per FLOP: of GB300 between 500 W and 1,400 W, the two sources
above. Squared voltage would give 2, but voltage falls little at low clocks."""
_OF_DIE: Final = {"GA100": _GA100, "GH100": _GH100, "GB100": _GB100, "gfx942": _GFX942}
_WIDTH: Final = {
    "tf32": 2.0,
    "bf16": 1.0,
    "fp16": 1.0,
    "fp8": 0.525,
    "int8": 0.525,
    "fp4": 4.5 / 16,
}
"""Energy of a FLOP relative to a 16-bit one. Of 8 bits: a layer's products take 16.8 ms on H200
NVL, those of 16 bits 32.0 (Transformer Engine 2, docs/examples/gemm_profiling). Of others assumed
to go with the bits of the operands, of which 4-bit floats share a scale of 8 bits among 16
(NVFP4)."""
_STEPS: Final = 4
"""Iterations until the last digits are exact; the first guess is less than a half too low, most so
where both times are equal."""
_HALVINGS: Final = 40
"""Bisection steps of the search for the sustained share of the peak rate (`sustained_share`)."""
TENSOR_TYPES: Final = tuple(_WIDTH)
"""Element types of tensor units, whose products a power limit slows."""


def has_power_law(device: Device) -> bool:
    """Whether a device's power limit and its die's energies are known."""
    return device.die in _OF_DIE and device.power_w is not None and device.idle_power_w is not None


def sustained_seconds(device: Device, ops: Sequence[Op]) -> Float64[np.ndarray, "n"]:
    """Least times of ops under the power limit; 0 if unknown or not binding.

    Solves (P_limit - P_idle) t = E_memory + E_compute (t_ref / t)^v for t. Here t_ref is the time
    at the rate at which the energy per FLOP was measured, and v is `_VOLTAGE` (Horowitz, ISSCC
    2014, section 1: energy grows with the square of the voltage, which the clock needs).
    """
    least_s = np.zeros(len(ops))
    energy = _OF_DIE.get(device.die)
    # as `has_power_law` says, for the type checker
    if energy is None or device.power_w is None or device.idle_power_w is None:
        return least_s
    budget_w = device.power_w - device.idle_power_w
    if budget_w <= 0:
        return least_s

    # Energies of all traffic, and of all arithmetic at the rate at which a FLOP's was measured.
    index: list[int] = []
    products: list[KernelOp] = []
    for i, op in enumerate(ops):
        if _takes_tensor_units(op):
            index.append(i)
            products.append(op)
    if not index:
        return least_s
    memory_j, compute_j = _energies_j(energy, device, products)

    # Newton's method from below, as the energy that fits is concave in the time. It begins at the
    # longer one of traffic and arithmetic alone.
    time_s = np.maximum(memory_j / budget_w, (compute_j / budget_w) ** (1 / (1 + _VOLTAGE)))
    for _ in range(_STEPS):
        short_j = memory_j + compute_j * time_s**-_VOLTAGE - budget_w * time_s
        time_s += short_j / (budget_w + _VOLTAGE * compute_j * time_s ** (-1 - _VOLTAGE))
    least_s[index] = time_s
    return least_s


def under_load(
    device: Device, ops: Sequence[Op], alone_s: Float64[np.ndarray, "n"], share: float = 1.0
) -> Float64[np.ndarray, "n"]:
    """Slowdown of events in sequence, relative to isolated ones; 1 if the power limit does not
    bind.

    Args:
        share: time of a kernel in a step, as a share of the time in which it alone keeps to the
            power limit (`sustained_share`).
    """
    return np.maximum(share * sustained_seconds(device, ops) / np.maximum(alone_s, 1e-300), 1.0)


def sustained_share(
    device: Device,
    ops: Sequence[KernelOp],
    counts: Float64[np.ndarray, "n"],
    alone_s: Float64[np.ndarray, "n"],
) -> float:
    """Share of the sustained slowdown that applies to power-limited kernels in a step, because
    other kernels save power.

    The limit holds on average over tens of milliseconds, in which a device runs many kernels: norms
    and casts below the limit leave power for products above it. The result is the least x with

        sum n (E_memory + E_compute (t_ref / t(x))^v) <= (P_limit - P_idle) sum n t(x)
        with t(x) = max(t, x t_sustained),

    where t is the time of a kernel timed alone, and t_sustained the time in which it keeps to the
    limit by itself (`sustained_seconds`).

    The energy of attention has not been measured: besides its products it computes exponentials and
    row sums, which its FLOPs leave out. It is assumed to draw at least the limit, so that it leaves
    no power for products.

    Args:
        counts: number of runs of each kernel (n).
        alone_s: times at the clock of a kernel timed alone (t).

    Returns:
        Between 0 (no kernel is slowed down) and 1 (each keeps to the limit by itself); 1 if the
        limit is unknown.
    """
    energy = _OF_DIE.get(device.die)
    if energy is None or device.power_w is None or device.idle_power_w is None:
        return 1.0
    budget_w = device.power_w - device.idle_power_w
    if budget_w <= 0:
        return 1.0
    pays = np.array([not isinstance(op, Attention) for op in ops])
    memory_j, compute_j = _energies_j(energy, device, ops)
    sustained_s = sustained_seconds(device, ops)

    def excess_j(share: float) -> float:
        time_s = np.maximum(np.maximum(alone_s, share * sustained_s), 1e-300)
        excess = memory_j + compute_j * time_s**-_VOLTAGE - budget_w * time_s
        return float(counts @ np.where(pays, excess, np.maximum(excess, 0.0)))

    # Energy falls and time rises with the share, so there is one from which on the limit holds. At
    # 1 it does: every kernel fits by itself.
    low, high = 0.0, 1.0
    if excess_j(low) <= 0:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess_j(middle) > 0 else (low, middle)
    return high


def _energies_j(
    energy: DieEnergy, device: Device, ops: Sequence[KernelOp]
) -> tuple[np.ndarray, np.ndarray]:
    """Energies of kernels' traffic, and of their tensor-unit arithmetic as if it took one second.

    Arithmetic that takes t seconds needs the latter times t to the power of -`_VOLTAGE`.
    """
    width = np.array([_WIDTH[op.dtype] if _takes_tensor_units(op) else 0.0 for op in ops])
    flops, moved_bytes = np.array([op.amounts() for op in ops]).T
    flops = flops * width
    reference_s = flops / (energy.unit_flops_per_s * device.compute_units)
    return energy.byte_j * moved_bytes, energy.flop_j * flops * reference_s**_VOLTAGE


def _takes_tensor_units(op: Op) -> TypeGuard[Attention | Convolution | Gemm | MoE]:
    """Whether a kernel runs on tensor units, which the power limit slows."""
    return isinstance(op, (Attention, Convolution, Gemm, MoE)) and op.dtype in _WIDTH
