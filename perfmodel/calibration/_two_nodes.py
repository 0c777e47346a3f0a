"""Measurements on two nodes that determine a collective's time on more (DistSim section 4.2)."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfmodel.ops import Collective
from perfmodel.spec import Cluster
from perfmodel.units import dtype_bytes

ALL_REDUCE_RANKS: Final = 8
"""Ranks beyond which an all-reduce is extrapolated (DistSim section 4.2)."""


@dataclass(frozen=True)
class Reachable:
    """The measurements that determine a collective's time."""

    ops: tuple[Collective, ...]
    """The collective itself, or similar collectives with fewer ranks from which it is extrapolated, the largest
    first."""
    exact: bool
    """Whether the collective itself is measured."""


def reachable(op: Collective, cluster: Cluster, *, nodes: int = 2) -> Reachable:
    """Find measurements on at most `nodes` nodes that determine the time of `op`.

    A collective that fits is measured as it is, alone: that like groups share the links at the same time is what
    `CollectiveModel` adds from the stated bandwidths. One of more nodes, or an all-reduce of more than
    `ALL_REDUCE_RANKS` ranks, is measured with the same bytes, as many ranks to a node as it has and may have, at
    the largest feasible rank count and at half of it: from these `CollectiveModel` extrapolates (hops grow with
    the ranks, the bytes a rank sends with 2 (n - 1) / n), or `distsim_all_reduce_time` from the largest alone.
    """
    most = ALL_REDUCE_RANKS if op.collective == "all_reduce" else op.num_ranks
    if op.num_nodes <= nodes and op.num_ranks <= most:
        return Reachable((_on_ranks(op, op.num_ranks, op.ranks_per_node),), True)

    # As many ranks to a node as fit, and half of them: two sizes tell how time grows with ranks.
    span = min(op.num_nodes, nodes)
    per_node = min(op.ranks_per_node, max(1, most // span), cluster.devices_per_node)
    ops = []
    for size in dict.fromkeys((per_node, per_node // 2)):
        # A group of one rank sends nothing.
        if size and span * size > 1:
            ops.append(_on_ranks(op, span * size, size))
    return Reachable(tuple(ops), False)


def _on_ranks(op: Collective, ranks: int, per_node: int) -> Collective:
    """The collective over other ranks, with no other group beside it and whole elements on each rank."""
    unit = dtype_bytes(op.dtype) * ranks
    n_bytes = max(unit, int(op.bytes) // unit * unit)
    return replace(
        op,
        bytes=float(n_bytes),
        num_ranks=ranks,
        ranks_per_node=per_node,
        level=int(ranks > per_node),
        concurrent=1,
    )


def distsim_all_reduce_time(time_of_8_s: float | np.ndarray, ranks: float | np.ndarray) -> float | np.ndarray:
    """All-reduce time [s] of more than 8 ranks from the measured time of 8 (DistSim section 4.2).

    The bytes a device sends are 2 (N - 1) P / N, so the time scales by `[2 (N - 1) / N] / [2 * 7 / 8]`;
    the latency, which does grow with N, is left out: a baseline, not what `CollectiveModel` uses.
    """
    return time_of_8_s * ((ranks - 1) / ranks) / (7 / 8)
