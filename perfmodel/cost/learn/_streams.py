"""Kernels that do little more than move their tensors: norms, by what they reach of the bandwidth on dies where they
were timed, and the least time of any kernel on devices other than its own."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from perfmodel.cost.learn._kinds import machine_of, shape_with_flags
from perfmodel.cost.learn._queries import Prediction, Query
from perfmodel.cost.learn._rows import Rows
from perfmodel.ops import FAMILIES, KernelKind


class _Shares(NamedTuple):
    """Shares of the memory bandwidth that a norm reaches beyond `_FIXED_S`."""

    forward: float
    backward: float


_NORMS: Final = ("layer_norm", "rms_or_layer_norm")
_FIXED_S: Final = 4e-6
_FUSED: Final = {"GH100": _Shares(0.84, 0.74), "GB100": _Shares(0.87, 0.65)}
_BY_SOFTWARE: Final = {
    ("GH100", "pytorch"): _Shares(0.68, 0.33),
    ("GB100", "pytorch"): _Shares(0.64, 0.27),
    ("GH100", "torch_compile"): _Shares(0.90, 0.38),
    ("GB100", "torch_compile"): _Shares(0.75, 0.30),
}
"""Medians over RMS norms of 40 MB of traffic and more, in 16 bits (NVIDIA/cudnn-frontend 1.19.0, benchmark/norms, on
H200 and GB200). `_FUSED`: cuDNN's, for which those of Transformer Engine and Apex stand too."""
_HALF_WIDTH: Final = 0.3
"""Half-width of the 90 % interval, in log time: the shapes scatter by so much around their median."""
STREAM_SHARE: Final = 0.92
"""Share of the nominal bandwidth that long streams reach: 7,394 of 8,000 GB/s on B200 (arjunds/efficient-ai,
GPU_power/microbench), and Liger-Kernel 0.8's SwiGLU on H100."""
_COUNTED: Final = {"quantize_fp8_static": 3 / 4}
"""Bytes that a kernel moves over those that its elements count: of two, one is written in 8 bits."""


def goes_by_bandwidth(kind: KernelKind, die: str) -> bool:
    """Whether a kind is a norm in 16 bits on a die where fused norms were timed."""
    return kind.dtype == "half" and kind.op in _NORMS and kind.pass_ in ("fwd", "bwd") and die in _FUSED


def norm_times(rows: Rows, queries: Sequence[Query], query: Int64[np.ndarray, "n"]) -> Prediction:
    """Times of norms, row i on `queries[query[i]]`, by the software of that name where it was timed."""
    shares = np.array([[share * q.figures.bandwidth for share in _shares(q)] for q in queries])
    backward = rows.by_kind(lambda kind: int(kind.pass_ == "bwd"))
    log_time = np.log(_FIXED_S + _bytes(rows, queries, query) / shares[query, backward])
    return Prediction(log_time, log_time - _HALF_WIDTH, log_time + _HALF_WIDTH, np.ones(len(rows), np.int64))


def log_least(rows: Rows, queries: Sequence[Query], query: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Log of the time in which what the last-level cache cannot hold streams through memory; -inf where it holds
    all. Row i on `queries[query[i]]`."""
    l2, bandwidth = np.array([[q.figures.l2, q.figures.bandwidth] for q in queries])[query].T
    counted = rows.by_kind(lambda kind: _COUNTED.get(kind.op, 1.0))
    beyond = np.maximum(_bytes(rows, queries, query) * counted - l2, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(beyond / (STREAM_SHARE * bandwidth))


def _shares(query: Query) -> _Shares:
    """Of the software asked for; any on a die where none was timed."""
    word, die = (query.software or "").partition(";")[0], query.figures.die
    return _BY_SOFTWARE.get((die, word), _FUSED.get(die, _Shares(1.0, 1.0)))


def _bytes(rows: Rows, queries: Sequence[Query], query: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    machine = machine_of([q.figures for q in queries], query, rows.dtypes)
    return FAMILIES[rows.family].physics(np, shape_with_flags(rows), machine).bytes
