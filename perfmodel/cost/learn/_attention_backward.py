"""Backward of fused attention by its forward, on dies where the two were timed side by side."""

from typing import Final

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn._rows import Rows
from perfmodel.ops import ATTENTION_MASKS

_WIDE: Final = 128
"""Elements per head beyond which backward keeps fewer tiles in registers."""
_OVER_FORWARD: Final = {
    ("GH100", "half"): (2.99, 3.85),
    ("GH100", "fp8"): (4.27, 5.50),
    ("GB100", "half"): (3.11, 3.70),
    ("GB100", "fp8"): (3.31, 3.19),
}
"""Time of backward over that of forward, of heads of up to `_WIDE` elements and of wider ones: medians over the
benchmarks of NVIDIA/cudnn-frontend (H200: 1.19.0, GB200: 1.21.1), sequences of 2k to 75k tokens, both masks, backward
not deterministic where that was timed. GH100 has no wide heads in 8 bits: their ratio is taken to grow as in 16."""


def goes_by_forward(kind: str, die: str) -> bool:
    """Whether a kind is the backward of attention on a die where it was timed beside its forward."""
    dtype, op, direction = kind.split("/")
    return op in ATTENTION_MASKS and direction == "bwd" and (die, dtype) in _OVER_FORWARD


def forward_rows(rows: Rows) -> Rows:
    """The forward of rows of backward."""
    kinds = np.array([f"{kind.rpartition('/')[0]}/fwd" for kind in rows.kind], object)
    return Rows(rows.family, rows.shape, kinds)


def log_over_forward(rows: Rows, die: np.ndarray) -> Float64[np.ndarray, "n"]:
    """Log of the time of backward over that of forward, on the die of each row [n]."""
    usual = np.array([_OVER_FORWARD[of, kind.partition("/")[0]] for of, kind in zip(die, rows.kind, strict=True)])
    return np.log(np.where(np.asarray(rows.shape["head_dim"]) > _WIDE, usual[:, 1], usual[:, 0]))
