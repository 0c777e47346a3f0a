"""What physics formulas are made of: quantities per row, tiles and waves; and the kernels bound by memory.

Every function takes the array namespace `xp` (numpy for the hot path, jax.numpy where gradients
with respect to shapes or device figures are wanted), so each formula has one home.
"""

from typing import Any, Final, NamedTuple

from perfmodel.cost.learn._stack import Machine
from perfmodel.spec import embedding_work, memory_work, optimizer_work

Columns = dict[str, Any]
"""Shape columns by name, arrays [n]."""


class Physics(NamedTuple):
    """Per-row quantities of a family, arrays [n]."""

    flops: Any
    quantised_flops: Any
    """FLOPs that the device is busy for, once tiles are padded and waves are whole."""
    bytes: Any
    """Compulsory memory traffic."""
    features: list[Any]
    """Further inputs of the regressor, in a fixed order."""
    axes: list[Any]
    """Log2 positions for the per-stack tables, in the order of `AXES`."""
    vector_ops: Any = 0.0
    """Operations issued to the vector lanes rather than to the tensor units."""
    cached: Any = 0.0
    """Share of the traffic that the last-level cache serves when a kernel is run again and again."""


_LANES: Final = 128.0
"""Vector lanes of a multiprocessor that can be issued to in one cycle."""
_CACHE_BYTES: Final = 38.0
"""Bytes per cycle between a multiprocessor and the last-level cache: 64 nominally, 60 % of it reached."""
_CACHE_EDGE: Final = 2.0
"""How sharply hits end where the working set outgrows the cache."""


def cached_share(working_set: Any, machine: Machine) -> Any:
    """Share of a working set (bytes) still in the last-level cache from the repetition before."""
    return 1.0 / (1.0 + (working_set / machine.l2) ** _CACHE_EDGE)


def vector_rate(xp: Any, machine: Machine) -> Any:
    """Operations per second of all vector lanes; at least a small share of the peak, for few wide cores."""
    return xp.maximum(machine.units * machine.clock * _LANES, machine.peak / 256.0)


def compute_seconds(xp: Any, physics: Physics, machine: Machine) -> Any:
    """Time of the arithmetic at nominal rates."""
    return physics.quantised_flops / machine.peak + physics.vector_ops / vector_rate(xp, machine)


def memory_seconds(xp: Any, physics: Physics, machine: Machine) -> Any:
    """Time of the traffic at nominal rates, of memory and of the cache in front of it."""
    cache = xp.maximum(machine.units * machine.clock * _CACHE_BYTES, machine.bandwidth)
    return physics.bytes * ((1.0 - physics.cached) / machine.bandwidth + physics.cached / cache)


_TILES: Final = ((64, 64, 0.70), (128, 64, 0.85), (128, 128, 1.0), (128, 256, 1.1), (256, 128, 1.1))
"""Output tile of a matrix-product kernel and its relative peak rate."""


def log2(xp: Any, value: Any) -> Any:
    return xp.log2(xp.maximum(value, 1e-12))


def flag(xp: Any, value: Any) -> Any:
    return xp.asarray(value, xp.float64 if xp.__name__ == "numpy" else xp.float32)


def divides(xp: Any, value: Any, by: int) -> Any:
    return flag(xp, xp.mod(value, by) == 0)


def tiled(xp: Any, m: Any, n: Any, products: Any, units: Any) -> tuple[Any, list[Any], Any]:
    """Wave-quantised area of an output under the best tile, features of every tile, waves at 128x128.

    A wave is one tile per multiprocessor; the last, partly filled wave costs a whole one
    (tile and wave quantisation; NeuSight, ASPLOS 2025, section 4.1).
    """
    best, features, waves_128 = None, [], None
    for rows, columns, rate in _TILES:
        tiles = products * xp.ceil(m / rows) * xp.ceil(n / columns)
        waves = tiles / units
        whole = xp.ceil(waves)
        area = whole * units * (rows * columns / rate)
        best = area if best is None else xp.minimum(best, area)
        fill = m * n * products / (tiles * (rows * columns))
        features += [waves / whole, fill, log2(xp, whole)]
        if (rows, columns) == (128, 128):
            waves_128 = waves
    return best, features, waves_128


_OPS_PER_ELEMENT: Final = 4.0
"""Operations that an element costs the vector lanes: addresses, load, conversion, arithmetic, store."""
_MANY_UNITS: Final = 8
"""Multiprocessors from which elements are issued one per lane; few wide cores (TPU) handle whole vectors."""


def memory(xp: Any, x: Columns, machine: Machine) -> Physics:
    """Element-wise and row-wise kernels."""
    rows, hidden = x["rows"], x["hidden"]
    elements, traffic = memory_work(xp, x)
    blocks = elements / (machine.units * 4096.0)
    per_unit = rows / machine.units
    resident = traffic / machine.l2
    features = [
        log2(xp, rows), log2(xp, hidden), log2(xp, elements), x["n_inputs"], log2(xp, resident),
        log2(xp, blocks), blocks / xp.ceil(blocks), log2(xp, per_unit), per_unit / xp.ceil(per_unit),
        log2(xp, hidden * x["element_bytes"]),
    ]  # fmt: skip
    features += [divides(xp, hidden, d) for d in (2, 4, 8, 128, 1024)]
    features += [divides(xp, elements, d) for d in (4, 512)]
    # fused softmax kernels (Megatron) want batch x heads = rows / hidden to be a multiple of four
    features += [divides(xp, rows, 4), flag(xp, xp.mod(rows, 4 * hidden) == 0), flag(xp, hidden > 2048)]
    axes = [log2(xp, v) for v in (rows, hidden, resident)]
    vector = xp.where(machine.units >= _MANY_UNITS, _OPS_PER_ELEMENT * elements, 0.0)
    return Physics(elements, elements, traffic, features, axes, vector, cached_share(traffic, machine))


def embedding(xp: Any, x: Columns, machine: Machine) -> Physics:
    """Rows gathered and written, or their gradients scattered."""
    tokens, hidden, vocab = x["tokens"], x["hidden"], x["vocab"]
    elements, traffic = embedding_work(xp, x)
    moved = elements * x["element_bytes"]
    table = vocab * hidden * x["element_bytes"]
    features = [
        log2(xp, tokens), log2(xp, hidden), log2(xp, vocab), log2(xp, moved / machine.l2),
        log2(xp, table / machine.l2), log2(xp, tokens / vocab), log2(xp, table / moved),
        divides(xp, hidden, 128), divides(xp, hidden, 1024),
    ]  # fmt: skip
    axes = [log2(xp, v) for v in (tokens, hidden, vocab)]
    return Physics(elements, elements, traffic, features, axes)


def optimizer(xp: Any, x: Columns, machine: Machine) -> Physics:
    """One update of all local parameters."""
    count, tensors = x["n_params"], x["tensors"]
    flops, traffic = optimizer_work(xp, x)
    features = [log2(xp, count), log2(xp, tensors), log2(xp, count / tensors), log2(xp, traffic / machine.l2)]
    return Physics(flops, flops, traffic, features, [log2(xp, count), log2(xp, tensors)])
