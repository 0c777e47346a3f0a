"""Building blocks of kernel formulas: machine figures, quantities per row, tiles and waves.

Every function takes the array namespace `xp` (numpy for the hot path, jax.numpy where gradients
with respect to shapes or device figures are wanted), so each formula has one home.
"""

from typing import Any, Final, NamedTuple

from jaxtyping import Float


class Machine(NamedTuple):
    """Nominal figures of the device that each row runs on (arrays [n] or scalars)."""

    peak: Float[Any, "n"]
    """FLOP/s of the row's element type."""
    bandwidth: Float[Any, "n"]
    """Memory bandwidth in bytes/s."""
    units: Float[Any, "n"]
    """Number of multiprocessors."""
    l2: Float[Any, "n"]
    """Last-level cache in bytes."""
    clock: Float[Any, "n"]
    """Boost clock in Hz."""


class Physics(NamedTuple):
    """Per-row quantities of a family, arrays [n]."""

    flops: Any
    quantised_flops: Any
    """FLOPs with padded tiles and whole waves."""
    bytes: Any
    """Compulsory memory traffic."""
    features: list[Any]
    """Further inputs of the regressor, in a fixed order."""
    axes: list[Any]
    """Log2 positions for the per-stack tables, in the order of the family's axes."""
    vector_ops: Any = 0.0
    """Operations issued to the vector lanes rather than to the tensor units."""
    cached: Any = 0.0
    """Share of the traffic that the last-level cache serves when a kernel is run again and
    again."""


_LANES: Final = 128.0
"""Vector lanes of a multiprocessor that can start an operation in one cycle."""
_MANY_UNITS: Final = 8
"""Number of multiprocessors from which a device does not count as one with few wide cores (TPU)."""
_CACHE_BYTES: Final = 38.0
"""Bytes per cycle between a multiprocessor and the last-level cache: 64 nominally, 60 % of it
reached."""
_CACHE_EDGE: Final = 2.0
"""Sharpness of the fall in hits as the working set outgrows the cache."""
_TILES: Final = (
    (64, 64, 0.70),
    (128, 64, 0.85),
    (128, 128, 1.0),
    (128, 256, 1.1),
    (256, 128, 1.1),
)
"""Output tile of a matrix-product kernel and its relative peak rate."""


def cached_share(working_set: Any, machine: Machine) -> Any:
    """Share of a working set (bytes) still in the last-level cache from the previous repetition."""
    # 1 for a set that fits many times over, 1/2 for one as large as the cache
    return 1.0 / (1.0 + (working_set / machine.l2) ** _CACHE_EDGE)


def vector_rate(xp: Any, machine: Machine) -> Any:
    """Operations per second of all vector lanes; at least a small share of the peak, for few wide
    cores."""
    # lanes are counted as those of a GPU's multiprocessor, of which a TPU has one or two with far
    # wider units
    return xp.maximum(machine.units * machine.clock * _LANES, machine.peak / 256.0)


def lane_operations(xp: Any, machine: Machine, operations: Any) -> Any:
    """Operations issued per vector lane; 0 for devices with few wide cores, which process whole
    vectors."""
    return xp.where(machine.units >= _MANY_UNITS, operations, 0.0)


def compute_seconds(xp: Any, physics: Physics, machine: Machine) -> Any:
    """Time of the arithmetic at nominal rates."""
    return physics.quantised_flops / machine.peak + physics.vector_ops / vector_rate(xp, machine)


def memory_seconds(xp: Any, physics: Physics, machine: Machine) -> Any:
    """Time of the traffic at nominal rates, of memory and of the cache in front of it."""
    # a cache is never slower than the memory behind it, whatever clock and multiprocessors say
    cache = xp.maximum(machine.units * machine.clock * _CACHE_BYTES, machine.bandwidth)
    return physics.bytes * ((1.0 - physics.cached) / machine.bandwidth + physics.cached / cache)


def log2(xp: Any, value: Any) -> Any:
    """log2 of a quantity that may be 0."""
    return xp.log2(xp.maximum(value, 1e-12))


def flag(xp: Any, value: Any) -> Any:
    """A condition as 0 or 1, in the precision that the namespace computes in."""
    return xp.asarray(value, xp.float64 if xp.__name__ == "numpy" else xp.float32)


def divides(xp: Any, value: Any, divisor: int) -> Any:
    """Whether a number is a multiple of another, as 0 or 1: kernels read aligned rows in wider
    loads."""
    return flag(xp, xp.mod(value, divisor) == 0)


def tiled(xp: Any, m: Any, n: Any, products: Any, units: Any) -> tuple[Any, list[Any], Any]:
    """Wave-quantised area of an output under the best tile, features of every tile, waves at
    128x128.

    A wave is one tile per multiprocessor; the last, partly filled wave costs a whole one
    (tile and wave quantisation; NeuSight, ASPLOS 2025, section 4.1).
    """
    # Every tile is tried, as libraries choose among kernels by shape: large tiles have the higher
    # rate, small ones leave fewer multiprocessors idle in the last wave. The regressor sees all of
    # them, as the choice may be another.
    best = None
    features = []
    waves_128 = None
    for rows, columns, rate in _TILES:
        tiles = products * xp.ceil(m / rows) * xp.ceil(n / columns)
        waves = tiles / units
        whole_waves = xp.ceil(waves)
        area = whole_waves * units * (rows * columns / rate)
        best = area if best is None else xp.minimum(best, area)
        fill = m * n * products / (tiles * (rows * columns))
        features += [waves / whole_waves, fill, log2(xp, whole_waves)]
        if (rows, columns) == (128, 128):
            waves_128 = waves
    return best, features, waves_128
