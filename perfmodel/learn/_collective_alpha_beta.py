"""Closed-form time of collectives: steps x alpha + bytes / bandwidth (+ reduced bytes x gamma).

One row of `TERMS` per algorithm; the formulas are those of Hockney-style models:

- ring, recursive doubling and halving, Rabenseifner, pairwise, Bruck: Thakur, Rabenseifner and Gropp,
  "Optimization of collective communication operations in MPICH", IJHPCA 19(1) 2005, sections 4.1-4.5;
  Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; the ring all-reduce as used
  for deep learning: Baidu, baidu-allreduce (2017).
- double binary tree: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
  reduction and scan", Parallel Computing 35, 2009.
- binomial and scatter-allgather broadcast: Chan, Heimlich, Purkayastha and van de Geijn, "Collective
  communication: theory, practice, and experience", CCPE 19, 2007, sections 4-5.
- in-switch reduction: each rank sends and receives the buffer once, 1 + 1/n of it counting its own share.

Every function takes NumPy or JAX arrays alike and is differentiable in all real arguments.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np

from perfmodel.errors import UnknownNameError

Array = Any
"""A NumPy or JAX array, or a Python number."""


def namespace(*arrays: Array) -> ModuleType:
    """`jax.numpy` if any argument is a JAX array (or tracer), else `numpy`; imports JAX for nobody else."""
    jax = sys.modules.get("jax")
    if jax is not None and any(isinstance(a, jax.Array) for a in arrays):
        return jax.numpy
    return np


@dataclass(frozen=True)
class Terms:
    """What one algorithm does with `n` ranks, as multiples of alpha and of the buffer size."""

    steps: Callable[[Array], Array]
    """Messages in sequence."""
    volume: Callable[[Array], Array]
    """Bytes that the busiest rank sends, as a multiple of the buffer."""
    reduced: Callable[[Array], Array] = lambda n: 0.0 * n
    """Bytes that the busiest rank adds up, as a multiple of the buffer."""


def _log2(n: Array) -> Array:
    return namespace(n).log2(n)


def _ceil_log2(n: Array) -> Array:
    return namespace(n).ceil(_log2(n) - 1e-9)


def _share(n: Array) -> Array:
    return (n - 1) / n


TERMS: Final[dict[tuple[str, str], Terms]] = {
    ("all_reduce", "ring"): Terms(lambda n: 2 * (n - 1), lambda n: 2 * _share(n), _share),
    ("all_reduce", "tree"): Terms(lambda n: 2 * _ceil_log2(n), lambda n: 2 * _share(n), _share),
    ("all_reduce", "recursive_doubling"): Terms(_ceil_log2, _ceil_log2, _ceil_log2),
    ("all_reduce", "rabenseifner"): Terms(lambda n: 2 * _ceil_log2(n), lambda n: 2 * _share(n), _share),
    ("all_reduce", "in_switch"): Terms(lambda n: 2.0 * (n > 1), lambda n: (n > 1) * (1 + 1 / n)),
    ("all_gather", "ring"): Terms(lambda n: n - 1, _share),
    ("all_gather", "recursive_doubling"): Terms(_ceil_log2, _share),
    ("reduce_scatter", "ring"): Terms(lambda n: n - 1, _share, _share),
    ("reduce_scatter", "recursive_halving"): Terms(_ceil_log2, _share, _share),
    ("all_to_all", "pairwise"): Terms(lambda n: n - 1, _share),
    ("all_to_all", "bruck"): Terms(_ceil_log2, lambda n: _ceil_log2(n) / 2),
    ("send_recv", "direct"): Terms(lambda n: 1.0 * (n > 1), lambda n: 1.0 * (n > 1)),
    ("broadcast", "binomial"): Terms(_ceil_log2, _ceil_log2),
    ("broadcast", "tree"): Terms(_ceil_log2, lambda n: 1.0 * (n > 1)),
    ("broadcast", "scatter_all_gather"): Terms(lambda n: _ceil_log2(n) + n - 1, lambda n: 2 * _share(n)),
}
"""(collective, algorithm) -> terms. `tree` is the pipelined double binary tree."""


def alpha_beta_time(
    collective: str,
    algorithm: str,
    buffer_bytes: Array,
    ranks: Array,
    alpha_s: Array,
    bandwidth_bytes_per_s: Array,
    gamma_s_per_byte: Array = 0.0,
) -> Array:
    """Textbook time [s] of one collective on one tier: `steps alpha + volume S / B + reduced S gamma`.

    Args:
        collective, algorithm: a key of `TERMS`.
        buffer_bytes: S, as nccl-tests counts it (`Collective.bytes`); shape broadcastable with the rest.
        ranks: n as a real number, so that the time is differentiable in it where the formula is.
        alpha_s: latency of one message [s].
        bandwidth_bytes_per_s: one-way bandwidth of a rank.
        gamma_s_per_byte: time to add one byte.

    Raises:
        UnknownNameError: for a pair that has no formula.

    >>> round(alpha_beta_time("all_reduce", "ring", 1e9, 4, 1e-6, 1e9), 6)
    1.500006
    """
    try:
        terms = TERMS[collective, algorithm]
    except KeyError:
        known = [f"{c}/{a}" for c, a in TERMS]
        raise UnknownNameError("collective algorithm", f"{collective}/{algorithm}", known) from None
    latency_s = terms.steps(ranks) * alpha_s
    transfer_s = terms.volume(ranks) * buffer_bytes / bandwidth_bytes_per_s
    return latency_s + transfer_s + terms.reduced(ranks) * buffer_bytes * gamma_s_per_byte


def distsim_all_reduce_time(time_of_8_s: Array, ranks: Array) -> Array:
    """All-reduce time [s] of more than 8 ranks from the measured time of 8 (DistSim section 4.2).

    The bytes a device sends are 2 (N - 1) P / N, so the time scales by `[2 (N - 1) / N] / [2 * 7 / 8]`;
    the latency, which does grow with N, is left out: a baseline, not what `CollectiveModel` uses.
    """
    return time_of_8_s * ((ranks - 1) / ranks) / (7 / 8)


def larger(a: Array, b: Array, sharpness: Array = 3.0) -> Array:
    """Smooth maximum `(a^p + b^p)^(1/p)` of two times >= 0: their maximum for p -> inf, their sum for p = 1.

    Latency overlaps transfer in pipelined collectives, so that measured times lie nearer the maximum.
    """
    xp = namespace(a, b)
    top = xp.maximum(xp.maximum(a, b), 1e-30)
    return top * ((a / top) ** sharpness + (b / top) ** sharpness) ** (1 / sharpness)


def smaller(a: Array, b: Array, sharpness: float = 8.0) -> Array:
    """Smooth minimum of two times > 0: what a library that picks the faster of two ways takes.

    The mean weighted by `t^-p`, so that two equal times give just that time.
    """
    xp = namespace(a, b)
    a, b = xp.maximum(a, 1e-30), xp.maximum(b, 1e-30)
    low = xp.minimum(a, b)
    weight_a, weight_b = (low / a) ** sharpness, (low / b) ** sharpness
    return (a * weight_a + b * weight_b) / (weight_a + weight_b)
