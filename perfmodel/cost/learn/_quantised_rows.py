"""Products of 8 bits that were timed together with the quantising of their first operand."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn._rows import Rows
from perfmodel.cost.learn._stack import Figures

_LAUNCHES_S: Final = 14e-6
"""Time of the few small kernels that find an operand's scale, whatever its size."""
_BYTES: Final = 5.0
"""Per element: 16 bits read for the maximum; then read again, and 8 bits written."""
_SHARE: Final = {"GH100": 0.61, "GB100": 0.55}
"""Share of the memory bandwidth at which they move, by die; elsewhere all of it. Like `_LAUNCHES_S` what the rows'
times tend to as n goes to 0, over m k (aiconfigurator's products of 8 bits on H100, B300 and GB300; those of 16 bits
tend to nothing; on L40S and RTX PRO 6000 it is the whole bandwidth)."""
_LEAST: Final = 0.25
"""Share of a row's time that is left to its product at least."""


def log_product_share(
    rows: Rows, log_time: Float64[np.ndarray, "n"], figures: Sequence[Figures]
) -> Float64[np.ndarray, "n"]:
    """Log of the part of `log_time` that products [m, k] x [k, n] take without the quantising of [m, k], each on the
    device of its figures."""
    elements = np.asarray(rows.shape["m"] * rows.shape["k"] * rows.shape["batch"] * rows.shape["groups"], float)
    bytes_per_s = np.array([f.bandwidth * _SHARE.get(f.die, 1.0) for f in figures])
    quantising_s = _LAUNCHES_S + _BYTES * elements / bytes_per_s
    return np.log(np.maximum(1.0 - quantising_s * np.exp(-log_time), _LEAST))
