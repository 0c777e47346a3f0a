"""What physics formulas are made of: quantities per row, and how outputs are cut into tiles and waves.

Every function takes the array namespace `xp` (numpy for the hot path, jax.numpy where gradients
with respect to shapes or device figures are wanted), so each formula has one home.
"""

from typing import Any, Final, NamedTuple

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
