"""Fused attention as training runs it, from kernels that were timed otherwise: servers' without their caches; on dies
where training kernels were timed side by side, forward by that of 16 bits and equal heads, backward by forward."""

from typing import Final

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn._rows import Rows, kinds_of
from perfmodel.ops import ATTENTION_MASKS, KernelKind

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


_EQUAL_HEAD: Final = 128
"""Elements of a value from which longer queries and keys (192, latent attention) cost what their FLOPs do: kernels made
for them hold 1,585 and 643 TFLOP/s on GB200 and H200 at 8k causal tokens, those of equal heads 1,574 and 644 (the same
benchmarks). Serving tables have no such heads."""
_QUERY_HEADS: Final = 8
"""Heads of queries for one of keys, of which servers' kernels copy few into their caches, and were timed most."""
_NARROW_FORWARD: Final = {"GH100": (0.67, 0.67), "GB100": (0.77, 0.68)}
"""Time of a forward in 8 bits over that in 16, as `_OVER_FORWARD` by head; GH100 has no wide heads in 8 bits."""


def without_copies(rows: Rows, copied: np.ndarray) -> Rows:
    """Rows, of which those that are `copied` [n] are answered by kernels that fill a cache, as these take where there
    is little to copy: a kernel that reads keys where they lie takes as long for few heads of them as for many."""
    heads, kv_heads = (np.asarray(rows.shape[name], float) for name in ("heads", "kv_heads"))
    few = np.minimum(kv_heads, np.maximum(1.0, np.floor(heads / _QUERY_HEADS)))
    return rows.changed({"kv_heads": np.where(copied, few, kv_heads)})


def as_equal_heads(rows: Rows, die: np.ndarray, kept: np.ndarray) -> tuple[Rows, Float64[np.ndarray, "n"]]:
    """Rows of forward on the die of each row [n], in 16 bits and with heads of equal length where it is known how the
    others compare, and the log of their time over that of these; rows that are `kept` stay as they are."""
    forward = rows.by_kind(lambda kind: kind.op in ATTENTION_MASKS and kind.pass_ == "fwd")
    known = forward & ~kept & np.isin(die, list(_NARROW_FORWARD))
    head, value = (np.asarray(rows.shape[name], float) for name in ("head_dim", "head_dim_v"))
    longer, narrow = known & (value == _EQUAL_HEAD) & (head > value), known & (rows.dtypes == "fp8")
    shares = np.array([_NARROW_FORWARD.get(of, (1.0, 1.0)) for of in die])
    log_over = np.where(longer, np.log((head + value) / (2 * _EQUAL_HEAD)), 0.0)
    log_over += np.where(narrow, np.log(np.where(head > _WIDE, shares[:, 1], shares[:, 0])), 0.0)
    bytes_ = np.where(narrow, 2.0, rows.shape["element_bytes"])
    shape = rows.shape | {"head_dim": np.where(longer, value, head), "element_bytes": bytes_}
    columns = rows.columns._replace(dtype=np.where(narrow, "half", rows.dtypes).astype(object))
    return Rows(rows.family, shape, *kinds_of(columns)), log_over


def goes_by_forward(kind: KernelKind, die: str) -> bool:
    """Whether a kind is the backward of attention on a die where it was timed beside its forward."""
    return kind.op in ATTENTION_MASKS and kind.pass_ == "bwd" and (die, kind.dtype) in _OVER_FORWARD


def forward_rows(rows: Rows) -> Rows:
    """The forward of rows of backward."""
    return rows.changed({}, pass_="fwd")


def log_over_forward(rows: Rows, die: np.ndarray) -> Float64[np.ndarray, "n"]:
    """Log of the time of backward over that of forward, on the die of each row [n]."""
    usual = np.array([_OVER_FORWARD[of, dtype] for of, dtype in zip(die, rows.dtypes, strict=True)])
    return np.log(np.where(np.asarray(rows.shape["head_dim"]) > _WIDE, usual[:, 1], usual[:, 0]))
